"""Readings of the machine under asv: carried to the next technique of the same commit, and taken anew when old."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness import asv_machine, machine
from harness.asv_machine import CarriedMachine, Unwatched
from harness.report import Reporter
from harness.sentinel import Reading

WHERE = {"gpu": "toy", "machine": "here", "commit": "abc"}


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every probe asked for, as whether it wanted ceilings; each reading is one millisecond slower."""
    asked: list[bool] = []

    def probe(device: str, where: Any, want_ceilings: bool, recalibrate: bool = False) -> dict[str, Any]:
        asked.append(want_ceilings)
        reading = Reading("cpu", "float32", 512, 1 << 20, 0.1 + len(asked) / 1000, 0.1)
        ceilings = {"gpu": "toy", "machine": "here", "torch": "2", "driver": None, "time": "now", "copy": 1e9}
        return {"sentinel": reading.as_record(), "ceilings": ceilings, "problems": []}

    monkeypatch.setattr(machine, "probe", probe)
    return asked


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock says; change its only entry."""
    now = [1000.0]
    monkeypatch.setattr(asv_machine.time, "time", lambda: now[0])
    return now


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which readings are carried; the plugin makes it empty."""
    path = tmp_path / "state"
    path.touch()
    monkeypatch.setenv(asv_machine.STATE, str(path))
    return path


def watch(**changes: str) -> CarriedMachine:
    """The machine as a process of its own meets it."""
    return CarriedMachine("cpu", {**WHERE, **changes}, Reporter())


def test_a_neighbour_in_time_takes_the_reading_over_and_says_nothing_of_it(
    probes: list[bool], clock: list[float], state: Path
) -> None:
    first, second = watch(), watch()
    said = first.begin()
    assert said is not None
    assert said["reading"]["matmul_s"] == 0.101
    clock[0] += 20
    assert first.end() is None
    assert second.begin() is None
    assert second.ceilings == first.ceilings
    assert probes == [True]


def test_an_old_reading_is_taken_anew_and_compared_with_the_last(
    probes: list[bool], clock: list[float], state: Path
) -> None:
    first, second = watch(), watch()
    first.begin()
    clock[0] += 61
    said = first.end()
    assert said is not None
    assert said["product"] == pytest.approx(0.102 / 0.101)
    assert second.begin() is None
    clock[0] += 61
    later = second.end()
    assert later is not None
    assert later["product"] == pytest.approx(0.103 / 0.102)
    assert probes == [True, False, False]


@pytest.mark.parametrize(("took", "fresh"), [(1.0, 60.0), (4.0, 80.0), (100.0, 300.0)])
def test_a_reading_that_took_long_stays_fresh_for_longer(
    probes: list[bool],
    clock: list[float],
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    took: float,
    fresh: float,
) -> None:
    quick = machine.probe

    def slow(*args: Any, **kwargs: Any) -> dict[str, Any]:
        clock[0] += took
        return quick(*args, **kwargs)

    monkeypatch.setattr(machine, "probe", slow)
    watch().begin()
    clock[0] += fresh - 0.1
    neighbour = watch()
    assert neighbour.begin() is None
    assert neighbour.end() is None
    clock[0] += 0.2
    assert neighbour.end() is not None


@pytest.mark.parametrize("changes", [{"commit": "abd"}, {"gpu": "other"}, {"machine": "there"}])
def test_another_commit_or_machine_has_a_reading_of_its_own(
    probes: list[bool], clock: list[float], state: Path, changes: dict[str, str]
) -> None:
    watch().begin()
    assert watch(**changes).begin() is not None
    assert probes == [True, True]


def test_a_reading_from_long_ago_or_from_the_future_is_not_taken_over(
    probes: list[bool], clock: list[float], state: Path
) -> None:
    watch().begin()
    clock[0] += 121
    assert watch().begin() is not None
    clock[0] -= 500
    assert watch().begin() is not None
    assert len(probes) == 3


def test_without_asv_each_run_reads_twice(
    probes: list[bool], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(asv_machine.STATE, raising=False)
    here = watch()
    assert here.begin() is not None
    assert here.end() is not None
    assert probes == [True, False]


def test_the_state_is_whole_json_without_nan(probes: list[bool], clock: list[float], state: Path) -> None:
    watch().begin()
    kept = json.loads(state.read_text())
    assert kept["of"] == ["cpu", "toy", "here", "abc"]
    assert [p.name for p in state.parent.iterdir()] == ["state"]


def test_a_quick_run_reads_nothing(probes: list[bool]) -> None:
    quick = Unwatched("cpu", WHERE, Reporter())
    quick.begin()
    quick.end()
    assert not probes
