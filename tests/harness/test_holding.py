"""What need not be held while a workload is measured, and when cases cannot stay side by side."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from harness import holding
from harness.entry import UndeclaredChange
from harness.errors import UsageError
from harness.holding import crowds, fit_together, form_of, own_copy, truth_of
from harness.job import EventReader, Events, MeasureJob
from harness.measure import Measurement
from harness.opcase import OpCase
from harness.pair import Claim, Context, Inputs, Pair, Variant, Work
from harness.ranked import Agreement
from harness.runner import Progress
from harness.workload import parse_workload


def test_a_large_truth_is_no_longer_the_oracles_memory():
    small, large = torch.zeros(2), torch.zeros(100)
    assert truth_of({"x": small}, 64)["x"] is small
    kept = truth_of({"x": large, "tokens": [1]}, 64)
    assert kept["x"].device.type == "cpu"
    assert kept["tokens"] == [1]
    assert truth_of({"x": large}, None)["x"] is large


def test_a_copy_shares_nothing_with_the_case():
    x = torch.arange(4.0)
    found = {"x": x, "view": x[:2], "tokens": [3]}
    copy = own_copy(found)
    x.zero_()
    assert copy["x"].tolist() == [0, 1, 2, 3]
    assert copy["view"].tolist() == [0, 1]
    assert list(copy) == list(found) == ["x", "view", "tokens"]


def test_of_a_result_whose_values_are_not_asked_for_the_form_stays():
    x = torch.empty(3, 4, dtype=torch.bfloat16).T
    form = form_of({"x": x})["x"]
    assert (form.shape, form.stride(), form.dtype) == (x.shape, x.stride(), x.dtype)
    assert form.is_meta


def test_cases_crowd_by_what_all_of_them_would_hold():
    assert crowds(30, 4, 200)
    assert not crowds(20, 4, 200)
    assert not crowds(30, 4, None)


def test_cases_fit_together_when_each_can_run_beside_the_others():
    assert fit_together(10, [20, 20, 20], [30, 10, 10], 120)
    assert not fit_together(10, [20, 20, 20], [35, 10, 10], 120)
    assert fit_together(10, [200], [300], None)


class _Two(Agreement):
    """Two ranks of which the other says what this one says."""

    def __init__(self) -> None:
        self.rank, self.world = 0, 2

    def tell(self, value: Any) -> Any:
        return value

    def gather(self, value: float) -> list[float]:
        return [value, value]

    def align(self) -> None: ...


class _Open:
    """A case that cannot unload, and how many of its kind are open while it runs."""

    now, most = 0, 0

    def __init__(self, workload: Any, ctx: Context) -> None:
        _Open.now += 1

    def load(self, inputs: Inputs) -> None:
        self.x = inputs["x"]

    def run(self) -> None:
        _Open.most = max(_Open.most, _Open.now)

    def result(self) -> dict[str, torch.Tensor]:
        return {"x": self.x * 2}

    def close(self) -> None:
        _Open.now -= 1


def _measurement(folder: Path, agreement: Agreement, case: type[_Open] = _Open) -> Measurement:
    pair = Pair(
        name="toy",
        kind="step",
        layer="system",
        relieves="capacity",
        claim=Claim(),
        inputs=lambda workload, ctx: {"x": ctx.randn(8)},
        oracle=case,
        variants={name: Variant(case) for name in ("baseline", "optimized", "third")},
        work=lambda workload: Work(),
    )
    raw = {"name": "w", "tier": "smoke", "dtype": "float32", "ranks": agreement.world}
    workload = parse_workload("toy", raw, "test")
    job = MeasureJob("toy", (workload,), tuple(pair.variants), "cpu", str(folder / "events"), samples=3)
    events = Events(folder / "events", 0)
    _open.append(events)
    return Measurement(pair, workload, job, agreement, events)


_open: list[Events] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


class _Smaller(_Two):
    """The other rank's GPU has less memory."""

    def gather(self, value: float) -> list[float]:
        return [value, min(value, 70.0)]


def test_ranks_whose_gpus_differ_count_on_the_smallest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "capacity", lambda device: 140)
    measurement = _measurement(tmp_path, _Smaller())
    assert measurement.room == 70
    monkeypatch.setattr(holding, "capacity", lambda device: None)
    assert _measurement(tmp_path, _Smaller()).room is None


def test_an_error_of_one_rank_s_own_ends_the_worker_of_ranks(tmp_path: Path) -> None:
    measurement = _measurement(tmp_path, _Two())

    def refuse() -> None:
        raise UsageError("not on this rank")

    with pytest.raises(UsageError):
        measurement._guarded(measurement.entries[0], refuse)


def test_all_ranks_hear_of_an_op_that_overwrites_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = _Two()
    other.rank = 1
    measurement = _measurement(tmp_path, other)
    entry, inputs = measurement.entries[0], measurement._draw(0)
    entry.case = OpCase(lambda x: x * 2, measurement.workload, measurement.ctx, None, upcast=False)
    monkeypatch.setattr(other, "tell", lambda value: {"x"})
    with pytest.raises(UndeclaredChange):
        measurement._result(entry, inputs, first=False)


class _Late(Exception): ...


@pytest.mark.parametrize("where", ["counters", "unload"])
def test_what_fails_after_the_last_sample_is_blamed_on_its_own_variant(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement = _measurement(tmp_path, Agreement(0, 1))
    timed: list[bool] = []
    before = measurement._time_all
    monkeypatch.setattr(measurement, "_time_all", lambda: (timed.append(True), before()))

    def fails(case: _Open) -> dict[str, float]:
        if timed:
            raise _Late
        return {}

    monkeypatch.setattr(_Open, where, fails, raising=False)
    with pytest.raises(_Late):
        measurement.run()
    progress = Progress()
    for event in EventReader(tmp_path / "events").new():
        progress.take(event)
    assert progress.hand[1] == "baseline"
    assert progress.hand[2] != "time"  # of that the last sample would tell


def test_ranks_are_done_with_one_variant_before_rank_0_says_that_the_next_is_in_hand(tmp_path: Path) -> None:
    hands: set[tuple[str, str]] = set()

    class Hands(_Two):
        def align(self) -> None:
            lines = EventReader(tmp_path / "events").new()
            hands.add((lines[-1]["variant"], lines[-1]["phase"]))

    measurement = _measurement(tmp_path, Hands())
    measurement.run()
    names = [e.name for e in measurement.entries]
    assert {(name, phase) for name in names for phase in ("memory", "reading", "unloading", "recheck")} <= hands


class _Large(_Open):
    """Needs for one run what is not there while others are open."""

    timed = False
    held: ClassVar[list[weakref.ref[Any]]] = []
    still: ClassVar[list[bool]] = []

    def run(self) -> None:
        super().run()
        activation = torch.zeros(8)
        if _Open.now > 1 and _Large.timed:
            _Large.held.append(weakref.ref(activation))
            raise torch.OutOfMemoryError("CUDA out of memory")
        _Large.still += [ref() is not None for ref in _Large.held]


def test_what_did_not_fit_beside_others_is_gone_when_each_is_timed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement = _measurement(tmp_path, Agreement(0, 1), _Large)
    before = measurement._time_all
    monkeypatch.setattr(_Large, "timed", False)
    monkeypatch.setattr(measurement, "_time_all", lambda: (setattr(_Large, "timed", True), before()))
    let_go = measurement._let_go
    monkeypatch.setattr(measurement, "_let_go", lambda: (setattr(_Large, "timed", False), let_go()))
    _Open.now = 0
    measurement.run()
    assert {e.status for e in measurement.entries} == {""}
    assert _Large.held
    assert not any(_Large.still)


@pytest.mark.parametrize(("fit", "most"), [(True, 3), (False, 1)])
def test_ranks_time_one_after_another_what_was_counted_not_to_fit(
    fit: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement = _measurement(tmp_path, _Two())

    def fits(*_: Any) -> bool:
        _Open.most = 0  # from here on
        return fit

    seen: list[int] = []
    let_go = measurement._let_go
    monkeypatch.setattr(measurement, "_let_go", lambda: (seen.append(_Open.most), let_go()))
    monkeypatch.setattr(holding, "fit_together", fits)
    _Open.now = 0
    measurement.run()
    assert {e.status for e in measurement.entries} == {""}
    assert (seen, _Open.now) == ([most], 0)
