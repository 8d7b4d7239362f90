"""The timelines of several engines of one run as one: what happened to each request, wherever it happened."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

Curve = list[list[float]]


@dataclass(frozen=True)
class Part:
    """One engine's timeline, and when its time 0 was by a clock that all engines share (s)."""

    began: float
    timeline: Mapping[str, Any]


def merge(parts: Items[Part]) -> dict[str, Any]:
    """One timeline, from the earliest engine's time 0 on.

    A request that several engines served is in the order of the parts: it arrived at the first, its tokens are those of
    all, and the last says how it ended. The share of the cache in use is the mean over the engines, whose caches are
    alike; requests that run add up.
    """
    zero = min(part.began for part in parts)
    requests: dict[str, dict[str, Any]] = {}
    for part in parts:
        shift = part.began - zero
        for key, events in part.timeline["requests"].items():
            later = _shifted(events, shift)
            requests[key] = _joined(requests[key], later) if key in requests else later
    curves = {
        name: [[[t + part.began - zero, v] for t, v in part.timeline[name]] for part in parts]
        for name in ("cache_use", "running")
    }
    slots = [part.timeline["slots"] for part in parts]
    return {
        "requests": requests,
        "start": 0.0,
        "end": max(part.timeline["end"] + part.began - zero for part in parts),
        "cache_use": [[t, v / len(parts)] for t, v in added(curves["cache_use"])],
        "running": added(curves["running"]),
        "slots": {name: sum(slot[name] for slot in slots) for name in ("reserved", "held")},
    }


def added(curves: Items[Curve]) -> Curve:
    """The sum of step curves; one that has not begun counts as 0."""
    changes = sorted((t, which, v) for which, curve in enumerate(curves) for t, v in curve)
    now = [0.0] * len(curves)
    total: Curve = []
    for t, which, v in changes:
        now[which] = v
        if total and total[-1][0] == t:
            total[-1][1] = sum(now)
        else:
            total.append([t, sum(now)])
    return total


def _shifted(events: Mapping[str, Any], by: float) -> dict[str, Any]:
    moved = dict(events)
    for name in ("arrival", "finish", "first_token"):
        if events.get(name) is not None:
            moved[name] = events[name] + by
    moved["token_times"] = [t + by for t in events["token_times"]]
    return moved


def _joined(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """A request that the first engine handed to the next."""
    times = [*first["token_times"], *then["token_times"]]
    whole: dict[str, Any] = {
        **then,
        "arrival": first["arrival"],
        "token_times": times,
        "output_tokens": len(times),
        "preemptions": first["preemptions"] + then["preemptions"],
        "cached_tokens": first["cached_tokens"],
    }
    whole.pop("first_token", None)
    return whole | ({"first_token": times[0]} if times else {})


def second_token_waits(timeline: Mapping[str, Any]) -> list[float]:
    """Seconds from the first to the second token, of every request that has two, ascending."""
    every = [events["token_times"] for events in timeline["requests"].values()]
    return sorted(times[1] - times[0] for times in every if len(times) > 1)
