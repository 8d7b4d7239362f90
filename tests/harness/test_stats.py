"""Medians and ratios carry intervals that hold what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness import stats


def test_the_interval_is_made_of_the_right_order_statistics() -> None:
    found = stats.median(range(1, 11))
    assert (found.value, found.low, found.high, found.n) == (5.5, 2, 9, 10)
    assert stats.median([3.0]).low == stats.median([3.0]).high == 3.0


def test_the_interval_of_the_median_holds_it_in_95_of_100_draws() -> None:
    rng = np.random.default_rng(0)
    draws = [stats.median(rng.lognormal(0, 0.3, 25).tolist()) for _ in range(600)]
    held = np.mean([d.low <= 1.0 <= d.high for d in draws])
    assert 0.94 <= held <= 0.995


def test_the_ratio_uses_paired_rounds_so_common_drift_cancels() -> None:
    drift = np.linspace(1.0, 2.0, 40)
    found = stats.ratio((3 * drift).tolist(), drift.tolist())
    assert found.value == pytest.approx(3.0)
    assert found.high - found.low < 1e-9
    apart = stats.ratio((3 * drift).tolist(), drift[:39].tolist())
    assert apart.high - apart.low > 0.1


@pytest.mark.parametrize("bad", [[], [math.nan], [1.0, math.inf]])
def test_what_is_no_sample_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="sample"):
        stats.median(bad)


def test_a_ratio_over_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="zero"):
        stats.ratio([1.0, 2.0], [0.0, 0.0])


def test_warm_up_is_over_when_the_last_calls_look_like_those_before() -> None:
    assert not stats.settled([9.0, 5.0, 3.0, 2.0, 1.5, 1.2, 1.1, 1.05])
    assert stats.settled([9.0, 5.0, *[1.0] * 8])
    assert not stats.settled([1.0] * 7)
