"""A pinned reference for each series, so that a drift is found whose every step hides in the noise.

Without a commit named, the reference is how a series began; a release's tag is a good one to name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from harness.history.engine import Row
from harness.regress.report import Event, Report

#: Runs that make a reference, where there are so many.
RUNS: Final = 10
#: A series with fewer runs has no reference of its own making: its beginning and its end would be the same runs.
LEAST: Final = 30


@dataclass(frozen=True)
class Reference:
    """The runs of the points before ``end``, back from it: what the end of the series is held against."""

    end: int
    values: tuple[float, ...]


def reference_of(points: Sequence[Row], rank: int | None = None) -> Reference | None:
    """The reference of a series.

    Args:
        points: judged points in order.
        rank: of the commit that is pinned; None: the beginning of the series.
    """
    if rank is None:
        if sum(len(point["values"]) for point in points) < LEAST:
            return None
        values: list[float] = []
        for place, point in enumerate(points):
            values.extend(point["values"])
            if len(values) >= RUNS:
                return Reference(place + 1, tuple(values))
        return None
    end = sum(point["rank"] <= rank for point in points)
    runs: list[float] = []
    for point in reversed(points[:end]):
        runs = [*point["values"], *runs]
        if len(runs) >= RUNS:
            break
    return Reference(end, tuple(runs)) if runs else None


def slow_drift(report: Report, reference: Reference | None, points: int) -> Event | None:
    """The change since the reference that no event explains; None where there is none, or events tell it all."""
    held = report.reference
    if (
        held is None
        or reference is None
        or held.verdict not in ("regressed", "improved")
        or report.state != "unchanged"
    ):
        return None
    if any(event.recovered_at is None and event.recovers is None for event in report.events):
        return None
    if held.old is None or held.new is None or held.p_value is None or reference.end >= points:
        return None
    return Event(
        index=reference.end,
        end=points - 1,
        kind="drift",
        verdict="regressed" if held.verdict == "regressed" else "improved",
        ratio=held.ratio,
        low=held.low,
        high=held.high,
        old=held.old,
        new=held.new,
        p_value=held.p_value,
        reason=held.reason,
    )
