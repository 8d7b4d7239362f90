"""Clocks say what they are, never fall back, and leave nothing untimed."""

from __future__ import annotations

import pytest
import torch

from harness.clock import ClockError, EventClock, WallClock, clock_for, inner_calls
from harness.pair import Context

CPU = torch.device("cpu")


def test_event_clock_without_a_gpu_raises_instead_of_falling_back() -> None:
    with pytest.raises(ClockError, match="needs a CUDA GPU"):
        EventClock(CPU)


def test_wall_clock_divides_by_the_calls_inside_one_sample() -> None:
    times = iter([0.0, 8.0])
    calls: list[int] = []
    clock = WallClock(CPU, inner=4, now=lambda: next(times))
    assert clock.time(lambda: calls.append(1)).seconds == 2.0
    assert len(calls) == 4


def test_short_calls_are_repeated_inside_a_sample_and_long_ones_are_not() -> None:
    assert inner_calls(1e-6) == 300
    assert inner_calls(1.0) == 1
    assert inner_calls(0.0) == 1000


def test_steps_and_cpu_ops_are_timed_by_the_host() -> None:
    assert clock_for("op", CPU).name == "wall"
    assert clock_for("step", CPU).cache == "warm"


@pytest.mark.gpu
def test_a_side_stream_that_is_not_joined_is_refused() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    side = torch.cuda.Stream()

    def escapes() -> None:
        with torch.cuda.stream(side):
            for _ in range(20):
                x @ x

    clock = EventClock(device)
    with pytest.raises(ClockError, match="side stream"):
        clock.verify(escapes)
    clock.verify(lambda: x @ x)


@pytest.mark.gpu
def test_event_times_agree_with_triton_do_bench() -> None:
    import statistics

    from triton.testing import do_bench

    device = torch.device("cuda")
    ctx = Context(device, torch.bfloat16, 0)
    x = ctx.randn(16384, 4096)
    y = torch.empty_like(x)
    clock = EventClock(device)
    ours = statistics.median(clock.time(lambda: y.copy_(x)).seconds for _ in range(50))
    theirs = do_bench(lambda: y.copy_(x), return_mode="median") / 1e3
    assert ours == pytest.approx(theirs, rel=0.03)


def test_only_a_stream_that_is_late_each_time_is_unjoined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy host is late now and then, and costs no record."""
    clock = object.__new__(EventClock)
    found = iter([214e-6, 300e-6, 5e-6])
    monkeypatch.setattr(clock, "_late", lambda call: next(found))
    clock.verify(lambda: None)
    found = iter([5e-6, 5e-6])
    with pytest.raises(StopIteration):
        clock.verify(lambda: None, lambda late: 300e-6)  # another rank is late, and this one runs again with it
    monkeypatch.setattr(clock, "_late", lambda call: 201e-6)
    with pytest.raises(ClockError, match="work went on for 201 µs"):
        clock.verify(lambda: None)
