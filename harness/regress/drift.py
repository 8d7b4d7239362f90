"""Drift: a level that slides over many runs, told from steps by which of the two explains the runs better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from harness.regress.noise import Runs, level
from harness.regress.rules import Rules
from harness.regress.segments import Noise, noise_of

KNOTS = 24  # places tried for either end of a ramp
CLIP = 2.5  # sigmas beyond the better fit at which a run stops to count more

MOST_PHI = 0.6  # a ramp's residuals are no better proof of more autocorrelation than of a misfit
AT_A_GLANCE = 2.5  # rank correlation with time, in standard errors, below which no slope is looked for


@dataclass(frozen=True)
class Ramp:
    """Flat at ``old`` until run ``begin``, straight to ``new`` at run ``end``, flat from there."""

    begin: int
    end: int
    old: float
    new: float
    noise: Noise

    def at(self, index: NDArray[np.int64]) -> Runs:
        """The fitted value at each run."""
        return self.old + (self.new - self.old) * self.share(index)

    def share(self, index: NDArray[np.int64]) -> Runs:
        """How far up the ramp each run is, 0 to 1."""
        return np.clip((index - self.begin) / (self.end - self.begin), 0.0, 1.0)


def find_drift(x: Runs, cuts: Sequence[int], sigma: float, rules: Rules) -> Ramp | None:
    """The ramp that explains x much better than its steps do; None where steps, or nothing, do as well.

    ``cuts`` are the boundaries of the levels in x, 0 and len(x) included, all of them in one direction.
    """
    n = len(x)
    if n < rules.least_runs + rules.drift_runs // 2:
        return None
    if abs(_rank_correlation(x, np.arange(n))) * math.sqrt(n - 1) < AT_A_GLANCE:
        return None
    steps = np.concatenate([np.full(b - a, level(x[a:b], sigma)) for a, b in pairwise(cuts)])
    fits = [(steps, 2 * len(cuts) - 3)]  # levels and the places between them
    if len(cuts) == 2:
        fits.append((_best_step(x, sigma), 3))
    time = np.arange(n)
    ramp = _best_ramp(x, rules)
    for attempt in range(3):  # fitted again to runs of which none weighs too much
        if ramp is None:
            return None
        residual = x - ramp.at(time)
        noise = noise_of([residual], rules)
        ramp = replace(ramp, noise=Noise(noise.sigma, min(noise.phi, MOST_PHI), max(n - 4, 1)))
        independent = n * (1 - ramp.noise.phi) / (1 + ramp.noise.phi)
        own = _badness(residual, noise.sigma)
        better = min(
            independent * math.log(_badness(x - fit, noise.sigma) / own) + (unknowns - 4) * math.log(n)
            for fit, unknowns in fits
        )
        if better < (0 if attempt < 2 else rules.drift_margin):
            return None
        if attempt < 2:
            reach = CLIP * noise.sigma
            ramp = _best_ramp(np.clip(x, ramp.at(time) - reach, ramp.at(time) + reach), rules)
    assert ramp is not None
    share = ramp.share(time)
    rise = abs(ramp.new - ramp.old)
    error = ramp.noise.sigma / math.sqrt(float(np.sum((share - share.mean()) ** 2)) * independent / n)
    if rise < 2 * rules.smallest or rise / error < rules.z_shift + rules.returns:
        return None
    # Two speeds at random can look like a slope to least squares, not to ranks.
    together = min(abs(_rank_correlation(x, share)), 0.999)
    if math.atanh(together) * math.sqrt(max(independent - 3, 1)) < rules.z_ranks:
        return None
    return ramp


def _rank_correlation(x: Runs, against: NDArray[np.float64] | NDArray[np.int64]) -> float:
    """Correlation of the runs' ranks with a course in time; over 1/sqrt(n) it is standard normal without change."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    a, b = ranks - ranks.mean(), against - against.mean()
    size = math.sqrt(float(np.dot(a, a)) * float(np.dot(b, b)))
    return float(np.dot(a, b)) / size if size > 0 else 0.0


def _badness(residual: Runs, sigma: float) -> float:
    """Mean squared residual with outliers clipped, never below a hundredth of the noise."""
    limit = 2 * CLIP * sigma
    return float(np.mean(np.clip(residual, -limit, limit) ** 2)) + 1e-2 * sigma**2


def _best_step(x: Runs, sigma: float) -> Runs:
    """The one step that explains x best in least squares of clipped runs."""
    n = len(x)
    middle = level(x, sigma)
    total = np.cumsum(x - middle)
    left = np.arange(1, n)
    gain = total[:-1] ** 2 / left + (total[-1] - total[:-1]) ** 2 / (n - left)
    at = int(np.argmax(gain[2:-2])) + 3 if n > 6 else n // 2
    return np.concatenate((np.full(at, level(x[:at], sigma)), np.full(n - at, level(x[at:], sigma))))


def _best_ramp(x: Runs, rules: Rules) -> Ramp | None:
    """Least squares over a grid of places for both ends of the ramp."""
    n = len(x)
    places = np.unique(np.linspace(0, n - 1, min(n, KNOTS)).astype(np.int64))
    ramp = _best_on_grid(x, places, places, rules)
    if ramp is None or n <= KNOTS:
        return ramp
    near = np.arange(-(n // KNOTS) - 1, n // KNOTS + 2)
    begins, ends = (np.unique(np.clip(knot + near, 0, n - 1)) for knot in (ramp.begin, ramp.end))
    return _best_on_grid(x, begins, ends, rules)


def _best_on_grid(x: Runs, begins: NDArray[np.int64], ends: NDArray[np.int64], rules: Rules) -> Ramp | None:
    begin, end = (k.ravel() for k in np.meshgrid(begins, ends, indexing="ij"))
    wide = end - begin >= rules.drift_runs
    begin, end = begin[wide], end[wide]
    if not len(begin):
        return None
    share = np.clip((np.arange(len(x))[None, :] - begin[:, None]) / (end - begin)[:, None], 0.0, 1.0)
    mean = share.mean(axis=1)
    spread = np.einsum("ij,ij->i", share, share) - len(x) * mean**2
    slope = share @ (x - x.mean()) / spread
    best = int(np.argmax(slope**2 * spread))
    old = float(x.mean() - slope[best] * mean[best])
    return Ramp(int(begin[best]), int(end[best]), old, old + float(slope[best]), Noise(0.0, 0.0, 1))
