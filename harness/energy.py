"""Joules of one run, by NVML's counter over enough runs for its coarse steps not to show."""

from __future__ import annotations

import time
from collections.abc import Callable

from harness.conditions import Watch

#: The counter of today's boards moves about ten times a second.
SPAN_S = 1.0


def energy_per_run(
    run: Callable[[], None],
    fence: Callable[[], None],
    watch: Watch,
    seconds: float,
    now: Callable[[], float] = time.perf_counter,
) -> float | None:
    """Runs back to back for about a second and divides; None where NVML gives no energy.

    Args:
        run: one timed call. fence: waits for the device. seconds: what one run takes, so that batches are short.
    """
    batch = max(1, int(0.1 / seconds)) if seconds > 0 else 1
    runs = 0
    fence()
    watch.start()
    start = now()
    while runs == 0 or now() - start < SPAN_S:
        for _ in range(batch):
            run()
        fence()
        runs += batch
    joules = watch.stop().energy_j
    return None if joules is None or joules <= 0 else joules / runs
