"""A series as the detector sees it: runs in order, each a number on a scale where noise is relative."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.regress.noise import Runs

DIGITS = 12  # of the scaled runs: enough for any clock, and equal runs stay equal whatever their unit


@dataclass(frozen=True)
class Point:
    """The runs on one commit, in the order they were made; each value is one run's figure (its median).

    ``low`` and ``high`` may give the interval of each run's figure, in its unit: runs are then never taken to be less
    noisy than their own intervals say. Values that are not finite count as missing.
    """

    values: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            bounds: tuple[float, ...] | None = getattr(self, name)
            if bounds is not None and len(bounds) != len(self.values):
                raise ValueError(f"a point of {len(self.values)} runs has {len(bounds)} values in {name!r}")
        if (self.low is None) != (self.high is None):
            raise ValueError("a point's intervals need both low and high")


@dataclass(frozen=True)
class Series:
    """The finite runs of a series.

    Attributes:
        values: as measured.
        x: on the detector's scale: the logarithm over the median, or (``logarithmic`` false, for series that reach
            zero or below) the difference from the median over ``unit``.
        point: index of the point that each run belongs to.
        starts: places in ``values`` where a point begins.
        missing: runs that were not finite.
        floor: relative noise of one run by its own interval; 0 where none is given.
    """

    values: Runs
    x: Runs
    point: NDArray[np.int64]
    starts: NDArray[np.int64]
    missing: int
    floor: float
    logarithmic: bool
    centre: float
    unit: float

    def value(self, x: float) -> float:
        """The measured value that lies at x on the detector's scale."""
        return math.exp(x + self.centre) if self.logarithmic else (x + self.centre) * self.unit

    def scaled(self, values: Runs) -> Runs:
        """Measured values on the detector's scale."""
        return _scaled(values, self.logarithmic, self.unit) - self.centre

    def relative(self, shift: float) -> float:
        """A shift on the detector's scale as a relative change upwards."""
        return math.expm1(min(shift, 700.0)) if self.logarithmic else shift


def median(values: Runs) -> float:
    """The median of measured values, of which two may be too large to be added up."""
    with np.errstate(over="ignore"):
        middle = float(np.median(values))
    return middle if math.isfinite(middle) else 2 * float(np.median(values / 2))


def read_series(points: Sequence[float | Point]) -> Series:
    """Flattens points (or bare values, one run each) into their finite runs."""
    values: list[float] = []
    owner: list[int] = []
    widths: list[float] = []
    missing = 0
    for index, item in enumerate(points):
        point = item if isinstance(item, Point) else Point((float(item),))
        for k, value in enumerate(point.values):
            if not math.isfinite(value):
                missing += 1
                continue
            values.append(float(value))
            owner.append(index)
            if point.low is not None and point.high is not None and value != 0:
                width = (point.high[k] - point.low[k]) / (2 * 1.96 * abs(value))
                if math.isfinite(width) and width >= 0:
                    widths.append(width)
    v = np.asarray(values, dtype=np.float64)
    at = np.asarray(owner, dtype=np.int64)
    starts = np.flatnonzero(np.diff(at, prepend=-1)).astype(np.int64)
    logarithmic = bool(len(v)) and bool(np.all(v > 0))
    unit = 1.0
    if not logarithmic and np.any(v):
        unit = median(np.abs(v[v != 0]))
    scaled = _scaled(v, logarithmic, unit)
    centre = float(np.median(scaled)) if len(v) else 0.0
    x = np.round(scaled - centre, DIGITS)
    floor = float(np.median(widths)) if widths else 0.0
    return Series(v, x, at, starts, missing, floor, logarithmic, centre, unit)


def _scaled(values: Runs, logarithmic: bool, unit: float) -> Runs:
    if logarithmic:
        return np.log(values)
    with np.errstate(over="ignore"):
        return np.clip(values / unit, -1e12, 1e12)
