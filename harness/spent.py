"""Where the seconds of a run went: the one place that adds them up, for its last line and for its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Keys of ``costs`` that are added up over all records of the run.
PARTS = ("energy_s", "check_s", "compile_s", "memory_s")


def spent(records: Sequence[Mapping[str, Any]], total_s: float) -> dict[str, float]:
    """Seconds of a run by part, and the share of it outside sampling (energy included), checks and compilation.

    Start-up of workers, sentinels, memory passes and warm-up lie outside. total_s: from the run's start to its end.
    """
    costs = [r.get("costs") or {} for r in records]
    parts = {"total_s": total_s, "sampling_s": _sampling(records)}
    parts |= {part: float(sum(c.get(part, 0.0) for c in costs)) for part in PARTS}
    inside = sum(parts[name] for name in ("sampling_s", "energy_s", "check_s", "compile_s"))
    share = max(0.0, 1 - inside / total_s) if total_s > 0 else 0.0
    return {name: round(value, 6) for name, value in {**parts, "outside_share": share}.items()}


def describe(parts: Mapping[str, float]) -> str:
    """The share in words: ``42% of 37 s outside sampling, checks and compilation``."""
    share, total = parts["outside_share"], parts["total_s"]
    return f"{share:.0%} of {total:.0f} s outside sampling, checks and compilation"


def _sampling(records: Sequence[Mapping[str, Any]]) -> float:
    """The sampling time is that of the whole workload, and each of its records carries it: counted once."""
    by_workload: dict[tuple[str, str, int], float] = {}
    for record in records:
        seconds = (record.get("costs") or {}).get("sampling_s")
        if seconds is not None:
            by_workload[(record["technique"], record["workload"], record["ranks"])] = seconds
    return float(sum(by_workload.values()))
