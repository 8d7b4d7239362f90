"""Clocks: what one timed call took, by the device's own events or by the host, and with which cache state.

A clock says its name and its cache policy, and a record keeps both: times of different clocks or policies are never
compared. A clock that is not available raises; it never falls back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from harness.errors import PairbenchError

#: Bytes written between samples to push everything else out of the last-level cache of any GPU of today.
FLUSH_BYTES = 256 << 20
#: A stream left unfenced shows as host time beyond the events' by more than this, each time. A busy host shows now and
#: then.
UNFENCED_SECONDS = 200e-6
VERIFY_TRIES = 4


class ClockError(PairbenchError):
    """The clock asked for cannot be had here, or the case escapes it."""


@dataclass(frozen=True)
class Tick:
    """One sample: seconds, whether the device waited for the host inside the span, and over ranks the skew (s)."""

    seconds: float
    host_bound: bool = False
    skew: float | None = None


class Clock(Protocol):
    """``name`` and ``cache`` go into the record; ``time`` runs the call once and says how long it took."""

    name: str
    cache: str

    def time(self, call: Callable[[], None]) -> Tick: ...

    def verify(self, call: Callable[[], None], worst: Callable[[float], float] = float) -> None: ...


class WallClock:
    """Host time around the call, with a synchronize on a GPU: for whatever the host drives.

    A call far shorter than the timer's own noise is repeated inside one sample; ``inner`` says how often.
    """

    name = "wall"
    cache = "warm"

    def __init__(self, device: torch.device, inner: int = 1, now: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.inner = inner
        self._now = now

    def time(self, call: Callable[[], None]) -> Tick:
        """Seconds of one call."""
        self._fence()
        start = self._now()
        for _ in range(self.inner):
            call()
        self._fence()
        return Tick((self._now() - start) / self.inner)

    def verify(self, call: Callable[[], None], worst: Callable[[float], float] = float) -> None:
        """Nothing escapes a synchronized host clock."""

    def _fence(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class EventClock:
    """CUDA events around the call, after the L2 cache was flushed and while the stream is kept busy.

    The flush and a short spin run before the start event, so the host has enqueued the whole call before the device
    reaches it. When the start event was already reached once the host was done, the device had to wait: such a sample
    is host-bound, and says so.
    """

    name = "cuda_event"

    def __init__(self, device: torch.device, cold: bool = True) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ClockError("the cuda_event clock needs a CUDA GPU; use the wall clock for this device")
        self.device = device
        self.cache = "cold" if cold else "warm"
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if cold else None
        self._spin_cycles = 100_000

    def time(self, call: Callable[[], None]) -> Tick:
        """Seconds between the events. The spin grows while samples are host-bound, up to a few milliseconds."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        if self._flush is not None:
            self._flush.zero_()
        torch.cuda._sleep(self._spin_cycles)
        start.record()
        call()
        host_bound = start.query()
        end.record()
        end.synchronize()
        if host_bound and self._spin_cycles < 8_000_000:
            self._spin_cycles *= 2
        return Tick(start.elapsed_time(end) / 1e3, host_bound)

    def verify(self, call: Callable[[], None], worst: Callable[[float], float] = float) -> None:
        """Runs the call and refuses one whose work goes on after the current stream is done.

        worst: of the seconds of every rank, so that all run it equally often.

        Raises:
            ClockError: work on a side stream that was not joined: events would not see it.
        """
        for _ in range(VERIFY_TRIES):
            late = worst(self._late(call))
            if late <= UNFENCED_SECONDS:
                return
        raise ClockError(
            f"work went on for {late * 1e6:.0f} µs after the current stream was done: "
            "the case leaves a side stream unjoined (make the current stream wait for it)"
        )

    def _late(self, call: Callable[[], None]) -> float:
        """Seconds from the end of the current stream's work to the end of all."""
        torch.cuda.synchronize(self.device)
        end = torch.cuda.Event()
        call()
        end.record()
        end.synchronize()
        joined = time.perf_counter()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - joined


def clock_for(kind: str, device: torch.device) -> Clock:
    """Events with a cold cache for ops on a GPU; the wall clock for steps, serve runs and everything on a CPU."""
    if kind == "op" and device.type == "cuda":
        return EventClock(device)
    return WallClock(device)


def inner_calls(seconds: float, at_least: float = 300e-6, most: int = 1000) -> int:
    """How many calls one host-timed sample needs so that the timer's own noise does not show."""
    if seconds <= 0:
        return most
    return max(1, min(most, round(at_least / seconds)))
