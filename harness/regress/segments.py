"""Change points: candidates from ruptures' kernel segmentation, of which only those stay that the rules bear out.

A series is cut into segments by its boundaries; the first boundary is 0 and the last the number of runs. Values are
logarithms, or a share of the series' own magnitude where logarithms do not exist (see harness.regress.series).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ruptures.detection import KernelCPD

from harness.regress.noise import (
    Runs,
    autocorrelation,
    level,
    rank_separation,
    scale,
    scale_of_steps,
    variance_of_mean,
)
from harness.regress.rules import Rules

LOOKBACK = 150  # runs of a segment that speak for its level: older ones are another time
BANDWIDTH = 2.0  # sigmas over which the kernel tells runs apart; wide enough to see a shift of one sigma
PENALTY = 2.2  # low on purpose: candidates are only looked at, never reported
BLOCK = 1500  # runs segmented in one go; the kernel's cost grows with the square
HUBER_COST = 2.0


@dataclass(frozen=True)
class Noise:
    """Scale (same unit as the runs), lag-one autocorrelation, and how many runs and levels they come from."""

    sigma: float
    phi: float
    degrees: int

    def standard_error(self, m: int, n: int) -> float:
        """Of the difference between the levels of m and of n runs."""
        return self.sigma * math.sqrt(variance_of_mean(m, self.phi) + variance_of_mean(n, self.phi))


def noise_around(x: Runs, cuts: Sequence[int], rules: Rules) -> Noise:
    """The noise that is left when every segment's median is taken out."""
    residuals = [x[a:b] - np.median(x[a:b]) for a, b in pairwise(cuts)]
    return noise_of(residuals, rules)


def noise_of(residuals: list[Runs], rules: Rules) -> Noise:
    """The noise in residuals, one array a fitted level."""
    runs, levels = sum(map(len, residuals)), len(residuals)
    degrees = max(runs - levels, 1)
    sigma = max(scale(np.concatenate(residuals)) * math.sqrt(runs / degrees), rules.noise_floor)
    return Noise(sigma, autocorrelation(residuals, sigma), degrees)


def segment(x: Runs, starts: NDArray[np.int64], rules: Rules) -> list[int]:
    """Boundaries of the levels in x, 0 and len(x) included; changes fall on ``starts`` only (first runs of points)."""
    cuts = candidates(x, starts, rules)
    for _ in range(4):
        cuts = keep_borne_out(x, cuts, rules)
        moved = relocate(x, cuts, starts, noise_around(x, cuts, rules).sigma)
        if moved == cuts:
            break
        cuts = moved
    return keep_borne_out(x, cuts, rules)


def candidates(x: Runs, starts: NDArray[np.int64], rules: Rules) -> list[int]:
    """Where the distribution of the runs may have changed: too many places rather than too few.

    A Gaussian kernel bounds what one run can weigh, so that bad runs do not cut the series (Arlot, Celisse and
    Harchaoui, "A kernel multiple change-point algorithm via model selection", JMLR 2019).
    """
    n = len(x)
    sigma = max(scale_of_steps(x), rules.noise_floor)
    allowed = np.append(starts, n)
    cuts = {0, n}
    for begin in range(0, n, BLOCK):
        block = x[begin : begin + BLOCK]
        if len(block) >= rules.least_runs:
            found = KernelCPD(kernel="rbf", min_size=2, params={"gamma": 1 / (2 * (BANDWIDTH * sigma) ** 2)})
            ends = found.fit(block[:, None]).predict(pen=PENALTY)
            cuts.update(int(allowed[np.argmin(np.abs(allowed - (begin + end)))]) for end in ends)
    return sorted(cuts)


def keep_borne_out(x: Runs, cuts: Sequence[int], rules: Rules) -> list[int]:
    """Drops the weakest boundary, judges the rest anew, and stops when every one of them is borne out."""
    kept = list(cuts)
    while len(kept) > 2:
        noise = noise_around(x, kept, rules)
        strength = [evidence(x, kept, i, noise, rules) for i in range(1, len(kept) - 1)]
        if min(strength) >= 1:
            return kept
        padded = [math.inf, *strength, math.inf]
        # The hopeless ones go together unless they are neighbours, so that a long series does not take for ever.
        drop = {strength.index(min(strength)) + 1}
        drop |= {i for i in range(1, len(padded) - 1) if padded[i] < min(0.5, padded[i - 1], padded[i + 1])}
        kept = [cut for i, cut in enumerate(kept) if i not in drop]
    return kept


def evidence(x: Runs, cuts: Sequence[int], i: int, noise: Noise, rules: Rules) -> float:
    """How far the change at boundary i passes the rules: the smallest of value over threshold; 1 and more passes."""
    begin, at, end = cuts[i - 1], cuts[i], cuts[i + 1]
    old, new = x[max(begin, at - LOOKBACK) : at], x[at : min(end, at + LOOKBACK)]
    m, n = len(old), len(new)
    short = min(m, n)
    if short < rules.persistence or (i == 1 and m < rules.baseline):
        return 0.0
    local = scale(np.concatenate((old - np.median(old), new - np.median(new)))) if m + n >= 12 else 0.0
    here = Noise(max(noise.sigma, local), noise.phi, noise.degrees)
    old_level, new_level = level(old, here.sigma), level(new, here.sigma)
    shift = abs(new_level - old_level)
    in_errors = shift / here.standard_error(m, n)
    passed = [shift / rules.smallest, in_errors / rules.z_shift]
    if short >= rules.young:
        share, z = rank_separation(old, new)
        if 0.01 < share < 0.99:
            widened = here.standard_error(m, n) / (here.sigma * math.sqrt(1 / m + 1 / n))
            passed.append(abs(z) / widened / rules.z_ranks)
    else:
        passed.append(shift / here.sigma / rules.clear)
        passed.append(_unvisited(x, cuts, i, shift, rules))
    away = _short_stay(x, cuts, i, shift)
    if away:
        passed.append(in_errors / (rules.z_shift + rules.returns))
        if away < rules.returns_persistence:
            passed.append(0.95)
    return min(passed)


def _unvisited(x: Runs, cuts: Sequence[int], i: int, shift: float, rules: Rules) -> float:
    """Whether the shorter side of a boundary is a place where the runs around it have not been: 1 if so, else less.

    A series that jumps between two speeds at random is at either for a few runs in a row, now and then.
    """
    begin, at, end = cuts[i - 1], cuts[i], cuts[i + 1]
    window = rules.visits_window
    new_is_short = end - at <= at - begin
    if new_is_short:
        short, around = x[at:end], x[max(begin, at - window) : at]
        beyond = x[end : min(cuts[i + 2], end + window)] if i + 2 < len(cuts) else x[:0]
    else:
        short, around = x[begin:at], x[at : min(end, at + window)]
        beyond = x[max(cuts[i - 2], begin - window) : begin] if i >= 2 else x[:0]
    base = float(np.median(around))
    if len(beyond) and abs(float(np.median(beyond)) - base) < shift / 2:
        around = np.concatenate((around, beyond))
    sign = 1.0 if float(np.median(short)) > base else -1.0
    visits = int(np.sum(sign * (around - base) > rules.visited * shift))
    stragglers = int(np.sum(sign * (short - base) < (1 - rules.visited) * shift))
    if visits > (len(short) - rules.persistence) // 2:
        return 0.9
    return 0.95 if stragglers > (len(short) - rules.persistence + 1) // 3 else 1.0


def _short_stay(x: Runs, cuts: Sequence[int], i: int, shift: float) -> int:
    """How many runs the level beside boundary i lasted, if it is an excursion from a level and back; 0 if not."""
    size = [b - a for a, b in pairwise(cuts)]
    middle = [float(np.median(x[a:b])) for a, b in pairwise(cuts)]
    stays = []
    for j in (i, i - 1):
        inner = 0 < j < len(size) - 1
        if inner and abs(middle[j + 1] - middle[j - 1]) < shift / 2 and size[j] <= size[2 * i - 1 - j]:
            stays.append(size[j])
    return min(stays, default=0)


def relocate(x: Runs, cuts: Sequence[int], starts: NDArray[np.int64], sigma: float) -> list[int]:
    """Moves each boundary to the place between its neighbours where two levels explain the runs best (Huber cost)."""
    moved = list(cuts)
    for _ in range(3):
        before = list(moved)
        for i in range(1, len(moved) - 1):
            begin, at, end = moved[i - 1], moved[i], moved[i + 1]
            runs = x[begin:end]
            gain = np.cumsum(
                _cost((runs - level(x[at:end], sigma)) / sigma) - _cost((runs - level(x[begin:at], sigma)) / sigma)
            )
            places = starts[(starts >= begin + 2) & (starts <= end - 2)]
            if len(places):
                moved[i] = int(places[np.argmax(gain[places - begin - 1])])
        if moved == before:
            break
    return sorted(set(moved))


def _cost(u: Runs) -> Runs:
    size = np.abs(u)
    return np.where(size < HUBER_COST, size * size / 2, HUBER_COST * size - HUBER_COST**2 / 2)
