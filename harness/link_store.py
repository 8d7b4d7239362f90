"""Keeps the measured curves of links beside a machine's ceilings. Imports no torch.

One file a curve and run, ``<data>/machines/<gpu>/links/<machine>-<collective>-<ranks>-<time>-<digits>.json``, written
whole or not at all and never again: the newest one that is whole and of the same machine, stack, number of hosts,
collective and ranks is used. The backend follows from the device: NCCL on GPUs, gloo on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.link_curve import LinkCurve, curves_of, points_of
from harness.machine_store import MachineKey, gpu_folder, safe_name, write_new
from harness.record import utc_now

#: Changes whenever the way of measuring messages changes what a point means; older curves are then let be.
LINK_METHOD = 1


@dataclass(frozen=True)
class LinkKey:
    """Whose link this is. hosts: over how many the ranks are spread."""

    machine: MachineKey
    hosts: int = 1


@dataclass(frozen=True)
class KeptCurve:
    """A curve, and when and in which run it was measured."""

    curve: LinkCurve
    time: str
    run: str


def save_curve(key: LinkKey, kept: KeptCurve, folder: Path | None = None) -> Path:
    """Writes a new file beside all earlier ones and returns it.

    Raises:
        StoreError: the folder cannot be written.
    """
    curve = kept.curve
    values = {
        **asdict(key.machine),
        "hosts": key.hosts,
        "collective": curve.collective,
        "ranks": curve.ranks,
        "points": [list(point) for point in curve.points],
        "time": kept.time,
        "run": kept.run,
        "method": LINK_METHOD,
    }
    stem = f"{safe_name(key.machine.machine)}-{curve.collective}-{curve.ranks}"
    return write_new(gpu_folder(key.machine.gpu, folder) / "links", stem, kept.time, values, "a curve of the link")


def keep_curves(
    key: LinkKey, records: Iterable[Mapping[str, Any]], run: str, folder: Path | None = None
) -> tuple[dict[tuple[str, int], LinkCurve], list[str]]:
    """Keeps the curves that these records hold; gives them, and what was measured at too few sizes for one.

    Raises:
        StoreError: the folder cannot be written.
    """
    points = points_of(records)
    curves, now = curves_of(points), utc_now()
    for curve in curves.values():
        save_curve(key, KeptCurve(curve, now, run), folder)
    short = [f"{op} on {ranks} ranks ({len(points[op, ranks])})" for op, ranks in points if (op, ranks) not in curves]
    return curves, short


def load_curves(key: LinkKey, folder: Path | None = None) -> tuple[dict[tuple[str, int], KeptCurve], list[str]]:
    """The newest curve of each collective and number of ranks, and what was passed over with the reason.

    A curve of another stack is not damage and is passed over in silence.
    """
    place = gpu_folder(key.machine.gpu, folder) / "links"
    found: dict[tuple[str, int], KeptCurve] = {}
    problems: list[str] = []
    for path in sorted(place.glob("*.json")) if place.is_dir() else []:
        try:
            theirs, kept = _parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as err:
            problems.append(f"links/{path.name}: {err}")
            continue
        which = (kept.curve.collective, kept.curve.ranks)
        if theirs == key and (which not in found or kept.time >= found[which].time):
            found[which] = kept
    return found, problems


def _parse(text: str) -> tuple[LinkKey | None, KeptCurve]:
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("is not an object")
    needed: dict[str, type] = {"gpu": str, "machine": str, "torch": str, "time": str, "run": str, "collective": str}
    needed |= {"hosts": int, "ranks": int, "points": list, "method": int}
    missing = [name for name, kind in needed.items() if not isinstance(raw.get(name), kind)]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    points = tuple(_point(point) for point in raw["points"])
    kept = KeptCurve(LinkCurve(raw["collective"], raw["ranks"], points), raw["time"], raw["run"])
    machine = MachineKey(raw["gpu"], raw["machine"], raw["torch"], raw.get("driver"), raw.get("cores"))
    return (LinkKey(machine, raw["hosts"]) if raw["method"] == LINK_METHOD else None), kept


def _point(raw: Any) -> tuple[int, float]:
    if not (isinstance(raw, list) and len(raw) == 2 and all(type(x) in (int, float) for x in raw)):
        raise ValueError(f"{raw!r} is no pair of bytes and seconds")
    return int(raw[0]), float(raw[1])
