"""Energy is that of one run, and absent where nobody counts it."""

from __future__ import annotations

import pytest

from harness.conditions import Conditions
from harness.energy import SPAN_S, energy_per_run


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
