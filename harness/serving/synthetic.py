"""Seeded synthetic traffic: the default without a trace, and token ids for requests that have lengths only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from harness.errors import UsageError
from harness.serving.trace import Trace, TraceRequest


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """``count`` seeded arrival times at a mean rate of ``rate`` a second; the first is at 0."""
    return bursty_arrivals(count, rate, 1.0, seed)


def bursty_arrivals(count: int, rate: float, cv: float, seed: int) -> list[float]:
    """Seeded arrivals whose gaps are gamma distributed with coefficient of variation ``cv`` (BurstGPT, section 4).

    A ``cv`` of 1 is Poisson; above it requests come in bursts. The first is at 0, and the last so that the mean rate is
    the one asked for, as that of a file is: a few dozen gaps as they are drawn come to half or twice of it.

    Raises:
        UsageError: a rate or a cv that is not positive.
    """
    if not (math.isfinite(rate) and rate > 0 and math.isfinite(cv) and cv > 0):
        raise UsageError(f"arrivals: rate and cv must be positive, got {rate!r} and {cv!r}")
    if count <= 0:
        return []
    times = np.cumsum(np.random.default_rng(seed).gamma(1.0 / cv**2, 1.0, count - 1))
    if count > 1 and not times[-1] > 0:
        raise UsageError(f"arrivals: {count} requests of cv {cv:g} are one burst, and have no rate")
    return [0.0, *(times * ((count - 1) / rate / times[-1])).tolist()] if count > 1 else [0.0]


def lognormal_lengths(count: int, median: float, sigma: float, low: int, high: int, seed: int) -> list[int]:
    """Seeded log-normal lengths, clipped to ``low`` … ``high``; prompts and answers of chat are close to log-normal."""
    if not (median > 0 and sigma >= 0 and 1 <= low <= high):
        raise UsageError(f"lengths: median {median!r}, sigma {sigma!r}, range {low!r} to {high!r} make no lengths")
    drawn = np.exp(np.random.default_rng(seed).normal(math.log(median), sigma, count))
    return [int(n) for n in np.clip(np.rint(drawn), low, high)]


def synthetic_trace(
    count: int,
    rate: float,
    seed: int = 0,
    *,
    cv: float = 1.0,
    prompt_median: float = 256,
    output_median: float = 128,
    sigma: float = 0.8,
    max_prompt: int = 2048,
    max_output: int = 1024,
) -> Trace:
    """The embedded default: log-normal lengths, Poisson (``cv=1``) or bursty arrivals; ``rate=inf`` queues all at 0."""
    times = [0.0] * count if rate == math.inf else bursty_arrivals(count, rate, cv, seed)
    prompts = lognormal_lengths(count, prompt_median, sigma, 1, max_prompt, seed + 1)
    outputs = lognormal_lengths(count, output_median, sigma, 1, max_output, seed + 2)
    requests = tuple(TraceRequest(t, p, o) for t, p, o in zip(times, prompts, outputs, strict=True))
    return Trace(name=f"synthetic({count} at {rate:g}/s, cv {cv:g})", requests=requests)


def prompt_ids(request: TraceRequest, index: int, vocab: int, seed: int, block_tokens: int = 0) -> list[int]:
    """Seeded token ids for a request that has lengths only.

    Two requests share exactly the leading tokens that their ``prefix_blocks`` say: each block is drawn from its id
    alone, and what lies beyond the blocks from the request's index.
    """
    parts: list[Sequence[int]] = []
    left = request.prompt_tokens
    for block in request.prefix_blocks if block_tokens else ():
        size = min(left, block_tokens)
        drawn = np.random.default_rng((seed, 1, block)).integers(0, vocab, block_tokens)
        parts.append(drawn[:size].tolist())
        left -= size
    if left > 0:
        parts.append(np.random.default_rng((seed, 2, index)).integers(0, vocab, left).tolist())
    return [token for part in parts for token in part]
