"""Plain timing of a repeated call, for what describes the machine (ceilings, sentinel) rather than a technique.

It stands apart from :mod:`harness.clock` on purpose: a change of how techniques are timed must not move the ceilings
that they are compared with. Imports torch only when a call is timed on a GPU.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

#: On a GPU one sample is a row of calls at least this long, so that the host's lead over the device, some ten
#: microseconds at the row's start, is lost in it.
ROW_S = 4e-3


def sample_seconds(
    call: Callable[[], object], cuda: bool, budget_s: float = 0.3, at_least: int = 5, at_most: int = 50
) -> list[float]:
    """Seconds of one call: by CUDA events around a row of calls on a GPU, by ``perf_counter`` around each elsewhere.

    Warms up for a third of the budget (two samples at least), then samples until the budget is spent.

    Raises:
        ValueError: fewer than one sample asked for.
    """
    if at_least < 1 or at_most < at_least:
        raise ValueError(f"asked for {at_least} to {at_most} samples; at least one is needed")
    row = 1
    if cuda:
        _cuda_row(call, 1)
        row = max(1, min(1000, math.ceil(ROW_S / max(_cuda_row(call, 3), 1e-7))))

    def timed() -> float:
        return _cuda_row(call, row) if cuda else _host_call(call)

    begin, warm = time.perf_counter(), 0
    while warm < 2 or time.perf_counter() - begin < budget_s / 3:
        timed()
        warm += 1
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < at_most and (len(samples) < at_least or time.perf_counter() - begin < budget_s):
        samples.append(timed())
    return samples


def steady(samples: Sequence[float], cuda: bool) -> float:
    """One figure for samples: the median on a GPU, whose clocks move both ways; the least on a CPU.

    Whatever disturbs a sample on a CPU makes it longer, so that there the least is the steadiest.
    """
    return statistics.median(samples) if cuda else min(samples)


def steady_seconds(call: Callable[[], object], cuda: bool, budget_s: float = 0.3) -> float:
    """:func:`steady` of :func:`sample_seconds`."""
    return steady(sample_seconds(call, cuda, budget_s), cuda)


def launch_seconds(call: Callable[[], object], cuda: bool, count: int, blocks: int = 7) -> float:
    """Seconds of one call inside a long row of them, by the host's clock around ``count`` calls and a fence."""
    found = []
    for block in range(blocks + 1):
        _fence(cuda)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        _fence(cuda)
        if block:  # the first warms up
            found.append((time.perf_counter() - begin) / count)
    return steady(found, cuda)


def _host_call(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _cuda_row(call: Callable[[], object], count: int) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def _fence(cuda: bool) -> None:
    if cuda:
        import torch

        torch.cuda.synchronize()
