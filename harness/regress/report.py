"""What the detector says about a series: its changes, and the state that it ends in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["lower", "higher"]
Verdict = Literal["regressed", "improved", "unchanged", "inconclusive", "too few runs"]


@dataclass(frozen=True)
class Event:
    """One change. Indices count the points of the series from 0.

    Attributes:
        index: the first point at the new level; of a drift, the first point on the slope.
        end: of a drift, the last point on the slope; of a step, the same as ``index``.
        kind: ``step`` or ``drift``.
        verdict: ``regressed`` or ``improved``.
        ratio: new level over old (medians; of a drift, the ends of the slope); None, with a reason, where no ratio
            exists.
        low, high: 95 % interval of the ratio.
        old, new: the levels, in the metric's unit.
        p_value: of a difference this large at this one place if nothing had changed (two-sided).
        recovered_at: of a regression, the point at which the series was back where it had been before.
        recovers: of an improvement, the index of the regression that it takes back.
        reason: why there is no ratio; empty otherwise.
    """

    index: int
    end: int
    kind: Literal["step", "drift"]
    verdict: Literal["regressed", "improved"]
    ratio: float | None
    low: float | None
    high: float | None
    old: float
    new: float
    p_value: float
    recovered_at: int | None = None
    recovers: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """The end of a series against a pinned reference; fields as in ``Event``."""

    verdict: Verdict
    ratio: float | None
    low: float | None
    high: float | None
    old: float | None
    new: float | None
    p_value: float | None
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """A judged series.

    Attributes:
        state: where the series ends. ``regressed`` and ``improved`` follow the last change, unless that took a
            regression back; ``inconclusive`` asks for the suspect runs to be made again.
        reason: the state in words.
        events: every change, in order; those that recovered too.
        runs, missing: runs judged, and runs that were not finite numbers.
        noise: standard deviation of one run around its level, relative; None with too few runs.
        autocorrelation: of neighbouring runs, 0 to 0.8.
        smallest_change: the smallest relative change at the end of the series that three runs would show in four
            cases of five.
        smallest_lasting_change: the same with twenty runs.
        suspect: the first point of a shift at the end that is not yet proven.
        level, level_since: median of the level at the end, and the point where it starts.
        reference: the end against the pinned reference, where one was given.
    """

    state: Verdict
    reason: str
    events: tuple[Event, ...]
    runs: int
    missing: int
    noise: float | None = None
    autocorrelation: float | None = None
    smallest_change: float | None = None
    smallest_lasting_change: float | None = None
    suspect: int | None = None
    level: float | None = None
    level_since: int | None = None
    reference: Comparison | None = None
