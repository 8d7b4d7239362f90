"""Medians, their intervals, and ratios of medians: what turns raw samples into figures. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; n says how many samples stand behind it."""

    value: float
    low: float
    high: float
    n: int

    @property
    def relative_half_width(self) -> float:
        """The larger half of the interval over the value; inf for a value of zero."""
        if self.value == 0:
            return math.inf
        return max(self.high - self.value, self.value - self.low) / abs(self.value)


def median(samples: Sequence[float]) -> Estimate:
    """The median with its distribution-free interval: the order statistics that hold it in 95 % of draws.

    With fewer than six samples no pair of order statistics reaches 95 %: the extremes are given.

    Raises:
        ValueError: no samples, or one that is not finite.
    """
    values = sorted(_checked(samples))
    n = len(values)
    rank = _lower_rank(n)
    middle = float(np.median(values))
    return Estimate(middle, values[rank], values[n - 1 - rank], n)


def _lower_rank(n: int) -> int:
    """The largest k for which P(k < Binomial(n, 1/2) < n - k) is still 95 %; 0 where none is."""
    tail = 0.0
    k = 0
    while k < n // 2:
        tail += math.comb(n, k) / 2**n
        if 2 * tail > 1 - CONFIDENCE:
            break
        k += 1
    return max(0, k - 1)


def ratio(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Estimate:
    """Ratio of medians with its interval; sample i of both comes from the same round, so rounds are resampled whole.

    Sequences of unequal length (a variant alternated in blocks) are resampled apart.

    Raises:
        ValueError: no samples, a sample that is not finite, or a denominator whose median is zero.
    """
    top, bottom = np.asarray(_checked(numerator)), np.asarray(_checked(denominator))
    base = float(np.median(bottom))
    if base == 0:
        raise ValueError("the ratio of medians has a denominator of zero")
    value = float(np.median(top)) / base
    rng = np.random.default_rng(seed)
    draws_top = rng.integers(0, len(top), (RESAMPLES, len(top)))
    draws_bottom = draws_top if len(top) == len(bottom) else rng.integers(0, len(bottom), (RESAMPLES, len(bottom)))
    bottoms = np.median(bottom[draws_bottom], axis=1)
    ratios = np.median(top[draws_top], axis=1)[bottoms > 0] / bottoms[bottoms > 0]
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, min(float(low), value), max(float(high), value), min(len(top), len(bottom)))


def settled(samples: Sequence[float], window: int = 4, within: float = 0.05) -> bool:
    """Whether warm-up is over: the last window's median no longer differs from the one before it."""
    if len(samples) < 2 * window:
        return False
    last = float(np.median(samples[-window:]))
    before = float(np.median(samples[-2 * window : -window]))
    return before > 0 and abs(last / before - 1) <= within


def _checked(samples: Sequence[float]) -> list[float]:
    values = [float(v) for v in samples]
    if not values:
        raise ValueError("no samples")
    if not all(math.isfinite(v) for v in values):
        raise ValueError("a sample is not a finite number")
    return values
