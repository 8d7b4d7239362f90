"""The command that measures one workload of a technique again, as ``pairbench bisect`` and ``--confirm`` run it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from harness.history.engine import History
from harness.workload import split_name


def device_of(history: History, technique: str, gpu: str) -> str | None:
    """``cpu`` or ``cuda``, as the records of a technique on a GPU type say; None if they do not."""
    rows = history.rows(
        "SELECT max(device) AS device FROM records WHERE technique = ? AND gpu = ? AND device IS NOT NULL",
        [technique, gpu],
    )
    device: str | None = rows[0]["device"]
    return device


def run_command(
    technique: str, workload: str, variants: Iterable[str] = (), device: str | None = None, store: str | None = None
) -> list[str]:
    """``python -m harness run`` for one workload, a user's own shape spelled out.

    Args:
        workload: as recorded, with changed dimensions in brackets (``rows16k[width=8]``).
        variants: which to measure, the baseline always among them; none given: all that the pair has.
    """
    name, changed = split_name(workload)
    command = [sys.executable, "-m", "harness", "run", technique, "--workload", name]
    for key, value in changed.items():
        command += ["--set", f"{key}={value}"]
    chosen = list(variants)
    for variant in dict.fromkeys(["baseline", *chosen] if chosen else []):
        command += ["--variant", variant]
    if device is not None:
        command += ["--device", device]
    if store is not None:
        command += ["--store", store]
    return command


def variants_for(series: Iterable[tuple[str, str]]) -> list[str]:
    """The variants that series (variant, metric) need beside the baseline; none named means all, which a figure
    relative to the best peer needs."""
    found = list(series)
    if any(metric == "speedup_peer" for _, metric in found):
        return []
    return sorted({variant for variant, _ in found})
