"""What need not be held while a workload is measured, and when cases cannot stay side by side."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import holding
from harness.holding import crowds, fit_together, form_of, own_copy, truth_of
from harness.job import Events, MeasureJob
from harness.measure import Measurement
from harness.pair import Claim, Context, Inputs, Pair, Variant, Work
from harness.ranked import Agreement
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


@pytest.mark.parametrize(("fit", "most"), [(True, 3), (False, 1)])
def test_ranks_time_one_after_another_what_was_counted_not_to_fit(
    fit: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(
        name="toy",
        kind="step",
        layer="system",
        relieves="capacity",
        claim=Claim(),
        inputs=lambda workload, ctx: {"x": ctx.randn(8)},
        oracle=_Open,
        variants={name: Variant(_Open) for name in ("baseline", "optimized", "third")},
        work=lambda workload: Work(),
    )
    workload = parse_workload("toy", {"name": "w", "tier": "smoke", "dtype": "float32", "ranks": 2}, "test")
    job = MeasureJob("toy", (workload,), tuple(pair.variants), "cpu", str(tmp_path / "events"), samples=3)
    events = Events(tmp_path / "events", 0)
    measurement = Measurement(pair, workload, job, _Two(), events)

    def fits(*_: Any) -> bool:
        _Open.most = 0  # from here on
        return fit

    seen: list[int] = []
    let_go = measurement._let_go
    monkeypatch.setattr(measurement, "_let_go", lambda: (seen.append(_Open.most), let_go()))
    monkeypatch.setattr(holding, "fit_together", fits)
    _Open.now = 0
    measurement.run()
    events.close()
    assert {e.status for e in measurement.entries} == {""}
    assert (seen, _Open.now) == ([most], 0)
