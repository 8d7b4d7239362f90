"""What a history lacks of a plan, so that short hours on a machine go to what was not measured there yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.history.store import Damage, Store
from harness.plan import Item

#: Outcomes that another try on the same kind of machine would only repeat.
KNOWN = ("passed", "skipped", "oom")

#: Technique, workload, ranks and variant.
Case = tuple[str, str, int, str]


def known_cases(stores: Iterable[Store], gpu: str) -> set[Case]:
    """Every case that the stores have an outcome of on a GPU type, at whatever commit; damaged lines count for none.

    A folder that is not there yet holds none.

    Raises:
        StoreError: a store that is there cannot be listed.
    """
    found: set[Case] = set()
    damage: list[Damage] = []
    for store in stores:
        if store.path is not None and not store.path.exists():
            continue
        for _, _, record in store.scan(damage):
            if record.get("type") == "measurement" and record.get("gpu") == gpu and record.get("status") in KNOWN:
                found.add((record["technique"], record["workload_id"], int(record["ranks"]), record["variant"]))
    return found


def lacking(items: Sequence[Item], known: set[Case]) -> list[Item]:
    """The plan without the workloads all of whose chosen variants are known. The others stay whole: a ratio needs both
    of its sides in one run."""

    def lacks(item: Item, workload_id: str) -> bool:
        cases = ((item.technique.name, workload_id, item.ranks, variant) for variant in item.variants)
        return any(case not in known for case in cases)

    kept = [replace(i, workloads=tuple(w for w in i.workloads if lacks(i, w.workload_id))) for i in items]
    return [item for item in kept if item.workloads]
