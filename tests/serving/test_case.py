"""What a check of a serve run scores: everything that fits, and a drawn part of what would take too long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.pair import Context
from harness.workload import Workload
from impls.serving.case import ServeCase, drawn, scored_tokens
from impls.serving.request import Request, Sampling
from impls.serving.scheduler import EngineConfig
from suites.serving.continuous_batching import WORKLOADS as CONTINUOUS


def requests(count: int, prompt: int, answer: int) -> list[Request]:
    return [Request(f"r{i}", [1] * prompt, Sampling(max_tokens=answer)) for i in range(count)]


def test_all_are_scored_where_they_fit() -> None:
    every = requests(5, 6, 4)
    assert {r.id for r in drawn(every, 0, most=50)} == {r.id for r in every}


def test_a_part_is_drawn_where_they_do_not_and_another_part_by_another_seed() -> None:
    every = requests(100, 6, 4)
    first, again, other = (drawn(every, seed, most=205) for seed in (1, 1, 2))
    assert len(first) == 20
    assert [r.id for r in first] == [r.id for r in again]
    assert {r.id for r in first} != {r.id for r in other}
    assert len({r.id for r in first}) == 20


def test_one_that_is_too_long_alone_is_scored_all_the_same() -> None:
    assert len(drawn(requests(3, 600, 4), 0, most=100)) == 1
    mixed = [*requests(1, 600, 4), *(Request(f"s{i}", [1], Sampling(max_tokens=4)) for i in range(9))]
    chosen = {r.id for r in drawn(mixed, 3, most=45)}
    assert chosen == {f"s{i}" for i in range(9)} or "r0" in chosen


def test_where_full_decode_steps_went_is_counted_when_graphs_know_it() -> None:
    workload = Workload("continuous_batching", "tiny", "smoke", "float32", CONTINUOUS[0])
    case: Any = ServeCase(workload, Context(torch.device("cpu"), torch.float32, seed=3), EngineConfig(max_running=4))
    full = 4
    assert "decode_step_s" not in case.counters()
    asked: list[int] = []
    case.runner.graphs = SimpleNamespace(full_seconds=lambda last: asked.append(last) or 0.009)
    case.recorder.steps = [(0, full, 0.010)] * 12 + [(64, full, 0.5), (0, 1, 0.001)]
    counts = case.counters()
    assert (counts["decode_step_s"], counts["decode_model_s"]) == (0.010, 0.009)
    assert counts["beside_model_share"] == pytest.approx(0.1)
    assert asked == [12], "the model's time is that of the same steps"
    case.recorder.steps = [(0, full, 0.010)] * 3
    assert "beside_model_share" not in case.counters()


def test_a_large_model_scores_fewer_tokens_and_a_small_one_a_whole_trace() -> None:
    with torch.device("meta"):
        small, large = (torch.nn.Linear(wide, wide, bias=False) for wide in (11_600, 89_600))
    assert scored_tokens(small) > 500_000
    assert 8_000 < scored_tokens(large) < 10_000
