"""The detector: a sequence of runs in, a report of its changes out. Pure; the same runs always give the same report.

What counts as a change is in harness.regress.rules; docs/detection.md explains it and shows the error rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from harness.errors import UsageError
from harness.regress.drift import Ramp, find_drift
from harness.regress.noise import Runs, level, scale, t_quantile, two_sided_p
from harness.regress.report import Comparison, Direction, Event, Report, Verdict
from harness.regress.rules import RULES, Rules
from harness.regress.segments import LOOKBACK, Noise, noise_of, segment
from harness.regress.series import Point, Series, median, read_series

MEDIAN_COST = 1.2533  # standard error of a median over that of a mean, on Gaussian noise
POWER = 0.8416  # standard errors above a threshold for a chance of four in five to pass it
REFERENCE_Z = 3.3  # one comparison, no search: one in a thousand


@dataclass(frozen=True)
class _Flat:
    """Runs begin..end at one level; ``at`` is that level on the detector's scale. Empty beside a drift at an edge."""

    begin: int
    end: int
    at: float


@dataclass(frozen=True)
class _Change:
    """A change between two flats: at run ``begin``, or along a ramp."""

    begin: int
    end: int
    ramp: Ramp | None


def detect(
    points: Sequence[float | Point],
    better: Direction = "lower",
    reference: Sequence[float] | None = None,
    rules: Rules = RULES,
) -> Report:
    """Finds the changes in a series and judges its end.

    Args:
        points: the series in order, one value a point, or ``Point`` with several runs. A change is only ever placed
            between points. Values that are not finite are counted as missing and skipped; indices still count them.
        better: whether ``lower`` or ``higher`` values are better.
        reference: runs that the end of the series is held against, besides its own past.
        rules: what a shift must show.

    Raises:
        UsageError: ``better`` is neither ``lower`` nor ``higher``.
    """
    check_direction(better)
    series = read_series(points)
    rules = replace(rules, noise_floor=max(rules.noise_floor, series.floor))
    runs = len(series.x)
    if runs < rules.least_runs:
        reason = f"{runs} runs; a change needs at least {rules.least_runs}"
        if series.missing:
            reason += f" ({series.missing} more were not finite numbers)"
        held = against_reference(series, series.x, None, reference, better, rules)
        return Report("too few runs", reason, (), runs, series.missing, reference=held)
    cuts = segment(series.x, series.starts, rules)
    switches = _switches(series, cuts, rules)
    changes: list[_Change] = [] if switches else _with_drift(series.x, cuts, rules)
    flats, residuals = _flats(series.x, changes)
    noise = noise_of(residuals, rules)
    events = _linked(
        [_event(series, c, a, b, noise, better) for c, (a, b) in zip(changes, pairwise(flats), strict=True)]
    )
    last = flats[-1]
    current = series.x[last.begin : last.end][-LOOKBACK:]
    suspect = None if switches else _suspect(series.x, last, noise, rules)
    state, reason = _state(events, suspect is not None, switches)
    still_sliding = last.end - last.begin < rules.persistence
    return Report(
        state=state,
        reason=reason if suspect is None else f"{reason}; {_ask_again(series, suspect)}",
        events=events,
        runs=runs,
        missing=series.missing,
        noise=noise.sigma,
        autocorrelation=noise.phi,
        smallest_change=_smallest(series, noise, rules.persistence, max(len(current), rules.baseline), rules),
        smallest_lasting_change=_smallest(series, noise, 2 * rules.young, max(len(current), rules.baseline), rules),
        suspect=None if suspect is None else int(series.point[suspect]),
        level=series.value(last.at),
        level_since=None if still_sliding else int(series.point[last.begin]),
        reference=against_reference(
            series, current if not still_sliding else series.x[-5:], noise, reference, better, rules
        ),
    )


def check_direction(better: str) -> None:
    """Raises UsageError unless ``better`` is a direction."""
    if better not in ("lower", "higher"):
        raise UsageError(f"better must be 'lower' or 'higher', not {better!r}")


def _switches(series: Series, cuts: Sequence[int], rules: Rules) -> str:
    """Words for a series that goes to and fro between the same two levels; empty for any other."""
    if len(cuts) - 2 < rules.modes:
        return ""
    middle = np.array([np.median(series.x[a:b]) for a, b in pairwise(cuts)])
    step = float(np.median(np.abs(np.diff(middle))))
    one, other = middle[::2], middle[1::2]
    if np.ptp(one) > step / 2 or np.ptp(other) > step / 2:
        return ""
    levels = sorted(series.value(float(np.median(side))) for side in (one, other))
    return f"switches between {levels[0]:.6g} and {levels[1]:.6g}, {len(cuts) - 2} times: that is its noise"


def _with_drift(x: Runs, cuts: list[int], rules: Rules) -> list[_Change]:
    """The boundaries as changes, those that a ramp explains better replaced by the ramp."""
    middle = [float(np.median(x[a:b])) for a, b in pairwise(cuts)]
    signs = [math.copysign(1.0, b - a) for a, b in pairwise(middle)]
    changes: list[_Change] = []
    sloping: set[int] = set()  # segments that a ramp runs through
    first = 1
    while first < len(cuts) - 1:
        last = first
        while last < len(cuts) - 2 and signs[last] == signs[first - 1]:
            last += 1
        ramp = _drift_between(x, cuts[first - 1 : last + 2], rules)
        if ramp:
            changes.append(ramp)
            sloping.update(range(first - 1, last + 1))
        else:
            changes.extend(_Change(cut, cut, None) for cut in cuts[first : last + 1])
        first = last + 1
    for i, (a, b) in enumerate(pairwise(cuts)):
        ramp = None if i in sloping else _drift_between(x, [a, b], rules)
        if ramp:
            changes.append(ramp)
    return sorted(changes, key=lambda change: change.begin)


def _drift_between(x: Runs, cuts: Sequence[int], rules: Rules) -> _Change | None:
    """A ramp in the runs between the first and the last of ``cuts``."""
    begin, end = cuts[0], cuts[-1]
    residual = np.concatenate([x[a:b] - np.median(x[a:b]) for a, b in pairwise(cuts)])
    ramp = find_drift(x[begin:end], [c - begin for c in cuts], max(scale(residual), rules.noise_floor), rules)
    if ramp is None:
        return None
    moved = replace(ramp, begin=ramp.begin + begin, end=ramp.end + begin)
    return _Change(moved.begin + 1, moved.end, moved)


def _flats(x: Runs, changes: Sequence[_Change]) -> tuple[list[_Flat], list[Runs]]:
    """The levels between the changes, and what is left of the runs when levels and ramps are taken out."""
    edges = [0, *(c.begin for c in changes), len(x)]
    flats: list[_Flat] = []
    residuals: list[Runs] = []
    for k in range(len(edges) - 1):
        before = changes[k - 1] if k else None
        after = changes[k] if k < len(changes) else None
        begin = edges[k] if before is None or before.ramp is None else before.end
        end = max(edges[k + 1], begin)
        runs = x[begin:end]
        if len(runs) >= 3:
            at = float(np.median(runs))
            residuals.append(runs - at)
        else:
            beside = after.ramp.old if after and after.ramp else before.ramp.new if before and before.ramp else None
            at = float(np.median(runs)) if beside is None else beside
        flats.append(_Flat(begin, end, at))
        if after and after.ramp:
            slope = np.arange(after.begin, after.end)
            residuals.append(x[slope] - after.ramp.at(slope))
    return flats, residuals


def _event(series: Series, change: _Change, before: _Flat, after: _Flat, noise: Noise, better: Direction) -> Event:
    ramp = change.ramp
    shift = ramp.new - ramp.old if ramp else after.at - before.at
    sizes = [max(flat.end - flat.begin, 3) for flat in (before, after)]
    error = noise.standard_error(*sizes)
    old, new = (series.value(v) for v in ((ramp.old, ramp.new) if ramp else (before.at, after.at)))
    if not ramp:
        old, new = (median(series.values[f.begin : f.end]) for f in (before, after))
    ratio, low, high, reason = ratio_with_interval(series, old, new, shift, MEDIAN_COST * error, noise.degrees)
    return Event(
        index=int(series.point[change.begin]),
        end=int(series.point[min(change.end, len(series.x) - 1)]),
        kind="drift" if ramp else "step",
        verdict="improved" if (shift < 0) == (better == "lower") else "regressed",
        ratio=ratio,
        low=low,
        high=high,
        old=old,
        new=new,
        p_value=two_sided_p(shift / error, noise.degrees),
        reason=reason,
    )


def ratio_with_interval(
    series: Series, old: float, new: float, shift: float, error: float, degrees: int
) -> tuple[float | None, float | None, float | None, str]:
    """New over old and its 95 % interval from a shift and its standard error; no ratio where none has a meaning."""
    if old <= 0 or new < 0:
        what = "zero" if old == 0 else "below zero"
        return None, None, None, f"no ratio: the {'old' if old <= 0 else 'new'} level is {what}"
    reach = t_quantile(degrees) * error
    if series.logarithmic:
        bounds = [math.exp(max(min(shift + side * reach, 700.0), -700.0)) for side in (-1, 1)]
    else:
        bounds = [(new + side * reach * series.unit) / old for side in (-1, 1)]
    ratio = new / old
    if not all(map(math.isfinite, (ratio, *bounds))):
        return None, None, None, "no ratio: the levels are too far apart for a number"
    return ratio, min(bounds[0], ratio), max(bounds[1], ratio), ""


def _linked(events: list[Event]) -> tuple[Event, ...]:
    """Regressions and the improvements that took them back, tied to each other."""
    out = list(events)
    for i, event in enumerate(out):
        if event.verdict != "regressed":
            continue
        for j in range(i + 1, len(out)):
            # Back means: two thirds of the way, or beyond.
            if (out[j].new - event.old) / (event.new - event.old) <= 1 / 3:
                out[i] = replace(out[i], recovered_at=out[j].end)
                if out[j].recovers is None:
                    out[j] = replace(out[j], recovers=event.index)
                break
    return tuple(out)


def _suspect(x: Runs, last: _Flat, noise: Noise, rules: Rules) -> int | None:
    """First run of a shift at the end that stands out of the noise but is too short or too small to be a change."""
    best, where = rules.suspect, None
    for k in range(1, rules.young):
        at = last.end - k
        base = x[last.begin : at][-LOOKBACK:]
        if last.end < len(x) or len(base) < rules.baseline:
            break
        base_level = level(base, noise.sigma)
        shift = level(x[at:], noise.sigma) - base_level
        local = max(noise.sigma, scale(base))
        z = abs(shift) / replace(noise, sigma=local).standard_error(k, len(base))
        recent = math.copysign(1.0, shift) * (base[-rules.visits_window :] - base_level)
        visits = int(np.sum(recent > rules.visited * abs(shift)))
        there = int(np.sum(math.copysign(1.0, shift) * (x[at:] - base_level) > abs(shift) / 2))
        if abs(shift) >= rules.smallest and z > best and visits <= k // 2 and 3 * there >= 2 * k:
            best, where = z, at
    return where


def _state(events: Sequence[Event], suspected: bool, switches: str) -> tuple[Verdict, str]:
    if switches:
        return "unchanged", switches
    if not events:
        return ("inconclusive", "no proven change") if suspected else ("unchanged", "no change beyond the noise")
    last = events[-1]
    size = "" if last.ratio is None else f" to {last.ratio:.4g} of the old level"
    words = f"{last.verdict} at {last.index} by a {last.kind}{size}"
    if last.recovers is not None:
        words += f", which took back the regression at {last.recovers}"
    if suspected:
        return "inconclusive", words
    return ("unchanged" if last.recovers is not None else last.verdict), words


def _ask_again(series: Series, suspect: int) -> str:
    count = len(series.x) - suspect
    runs = "the last run stands" if count == 1 else f"the last {count} runs stand"
    return f"{runs} apart from those before: run again to tell a change from bad luck"


def _smallest(series: Series, noise: Noise, new: int, old: int, rules: Rules) -> float:
    """Relative change that ``new`` runs after ``old`` would show in four cases of five."""
    error = noise.standard_error(new, old)
    threshold = max(rules.smallest, rules.z_shift * error)
    if new < rules.young:
        threshold = max(threshold, rules.clear * noise.sigma)
    return series.relative(threshold + POWER * error)


def against_reference(
    series: Series,
    current: Runs,
    noise: Noise | None,
    reference: Sequence[float] | None,
    better: Direction,
    rules: Rules,
) -> Comparison | None:
    """The runs at the end of a series (on its scale) against the runs of a pinned reference (as measured).

    This is what finds a drift too slow for any window: each step within the noise, their sum far outside it.
    """
    if reference is None:
        return None
    pinned = np.asarray([float(v) for v in reference if math.isfinite(v)], dtype=np.float64)
    if noise is None or min(len(current), len(pinned)) < rules.persistence:
        few = f"{len(pinned)} finite runs in the reference, {len(current)} at the end of the series"
        return Comparison("too few runs", None, None, None, None, None, None, f"{few}; {rules.persistence} are needed")
    if series.logarithmic and bool(np.any(pinned <= 0)):
        return Comparison(
            "inconclusive", None, None, None, None, None, None, "the reference is not above zero, and the series is"
        )
    x = series.scaled(pinned)
    sigma = max(noise.sigma, scale(x) if len(x) >= rules.baseline else 0.0)
    error = replace(noise, sigma=sigma).standard_error(len(current), len(x))
    shift = float(np.median(current) - np.median(x))
    old, new = median(pinned), series.value(float(np.median(current)))
    ratio, low, high, reason = ratio_with_interval(series, old, new, shift, MEDIAN_COST * error, noise.degrees)
    verdict: Literal["regressed", "improved", "unchanged"] = "unchanged"
    if abs(shift) >= 2 * rules.smallest and abs(shift) / error >= REFERENCE_Z:
        verdict = "improved" if (shift < 0) == (better == "lower") else "regressed"
    return Comparison(verdict, ratio, low, high, old, new, two_sided_p(shift / error, noise.degrees), reason)
