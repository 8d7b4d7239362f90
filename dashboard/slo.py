"""Goodput under bounds that the viewer moves, from the quantiles that a record keeps. No Streamlit here.

A record has no single requests, so that under two bounds at once the share of good requests is only known to lie
between two ends (the Fréchet bounds): at least a + b − 1, at most the smaller of the two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goodput:
    """Requests a second that meet a bound, between two ends; ``ttft`` and ``tpot`` are the shares that meet each."""

    low: float
    high: float
    ttft: float | None
    tpot: float | None


def share_within(grid: Sequence[Sequence[float]], bound: float) -> float | None:
    """The share of values at most ``bound``, linear between quantiles; None without a grid.

    Args:
        grid: ascending [quantile, value] pairs from 0 to 1.
    """
    if not grid:
        return None
    values = [float(value) for _, value in grid]
    place = bisect_right(values, bound)
    if place == 0:
        return 0.0
    if place == len(values):
        return 1.0
    (q0, v0), (q1, v1) = grid[place - 1], grid[place]
    return float(q0 if v1 == v0 else q0 + (q1 - q0) * (bound - v0) / (v1 - v0))


def goodput(serve: Mapping[str, Any], ttft: float, tpot: float) -> Goodput | None:
    """Goodput under bounds in seconds; None when the record keeps neither quantiles nor its span.

    Requests that did not finish meet nothing. TTFT is known of every request that got a token, TPOT of those that
    finished with two: shares are taken as those of finished requests.
    """
    requests, span = serve.get("requests") or {}, serve.get("span")
    finished = requests.get("finished")
    if not span or finished is None:
        return None
    shares = [share_within(serve.get("ttft") or [], ttft), share_within(serve.get("tpot") or [], tpot)]
    known = [share for share in shares if share is not None]
    if not known:
        return None
    low, high = max(0.0, sum(known) - (len(known) - 1)), min(known)
    rate = finished / span
    return Goodput(low * rate, high * rate, shares[0], shares[1])


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points that no other beats: more of the first, less of the second; ordered by the first.

    Of equal points the first one counts.
    """
    order = sorted(range(len(points)), key=lambda at: (-points[at][0], points[at][1]))
    best, front = float("inf"), []
    for at in order:
        if points[at][1] < best:
            best = points[at][1]
            front.append(at)
    return sorted(front, key=lambda at: points[at][0])
