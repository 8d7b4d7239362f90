"""The timeline of a serve run: what happened to every request, and when.

A serve case's ``timeline()`` returns a mapping that :func:`parse_timeline` reads::

    {
      "requests": {id: {"arrival", "first_token", "token_times", "finish", "status",      # a list with "id" will do
                        "prompt_tokens", "output_tokens", "reason",
                        "cached_tokens", "preemptions"}},         # optional, as a server may not say
      "start": seconds, "end": seconds,              # optional: the span of the run
      "cache_use": [[seconds, share], ...],          # optional: share of the cache's slots that is reserved
      "running": [[seconds, requests], ...],         # optional: requests running from then on
      "slots": {"reserved": n, "held": n},           # optional: cache slots reserved, and those that held a token
    }

All times are seconds on one clock. ``arrival`` is when the trace sent the request, not when the engine took it in:
the queue before the engine is part of what a user waits for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from harness.errors import PairbenchError

FINISHED: Final = "finished"
CANCELLED: Final = "cancelled"
FAILED: Final = "failed"
REFUSED: Final = "refused"
STATUSES: Final = (FINISHED, CANCELLED, FAILED, REFUSED)


class TimelineError(PairbenchError):
    """A timeline that contradicts itself; the message names the request."""


@dataclass(frozen=True)
class RequestEvents:
    """One request's life. ``token_times`` has one entry a token, equal ones when several arrive at once.

    ``cached_tokens`` and ``preemptions`` are None where the server does not say.
    """

    id: str
    arrival: float
    status: str
    token_times: tuple[float, ...]
    finish: float | None
    prompt_tokens: int
    reason: str = ""
    cached_tokens: int | None = None
    preemptions: int | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens that the user received."""
        return len(self.token_times)

    @property
    def ttft(self) -> float | None:
        """Time to first token: arrival to the first token, queueing included."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def e2e(self) -> float | None:
        """Arrival to the last token; None unless the request finished with at least one token."""
        return self.token_times[-1] - self.arrival if self.status == FINISHED and self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token: (end to end − TTFT) / (tokens − 1); None below two tokens or when not finished."""
        if self.status != FINISHED or len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    def gaps(self) -> list[float]:
        """Inter-token latencies, one for every token but the first, so that TTFT is never among them.

        Tokens that arrive at once (speculative decoding, a stream that sends several a message) share the wait before
        them evenly: n tokens after a wait of g count as n gaps of g/n. Their sum is end to end minus TTFT either way,
        while one gap a message would call an engine slow for being faster.
        """
        times = self.token_times
        out: list[float] = []
        start = 0
        while start < len(times):
            stop = start
            while stop < len(times) and times[stop] == times[start]:
                stop += 1
            count = stop - start
            if start == 0:
                out.extend([0.0] * (count - 1))
            else:
                out.extend([(times[start] - times[start - 1]) / count] * count)
            start = stop
        return out


@dataclass(frozen=True)
class Timeline:
    """A whole run; ``end - start`` is the span that rates are taken over."""

    requests: tuple[RequestEvents, ...]
    start: float
    end: float
    cache_use: tuple[tuple[float, float], ...] = ()
    running: tuple[tuple[float, float], ...] = ()
    slots: tuple[int, int] | None = None

    @property
    def span(self) -> float:
        """Seconds from the start of the run to its last event."""
        return self.end - self.start


def parse_timeline(raw: Mapping[str, Any]) -> Timeline:
    """The timeline of a case, checked.

    Raises:
        TimelineError: a request that appears twice, an unknown status, a time that is not finite or runs backwards,
            a token before its arrival, token times that disagree with ``output_tokens`` or ``first_token``, tokens of
            a request that was refused, more prompt tokens found in the cache than there are, more slots held than
            reserved, or a share of the cache beyond all of it.
    """
    events = [_parse_request(key, body) for key, body in _entries(raw.get("requests"))]
    seen: set[str] = set()
    for one in events:
        if one.id in seen:
            raise TimelineError(f"timeline: request {one.id!r} appears twice")
        seen.add(one.id)
    first = min((r.arrival for r in events), default=0.0)
    last = max((t for r in events for t in (r.arrival, *r.token_times[-1:], r.finish or r.arrival)), default=first)
    start = _time(raw.get("start", first), "start of the run")
    end = _time(raw.get("end", last), "end of the run")
    if end < last or start > first:
        raise TimelineError(f"timeline: events from {first} to {last} s lie outside the run's span {start} to {end} s")
    slots = None if raw.get("slots") is None else (int(raw["slots"]["reserved"]), int(raw["slots"]["held"]))
    if slots is not None and not 0 <= slots[1] <= slots[0]:
        raise TimelineError(f"timeline: of {slots[0]} cache slots reserved {slots[1]} held a token")
    return Timeline(
        requests=tuple(events),
        start=start,
        end=end,
        cache_use=_curve(raw.get("cache_use", ()), "cache_use", most=1.0),
        running=_curve(raw.get("running", ()), "running"),
        slots=slots,
    )


def _entries(requests: Any) -> list[tuple[str, Mapping[str, Any]]]:
    if isinstance(requests, Mapping):
        return [(str(key), body) for key, body in requests.items()]
    if isinstance(requests, Sequence) and not isinstance(requests, str):
        return [(str(body.get("id", index)), body) for index, body in enumerate(requests)]
    raise TimelineError("timeline: 'requests' must map ids to events, or list them")


def _parse_request(key: str, body: Mapping[str, Any]) -> RequestEvents:
    what = f"request {key!r}"
    status = str(body.get("status"))
    if status not in STATUSES:
        raise TimelineError(f"timeline: {what} has status {status!r}, which is none of {', '.join(STATUSES)}")
    arrival = _time(body.get("arrival"), f"arrival of {what}")
    times = tuple(_time(t, f"token time of {what}") for t in body.get("token_times", ()))
    finish = None if body.get("finish") is None else _time(body["finish"], f"finish of {what}")
    points = [arrival, *times] if finish is None else [arrival, *times, finish]
    if any(later < earlier for earlier, later in pairwise(points)):
        raise TimelineError(f"timeline: {what} runs backwards: arrival, token times and finish must not decrease")
    if body.get("output_tokens", len(times)) != len(times):
        raise TimelineError(
            f"timeline: {what} says {body['output_tokens']} output tokens and gives {len(times)} token times"
        )
    if times and body.get("first_token", times[0]) != times[0]:
        raise TimelineError(f"timeline: {what} gives a first_token that is not the first of its token times")
    if times and status == REFUSED:
        raise TimelineError(f"timeline: {what} was refused and got {len(times)} tokens")
    prompt = int(body.get("prompt_tokens", 0))
    cached, preemptions = (None if body.get(k) is None else int(body[k]) for k in ("cached_tokens", "preemptions"))
    if not 0 <= (cached or 0) <= prompt or (preemptions or 0) < 0:
        raise TimelineError(
            f"timeline: {what} has {prompt} prompt tokens, {cached or 0} of them cached, "
            f"and {preemptions or 0} preemptions"
        )
    return RequestEvents(
        id=key,
        arrival=arrival,
        status=status,
        token_times=times,
        finish=finish,
        prompt_tokens=prompt,
        reason=str(body.get("reason", "")),
        cached_tokens=cached,
        preemptions=preemptions,
    )


def _time(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TimelineError(f"timeline: {what} must be a finite number of seconds, got {value!r}")
    return float(value)


def _curve(points: Any, what: str, most: float = math.inf) -> tuple[tuple[float, float], ...]:
    out = tuple((_time(t, f"time in {what}"), _time(v, f"value in {what}")) for t, v in points)
    beyond = next((v for _, v in out if not 0.0 <= v <= most), None)
    if beyond is not None:
        raise TimelineError(f"timeline: {what} says {beyond}, which lies outside 0 to {most:g}")
    if any(b[0] < a[0] for a, b in pairwise(out)):
        raise TimelineError(f"timeline: {what} runs backwards")
    return out
