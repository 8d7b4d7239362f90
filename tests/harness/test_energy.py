"""Energy is that of one run, and absent where nobody counts it."""

from __future__ import annotations

import pytest

from harness.conditions import Conditions
from harness.energy import SPAN_S, energy_per_run
from harness.session import sampling_seconds


class Meter:
    """A watch whose counter grows by two joules a run."""

    def __init__(self, counts: bool = True) -> None:
        self.runs, self.time, self.counts, self._from = 0, 0.0, counts, 0

    def run(self) -> None:
        self.runs += 1
        self.time += 0.01

    def start(self) -> None:
        self._from = self.runs

    def poke(self) -> None: ...

    def stop(self) -> Conditions:
        return Conditions(True, energy_j=2.0 * (self.runs - self._from) if self.counts else None)


def test_joules_are_divided_by_the_runs_that_took_them() -> None:
    meter = Meter()
    assert energy_per_run(meter.run, lambda: None, meter, 0.01, lambda: meter.time) == pytest.approx(2.0)
    assert meter.time >= SPAN_S


def test_without_a_counter_there_is_no_figure() -> None:
    meter = Meter(counts=False)
    assert energy_per_run(meter.run, lambda: None, meter, 0.01, lambda: meter.time) is None


def test_the_runs_whose_energy_is_read_count_as_timed() -> None:
    """Of 51 s of a full run 16 were these, and were told as overhead."""
    one = {"technique": "t", "workload": "w", "ranks": 1}
    records = [
        {**one, "costs": {"sampling_s": 2.0, "energy_s": 1.0, "check_s": 5.0}},
        {**one, "costs": {"sampling_s": 2.0, "energy_s": 1.5}},
        {**one, "workload": "v", "costs": {"sampling_s": 0.5}},
        {**one, "workload": "u"},
    ]
    assert sampling_seconds(records) == 2.0 + 1.0 + 1.5 + 0.5
