"""Keeps the events of a run, in the form that :mod:`harness.serving.timeline` reads."""

from __future__ import annotations

from typing import Any

from impls.serving.request import Request, prompt_length, sent_at

#: Of so many of the last steps that ran the largest batch it is known where their time went.
TIMED_STEPS = 256


class Recorder:
    """Times are seconds from :meth:`begin`, by the engine's clock.

    A request's arrival is when the trace sends it, even when the engine only looks at its queue later.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets everything: a new run starts at 0."""
        self.requests: dict[str, dict[str, Any]] = {}
        self.cache_use: list[tuple[float, float]] = []
        self.running: list[tuple[float, float]] = []
        self.steps: list[tuple[int, int, float]] = []
        self.slots = (0, 0)
        self.end = 0.0

    def arrived(self, request: Request) -> None:
        """A request was sent."""
        self.requests[request.id] = {
            "arrival": sent_at(request),
            "token_times": [],
            "finish": None,
            "status": "failed",
            "reason": "the run ended before it did",
            "prompt_tokens": prompt_length(request),
            "preemptions": 0,
            "cached_tokens": 0,
        }

    def token(self, request_id: str, now: float) -> None:
        """One token reached the user."""
        self.requests[request_id]["token_times"].append(now)

    def ended(
        self, request_id: str, now: float, status: str, reason: str = "", preemptions: int = 0, cached: int = 0
    ) -> None:
        """A request is over: finished, cancelled, failed or refused; ``cached`` of its prompt was in the cache."""
        self.requests[request_id].update(
            finish=now, status=status, reason=reason, preemptions=preemptions, cached_tokens=cached
        )
        self.end = max(self.end, now)

    def stepped(self, prompt_tokens: int, decodes: int, seconds: float) -> None:
        """A step ran: what was in it, and how long it took."""
        self.steps.append((prompt_tokens, decodes, seconds))

    def sample(self, now: float, use: float, running: int) -> None:
        """What holds from then on: of the cache in use, of sequences that run; kept when it changed."""
        if not self.cache_use or self.cache_use[-1][1] != use:
            self.cache_use.append((now, use))
        if not self.running or self.running[-1][1] != running:
            self.running.append((now, float(running)))
        self.end = max(self.end, now)

    def timeline(self) -> dict[str, Any]:
        """What a serve case's ``timeline()`` returns."""
        requests = {}
        for key, events in self.requests.items():
            times = events["token_times"]
            more: dict[str, Any] = {"output_tokens": len(times)}
            if times:
                more["first_token"] = times[0]
            requests[key] = {**events, **more}
        last = max((e["arrival"] for e in self.requests.values()), default=0.0)
        return {
            "requests": requests,
            "start": 0.0,
            "end": max(self.end, last),
            "cache_use": [list(point) for point in self.cache_use],
            "running": [list(point) for point in self.running],
            "slots": {"reserved": self.slots[0], "held": self.slots[1]},
        }
