"""Whether a step keeps the device waiting for the host, which a host's clock around the whole step cannot see.

The step is run once more behind a pause that lets the host enqueue it first. What the device then takes is at most what
a host that is fast enough would leave. At most: a device's queue is finite, and a step that waits for its own results
cannot be enqueued ahead, so that nothing is said of those.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

#: A step is bound by the host when the device by itself takes less than this share of it.
HOST_BOUND = 0.8
#: The pause, in times of the step, and a clock rate that no GPU of today is far above.
PAUSE, CYCLES_A_SECOND = 1.2, 2e9
#: Longer steps are not looked at: the pause takes as long as they do, and a host that is so far behind shows elsewhere.
LONGEST_S = 2.0


def device_seconds(call: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Seconds that the device takes at most for a call whose latency is ``seconds``, on a CUDA GPU."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(seconds * PAUSE * CYCLES_A_SECOND))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end) / 1e3)


def looks_at(kind: str, device: torch.device, seconds: float) -> bool:
    """Whether the question makes sense: of steps on a GPU that are short. An op's own clock sees it, a serve run is the
    host's work in great part."""
    return kind == "step" and device.type == "cuda" and seconds <= LONGEST_S


def host_bound(device_s: float | None, latency: float) -> bool:
    """Whether the device waits for the host in a step of that latency."""
    return device_s is not None and device_s < HOST_BOUND * latency
