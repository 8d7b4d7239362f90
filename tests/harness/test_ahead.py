"""A step's record says when the device waits for the host: a host's clock alone always said that none did."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import ahead
from harness.job import EventReader, Events, MeasureJob
from harness.measure import Measurement
from harness.pair import Claim, Context, Inputs, Pair, Variant, Work
from harness.ranked import Agreement
from harness.workload import parse_workload


class Case:
    def __init__(self, workload: Any, ctx: Context) -> None:
        self.x = torch.empty(0)

    def load(self, inputs: Inputs) -> None:
        self.x = inputs["x"].clone()

    def run(self) -> None:
        self.y = self.x * 2

    def result(self) -> dict[str, torch.Tensor]:
        return {"y": self.y}


PAIR = Pair(
    name="toy",
    kind="step",
    layer="graph",
    relieves="launch",
    claim=Claim(),
    inputs=lambda workload, ctx: {"x": ctx.randn(8)},
    oracle=Case,
    variants={"baseline": Variant(Case), "optimized": Variant(Case)},
    work=lambda workload: Work(),
)


def _samples(folder: Path, pair: Pair = PAIR, **job: Any) -> dict[str, dict[str, Any]]:
    raw = {"name": "w", "tier": "smoke", "dtype": "float32", "ranks": 1}
    workload = parse_workload("toy", raw, "test")
    asked = MeasureJob("toy", (workload,), tuple(pair.variants), "cpu", str(folder / "events"), samples=4, **job)
    events = Events(folder / "events", 0)
    Measurement(pair, workload, asked, Agreement(0, 1), events).run()
    events.close()
    return {e["variant"]: e["samples"] for e in EventReader(folder / "events").new() if e["event"] == "result"}


def test_a_step_whose_device_would_be_done_much_sooner_is_bound_by_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([1e-12, 10.0])
    monkeypatch.setattr(ahead, "looks_at", lambda *_: True)
    monkeypatch.setattr(ahead, "device_seconds", lambda *_: next(found))
    samples = _samples(tmp_path)
    assert samples["baseline"]["host_bound"] == 4
    assert samples["baseline"]["device_s"] == 1e-12
    assert samples["optimized"]["host_bound"] == 0


def test_one_that_is_alone_is_looked_at_before_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "looks_at", lambda *_: True)
    monkeypatch.setattr(ahead, "device_seconds", lambda *_: 1e-12)
    alone = {name: Variant(Case, exclusive=True) for name in PAIR.variants}
    assert {s["host_bound"] for s in _samples(tmp_path, replace(PAIR, variants=alone)).values()} == {4}


def test_only_short_steps_on_a_gpu_are_looked_at() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert ahead.looks_at("step", cuda, 0.07)
    assert not ahead.looks_at("step", cuda, 3.0)
    assert not ahead.looks_at("step", cpu, 0.07)
    assert not ahead.looks_at("op", cuda, 0.07)
    assert not ahead.looks_at("serve", cuda, 0.07)


def test_without_a_look_nothing_is_said() -> None:
    assert not ahead.host_bound(None, 1.0)
    assert ahead.host_bound(0.5, 1.0)
    assert not ahead.host_bound(0.9, 1.0)


@pytest.mark.gpu
def test_the_device_alone_is_what_its_products_take_however_slow_the_host() -> None:
    import time

    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def slow() -> None:
        for _ in range(5):
            x @ x
            time.sleep(0.01)

    slow()
    assert ahead.device_seconds(slow, device, 0.05) < 0.02
