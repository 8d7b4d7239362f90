"""The small stopwatch of the machine's own figures."""

import pytest

from harness import stopwatch
from harness.stopwatch import launch_seconds, sample_seconds, steady, steady_seconds


class FakeTime:
    """A clock that only the timed calls move."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: self.now)

    def takes(self, seconds):
        def call():
            self.now += seconds

        return call


@pytest.fixture
def clock(monkeypatch):
    return FakeTime(monkeypatch)


def test_samples_until_the_budget_is_spent(clock):
    samples = sample_seconds(clock.takes(0.01), False, budget_s=0.3)
    assert samples == pytest.approx([0.01] * len(samples))
    assert 29 <= len(samples) <= 31


def test_a_call_longer_than_the_budget_still_gets_the_least_count(clock):
    assert len(sample_seconds(clock.takes(5.0), False, budget_s=0.3, at_least=5)) == 5


def test_a_short_call_stops_at_the_most_count(clock):
    assert len(sample_seconds(clock.takes(1e-4), False, budget_s=0.3, at_most=50)) == 50


def test_the_first_calls_are_not_counted(clock):
    cost = iter([9.0, 9.0] + [0.1] * 100)

    def call():
        clock.now += next(cost)

    assert max(sample_seconds(call, False, budget_s=0.3)) == pytest.approx(0.1)


def test_the_median_on_a_gpu_and_the_least_on_a_cpu():
    assert steady([3.0, 1.0, 2.0, 50.0, 2.5], cuda=True) == 2.5
    assert steady([3.0, 1.0, 2.0, 50.0, 2.5], cuda=False) == 1.0


def test_launch_cost_is_per_call(clock):
    assert launch_seconds(clock.takes(2e-6), False, count=100) == pytest.approx(2e-6)
    assert steady_seconds(clock.takes(0.05), False) == pytest.approx(0.05)


def test_no_samples_are_refused(clock):
    with pytest.raises(ValueError, match="at least one"):
        sample_seconds(clock.takes(1.0), False, at_least=0)


class FakeDevice:
    """A GPU whose clock moves by a fixed time a call, after a gap in which the host gets the row started."""

    def __init__(self, monkeypatch, call_s, gap_s):
        import torch

        device, self.now, self.calls, self.call_s = self, 0.0, 0, call_s

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                self.at = device.now
                device.now += gap_s

            def synchronize(self):
                return None

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: self.now)

    def call(self):
        self.calls += 1
        self.now += self.call_s


def test_on_a_gpu_rows_of_calls_drown_the_gap_at_their_start(monkeypatch):
    device = FakeDevice(monkeypatch, call_s=200e-6, gap_s=20e-6)
    samples = sample_seconds(device.call, True, budget_s=0.1)
    assert steady(samples, True) == pytest.approx(200e-6, rel=0.01)
    assert len(samples) >= 5


def test_on_a_gpu_a_long_call_is_a_row_of_its_own(monkeypatch):
    device = FakeDevice(monkeypatch, call_s=0.5, gap_s=0.0)
    assert steady(sample_seconds(device.call, True, budget_s=0.1), True) == pytest.approx(0.5)
    assert device.calls <= 12
