"""What a schedule costs: the price of a step, fitted to a run, and the ratio that two schedules allow at that price.

The same scheduler is run without a model, every step costing what the price says. What an engine then really gains,
over what the schedules allow, is the share that its own overheads leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from impls.serving.request import PENDING, Request, Sequence, sent_at
from impls.serving.scheduler import EngineConfig, Scheduler

#: A switch of the engine as (plain way, fast way), each the fields that it sets.
Switch = tuple[Mapping[str, Any], Mapping[str, Any]]
BATCHING: Final[Switch] = ({"batching": "static"}, {"batching": "continuous"})
PAGING: Final[Switch] = ({"paging": "reserve"}, {"paging": "blocks"})
CHUNKING: Final[Switch] = ({"chunked_prefill": False}, {"chunked_prefill": True})
PREFIX_CACHING: Final[Switch] = ({"prefix_caching": False}, {"prefix_caching": True})


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: ``fixed`` + ``prefill`` a prompt token + ``decode`` a sequence in decode."""

    fixed: float
    prefill: float
    decode: float

    def of(self, prompt_tokens: int, decodes: int) -> float:
        """Seconds of one step."""
        return self.fixed + self.prefill * prompt_tokens + self.decode * decodes

    @staticmethod
    def fit(steps: Items[tuple[int, int, float]]) -> StepCost | None:
        """Least squares over (prompt tokens, decodes, seconds); prices below zero are zero. None from too few steps."""
        if len(steps) < 8:
            return None
        table = np.array(steps, dtype=np.float64)
        design = np.column_stack([np.ones(len(table)), table[:, :2]])
        kept = [column for column in range(3) if column == 0 or np.ptp(design[:, column]) > 0]
        while True:
            found = np.linalg.lstsq(design[:, kept], table[:, 2], rcond=None)[0]
            below = [column for column, price in zip(kept, found, strict=True) if price < 0]
            if not below:
                break
            kept = [column for column in kept if column not in below]
            if not kept:
                return None
        prices = dict(zip(kept, found.tolist(), strict=True))
        return StepCost(prices.get(0, 0.0), prices.get(1, 0.0), prices.get(2, 0.0))

    def as_counters(self) -> dict[str, float]:
        """For a record."""
        return {
            "step_fixed_s": self.fixed,
            "step_prompt_token_s": self.prefill,
            "step_decode_s": self.decode,
        }


def simulate(requests: Iterable[Request], config: EngineConfig, cost: StepCost) -> float:
    """Seconds until the scheduler is through with requests that come at their arrivals, at that price."""
    scheduler = Scheduler(config)
    # Answers end by their length, so that any token will do that no stop list has; each request's own, so that what it
    # wrote before it was preempted is known again, and to nobody else.
    written: dict[str, int] = {}
    coming = deque(sorted(requests, key=sent_at))
    seconds = 0.0
    while coming or not scheduler.idle:
        if scheduler.idle:
            seconds = max(seconds, sent_at(coming[0]))
        while coming and sent_at(coming[0]) <= seconds:
            request = coming.popleft()
            written[request.id] = PENDING - 1 - len(written)
            scheduler.add(Sequence(request))
        step = scheduler.schedule()
        decodes = sum(chunk.length == 1 for chunk in step.chunks)
        seconds += cost.of(step.tokens - decodes, decodes)
        for chunk in step.chunks:
            if scheduler.advance(chunk, written[chunk.sequence.id] if chunk.samples else None) is not None:
                scheduler.finish(chunk.sequence)
    return seconds


def allowed_speedup(requests: Items[Request], config: EngineConfig, cost: StepCost, switch: Switch = BATCHING) -> float:
    """The plain way's time over the fast way's, at one price, requests coming at their arrivals."""
    plain, fast = (simulate(requests, replace(config, **side), cost) for side in switch)
    return plain / fast if fast > 0 else 1.0
