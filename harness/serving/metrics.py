"""The figures of a serve run, from its timeline, by the definitions that the field agrees on.

=============  ========================================================================================================
TTFT           arrival to the first token, of every request that got one; queueing is part of it
ITL            wait before each token but the first, pooled over tokens of all requests (never TTFT, never per message)
TPOT           (end to end − TTFT) / (tokens − 1), one figure a finished request of at least two tokens
end to end     arrival to the last token, of finished requests
output rate    tokens received over the span of the run, whoever received them
goodput        finished requests that met every part of the SLO over the span (DistServe, OSDI 2024, section 2)
failed         requests that failed or were refused, over all requests; cancelled ones are counted apart
=============  ========================================================================================================

A figure that the timeline cannot give stands under ``missing`` with its reason, never as zero.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from harness.errors import UsageError
from harness.record import metric
from harness.serving.timeline import CANCELLED, FAILED, FINISHED, REFUSED, RequestEvents, Timeline, parse_timeline

#: Where the stored quantile grids are read; 0.5, 0.9 and 0.99 are the named metrics.
GRID: Final = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
NAMED: Final = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
#: A stored curve keeps at most this many points: a record is one line.
CURVE_POINTS: Final = 200


@dataclass(frozen=True)
class Slo:
    """A service level objective, in seconds; None leaves that part open. A request must meet all that is stated."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e"):
            bound = getattr(self, name)
            if bound is not None and not (math.isfinite(bound) and bound > 0):
                raise UsageError(f"SLO: {name} must be a positive number of seconds, got {bound!r}")

    @property
    def stated(self) -> bool:
        """Whether anything is asked for at all."""
        return any(bound is not None for bound in (self.ttft, self.tpot, self.e2e))

    def met_by(self, request: RequestEvents) -> bool:
        """Whether the request finished within every stated bound; one token has no TPOT to miss, none is no answer."""
        if request.status != FINISHED or not request.token_times:
            return False
        seen = ((self.ttft, request.ttft), (self.tpot, request.tpot), (self.e2e, request.e2e))
        return all(bound is None or value is None or value <= bound for bound, value in seen)

    def as_dict(self) -> dict[str, float]:
        """The stated bounds, for the record."""
        parts = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return {name: bound for name, bound in parts.items() if bound is not None}


@dataclass(frozen=True)
class Summary:
    """``metrics`` and ``missing`` for the record's keys of that name, ``serve`` for its ``serve`` object."""

    metrics: dict[str, dict[str, Any]]
    missing: dict[str, str]
    serve: dict[str, Any]


def summarize(
    timeline: Mapping[str, Any] | Timeline,
    slo: Slo | None = None,
    gpu_hour_price: float | None = None,
    gpus: int = 1,
) -> Summary:
    """Everything that a serve record says, from one run's timeline.

    Args:
        timeline: what the case's ``timeline()`` gave, or the parsed form.
        slo: without one there is no goodput.
        gpu_hour_price: price of one GPU hour, in the user's own currency; without it there is no cost.
        gpus: how many GPUs the run held; nothing that ran on none has a cost.

    Raises:
        TimelineError: the timeline contradicts itself.
        UsageError: a price that is not positive.
    """
    run = timeline if isinstance(timeline, Timeline) else parse_timeline(timeline)
    metrics: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    serve: dict[str, Any] = {}

    families = {
        "ttft": [r.ttft for r in run.requests if r.ttft is not None],
        "itl": [gap for r in run.requests for gap in r.gaps()],
        "tpot": [r.tpot for r in run.requests if r.tpot is not None],
        "e2e": [r.e2e for r in run.requests if r.e2e is not None],
    }
    for family, values in families.items():
        values.sort()
        serve[family] = quantile_grid(values)
        for q, label in NAMED:
            name = f"{family}_{label}"
            if values:
                metrics[name] = metric(name, quantile(values, q))
            else:
                missing[name] = _WHY_NONE[family]

    _rates(run, slo, gpu_hour_price, gpus, metrics, missing)
    _shares(run, metrics, missing)
    serve["slo"] = slo.as_dict() if slo is not None else {}
    serve["span"] = run.span
    serve["offered_rate"] = middle_rate([r.arrival for r in run.requests])
    serve["lag_growth"] = lag_growth([(r.arrival, r.e2e) for r in run.requests if r.e2e is not None])
    serve["finished_rate"] = middle_rate([r.token_times[-1] for r in run.requests if r.e2e is not None])
    serve["cache_use"] = thin(run.cache_use)
    serve["running"] = thin(run.running)
    serve["requests"] = _counts(run)
    return Summary(metrics=metrics, missing=missing, serve=serve)


def checked_price(price: float | None) -> float | None:
    """The price of a GPU hour, if one was given.

    Raises:
        UsageError: it is not a positive number.
    """
    if price is not None and not (math.isfinite(price) and price > 0):
        raise UsageError(f"a GPU hour has a price above zero, got {price!r}")
    return price


_WHY_NONE: Final = {
    "ttft": "no request got a token",
    "itl": "no request got two tokens",
    "tpot": "no request finished with two tokens",
    "e2e": "no request finished",
}


def quantile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of ascending values, linear between neighbours (numpy's default).

    Raises:
        ValueError: no values, or q outside 0 to 1.
    """
    if not ordered:
        raise ValueError("quantile of no values")
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"quantile {q!r} is not between 0 and 1")
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def quantile_grid(ordered: Sequence[float]) -> list[list[float]]:
    """``[quantile, value]`` pairs on :data:`GRID`; empty without values."""
    return [[q, quantile(ordered, q)] for q in GRID] if ordered else []


def middle_rate(times: Sequence[float]) -> float | None:
    """Events a second over the middle four fifths of them; None from fewer than three, or all at once.

    A run ends when its last answer does, some time after its last arrival, so that over the whole span a server
    always finishes less than it is sent, the more so the shorter the run. The middle of both can be compared.
    """
    ordered = sorted(times)
    if len(ordered) < 3:
        return None
    seconds = quantile(ordered, 0.9) - quantile(ordered, 0.1)
    return 0.8 * (len(ordered) - 1) / seconds if seconds > 0 else None


def lag_growth(answered: Sequence[tuple[float, float]]) -> float | None:
    """How much longer answers take for each second that requests have been coming, from (arrival, end to end).

    A server that keeps up has none, however long an answer takes; one that does a requests a second of b sent has
    b/a - 1. Medians of the first and the last third, so that long answers among them do not decide; None from fewer
    than six, or where all come at once.
    """
    ordered = sorted(answered)
    third = len(ordered) // 3
    if third < 2:
        return None
    (first, early), (last, late) = (
        tuple(quantile(sorted(column), 0.5) for column in zip(*part, strict=True))
        for part in (ordered[:third], ordered[-third:])
    )
    return (late - early) / (last - first) if last > first else None


def time_mean(curve: Sequence[tuple[float, float]], end: float) -> float | None:
    """The mean of a step curve (each value holds until the next point) up to ``end``; None when it spans no time."""
    if not curve or end <= curve[0][0]:
        return None
    stops = [*[t for t, _ in curve[1:]], end]
    area = sum(value * (stop - start) for (start, value), stop in zip(curve, stops, strict=True))
    return area / (end - curve[0][0])


def thin(curve: Sequence[tuple[float, float]], points: int = CURVE_POINTS) -> list[list[float]]:
    """The curve at ``points`` evenly spaced times at most, each with the value that held then, ends kept."""
    if len(curve) <= points:
        return [[t, v] for t, v in curve]
    times = [t for t, _ in curve]
    first, last = times[0], times[-1]
    marks = [first + (last - first) * i / (points - 1) for i in range(points - 1)] + [last]
    return [[mark, curve[bisect_right(times, mark) - 1][1]] for mark in marks]


def _rates(
    run: Timeline,
    slo: Slo | None,
    price: float | None,
    gpus: int,
    metrics: dict[str, dict[str, Any]],
    missing: dict[str, str],
) -> None:
    tokens = sum(r.output_tokens for r in run.requests)
    if run.span > 0:
        metrics["output_rate"] = metric("output_rate", tokens / run.span)
    else:
        missing["output_rate"] = "the run spans no time"
    if slo is None or not slo.stated:
        missing["goodput"] = "no SLO was stated"
    elif run.span > 0:
        metrics["goodput"] = metric("goodput", sum(map(slo.met_by, run.requests)) / run.span)
    else:
        missing["goodput"] = "the run spans no time"
    price = checked_price(price)
    if price is None:
        missing["cost_per_mtok"] = "no price of a GPU hour was given"
    elif gpus < 1:
        missing["cost_per_mtok"] = "the run held no GPU"
    elif tokens:
        metrics["cost_per_mtok"] = metric("cost_per_mtok", price * gpus * run.span / 3600.0 / tokens * 1e6)
    else:
        missing["cost_per_mtok"] = "no token was emitted"


def _shares(run: Timeline, metrics: dict[str, dict[str, Any]], missing: dict[str, str]) -> None:
    total = len(run.requests)
    if total:
        lost = sum(r.status in (FAILED, REFUSED) for r in run.requests)
        metrics["failed_requests"] = metric("failed_requests", lost / total)
        preempted = _sum_of([r.preemptions for r in run.requests])
        if preempted is not None:
            metrics["preemptions"] = metric("preemptions", preempted / total)
        else:
            missing["preemptions"] = "the server does not say who was preempted"
    else:
        missing["failed_requests"] = missing["preemptions"] = "the run had no requests"
    served = [r for r in run.requests if r.status in (FINISHED, CANCELLED)]
    prompts = sum(r.prompt_tokens for r in served)
    cached = _sum_of([r.cached_tokens for r in served])
    if not prompts:
        missing["cache_hit_rate"] = "no prompt token was served"
    elif cached is None:
        missing["cache_hit_rate"] = "the server does not say what of a prompt was in its cache"
    else:
        metrics["cache_hit_rate"] = metric("cache_hit_rate", cached / prompts)
    if run.slots is not None and run.slots[0] > 0:
        reserved, held = run.slots
        metrics["cache_waste"] = metric("cache_waste", (reserved - held) / reserved)
    else:
        missing["cache_waste"] = "the engine reserved no cache slot, or does not say how many"
    mean = time_mean(run.running, run.end)
    if mean is not None:
        metrics["running_requests"] = metric("running_requests", mean)
    else:
        missing["running_requests"] = "the engine does not say how many ran"


def _sum_of(values: Sequence[int | None]) -> int | None:
    """The sum; None where one of them is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _counts(run: Timeline) -> dict[str, Any]:
    by_status = Counter(r.status for r in run.requests)
    reasons = Counter(r.reason for r in run.requests if r.status in (FAILED, REFUSED) and r.reason)
    return {
        "total": len(run.requests),
        "finished": by_status[FINISHED],
        "cancelled": by_status[CANCELLED],
        "failed": by_status[FAILED],
        "refused": by_status[REFUSED],
        "reasons": dict(reasons.most_common(20)),
        "prompt_tokens": sum(r.prompt_tokens for r in run.requests),
        "output_tokens": sum(r.output_tokens for r in run.requests),
        "preemptions": _sum_of([r.preemptions for r in run.requests]),
    }
