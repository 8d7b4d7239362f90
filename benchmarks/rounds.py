"""How the comparisons of launch shapes are timed: by the harness's own clock, in rounds of random order."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping

import torch

from harness.clock import EventClock

TRIES = 8  # of a sample for which the device had to wait for the host; the clock's spin doubles with each


def seconds(calls: Mapping[str, Callable[[], object]], rounds: int = 15) -> dict[str, float]:
    """The median of each call's device time, the L2 overwritten before it and the host ahead of the device.

    A call that waits for the device itself cannot be got ahead of: its time is what both take, as in a record.
    """
    clock = EventClock(torch.device("cuda"))
    times: dict[str, list[float]] = {name: [] for name in calls}
    waits: set[str] = set()
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            tick = clock.time(lambda: calls[name]())  # noqa: B023  (called before the loop goes on)
            for _ in range(TRIES):
                if not tick.host_bound or name in waits:
                    break
                tick = clock.time(lambda: calls[name]())  # noqa: B023
            if tick.host_bound:
                waits.add(name)
            times[name].append(tick.seconds)
    return {name: statistics.median(found) for name, found in times.items()}
