"""Made series, whose truth is known: noise of several kinds, and what can happen to a metric. All from a seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from harness.regress.noise import Runs

Rng = np.random.Generator


def autoregressive(rng: Rng, n: int, phi: float) -> Runs:
    """AR(1) of unit variance."""
    x = np.empty(n)
    x[0] = rng.normal()
    for i in range(1, n):
        x[i] = phi * x[i - 1] + np.sqrt(1 - phi**2) * rng.normal()
    return x


def two_speeds(rng: Rng, n: int, share: float, gap: float = 0.1, noise: float = 0.005) -> Runs:
    """Each run at one of two speeds, at random."""
    return np.asarray(np.where(rng.random(n) < share, 1 + gap, 1.0) * (1 + noise * rng.normal(size=n)))


def lasting_speeds(rng: Rng, n: int, switch: float, gap: float = 0.1, noise: float = 0.005) -> Runs:
    """At one of two speeds, and with probability ``switch`` at the other from the next run on."""
    slow = np.cumsum(rng.random(n) < switch) % 2
    return np.asarray((1 + gap * slow) * (1 + noise * rng.normal(size=n)))


NULLS: dict[str, Callable[[Rng, int], Runs]] = {
    "gaussian": lambda rng, n: 100 * (1 + 0.01 * rng.normal(size=n)),
    "student t, 2": lambda rng, n: 100 * np.exp(0.01 * np.clip(rng.standard_t(2, size=n), -300, 300)),
    "student t, 3": lambda rng, n: 100 * np.exp(0.01 * np.clip(rng.standard_t(3, size=n), -300, 300)),
    "lognormal": lambda rng, n: 100 + rng.lognormal(0, 1, size=n),
    "wide lognormal": lambda rng, n: rng.lognormal(0, 1, size=n),
    "bad runs": lambda rng, n: (
        100 * (1 + 0.005 * rng.normal(size=n) + (rng.random(n) < 0.05) * rng.exponential(0.2, size=n))
    ),
    "two speeds, 10 %": lambda rng, n: two_speeds(rng, n, 0.1),
    "two speeds, 20 %": lambda rng, n: two_speeds(rng, n, 0.2),
    "two speeds, 30 %": lambda rng, n: two_speeds(rng, n, 0.3),
    "two speeds, 50 %": lambda rng, n: two_speeds(rng, n, 0.5),
    "two close speeds": lambda rng, n: two_speeds(rng, n, 0.5, gap=0.03, noise=0.008),
    "AR(1) 0.3": lambda rng, n: 100 * (1 + 0.01 * autoregressive(rng, n, 0.3)),
    "AR(1) 0.5": lambda rng, n: 100 * (1 + 0.01 * autoregressive(rng, n, 0.5)),
}


def made(levels: list[tuple[int, float]], noise: float = 0.005, seed: int = 0) -> Runs:
    """Gaussian runs around levels, each given as (how many runs, level)."""
    rng = np.random.default_rng(seed)
    course = np.concatenate([np.full(n, at) for n, at in levels])
    return np.asarray(course * (1 + noise * rng.normal(size=len(course))))
