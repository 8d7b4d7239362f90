"""Right and wrong are told apart by the pair's rule, and an exception is neither."""

from __future__ import annotations

import math

import pytest
import torch

from harness.check import judge, judge_scored
from harness.pair import Tolerance

SAME = Tolerance()
TRUTH = {"out": torch.linspace(-3, 3, 64, dtype=torch.float64)}
BASE = {"out": TRUTH["out"].bfloat16()}


def _moved(by: float) -> dict[str, torch.Tensor]:
    out = TRUTH["out"].clone()
    out[5] += by
    return {"out": out.bfloat16()}


def test_twice_the_baselines_own_error_passes_and_more_does_not() -> None:
    one = 2**-8 * 3  # a rounding of the largest element
    assert judge(SAME, "bfloat16", TRUTH, BASE, BASE).passed
    assert judge(SAME, "bfloat16", TRUTH, _moved(0.5 * one), BASE).passed
    verdict = judge(SAME, "bfloat16", TRUTH, _moved(4 * one), BASE)
    assert not verdict.passed
    assert verdict.tensor == "out"
    assert verdict.error > verdict.bound > 0


def test_the_baseline_itself_must_be_sane() -> None:
    assert judge(SAME, "bfloat16", TRUTH, BASE, None, is_baseline=True).passed
    assert not judge(SAME, "bfloat16", TRUTH, {"out": BASE["out"] * 2}, None, is_baseline=True).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_where_the_oracle_has_none_never_pass(bad: float) -> None:
    result = {"out": BASE["out"].clone()}
    result["out"][7] = bad
    for rule in (SAME, Tolerance("lossy", bound=10.0), Tolerance("ranks")):
        verdict = judge(rule, "bfloat16", TRUTH, result, {"out": result["out"]})
        assert not verdict.passed
        assert "[7]" in verdict.reason


def test_nan_where_the_oracle_has_it_is_right_and_a_number_there_is_wrong() -> None:
    truth = {"out": TRUTH["out"].clone()}
    truth["out"][3] = math.nan
    truth["out"][4] = math.inf
    same = {"out": truth["out"].bfloat16()}
    assert judge(SAME, "bfloat16", truth, same, same).passed
    assert not judge(SAME, "bfloat16", truth, BASE, same).passed
    flipped = {"out": same["out"].clone()}
    flipped["out"][4] = -math.inf
    assert not judge(SAME, "bfloat16", truth, flipped, same).passed


def test_shape_dtype_strides_and_names_are_part_of_the_contract() -> None:
    square = {"out": torch.randn(8, 8, dtype=torch.float64)}
    base = {"out": square["out"].float()}
    for wrong, word in (
        ({"out": base["out"][:4]}, "shape"),
        ({"out": base["out"].double()}, "dtype"),
        ({"out": base["out"].t().contiguous().t()}, "strides"),
        ({}, "lacks"),
        ({**base, "more": base["out"]}, "too many"),
        ({"out": [1.0]}, "not a tensor"),
    ):
        verdict = judge(SAME, "float32", square, wrong, base)
        assert not verdict.passed
        assert word in verdict.reason


def test_exact_is_to_the_bit() -> None:
    truth = {"out": torch.arange(9.0)}
    assert judge(Tolerance("exact"), "float32", truth, {"out": torch.arange(9.0)}, None).passed
    assert not judge(Tolerance("exact"), "float32", truth, {"out": torch.arange(9.0) + 1e-6}, None).passed


def test_lossy_and_ranks_hold_their_bounds() -> None:
    truth = {"w": torch.ones(100, dtype=torch.float64)}
    near = {"w": torch.full((100,), 1 + 1e-3)}
    assert judge(Tolerance("lossy", bound=2e-3), "float32", truth, near, None).passed
    assert not judge(Tolerance("lossy", bound=5e-4), "float32", truth, near, None).passed
    assert not judge(Tolerance("ranks"), "float32", truth, near, None).passed
    assert judge(Tolerance("ranks"), "float32", truth, {"w": torch.full((100,), 1 + 5e-6)}, None).passed
    assert not judge(Tolerance("ranks"), "float64", truth, {"w": truth["w"] + 1e-11}, None).passed


def test_tokens_must_be_the_very_tokens() -> None:
    truth = {"a": [1, 2, 3], "b": torch.tensor([4, 5])}
    rule = Tolerance("tokens")
    assert judge(rule, "float32", truth, {"a": torch.tensor([1, 2, 3]), "b": [4, 5]}, None).passed
    assert "token 1" in judge(rule, "float32", truth, {"a": [1, 9, 3], "b": [4, 5]}, None).reason
    assert "token 2" in judge(rule, "float32", truth, {"a": [1, 2], "b": [4, 5]}, None).reason
    assert "no tokens for b" in judge(rule, "float32", truth, {"a": [1, 2, 3]}, None).reason


def test_scored_tokens_pass_within_twice_the_plain_loops_error() -> None:
    assert judge_scored({"gap": 0.1, "bound": 0.2, "over": 0.0, "divergences": 3.0}).passed
    assert not judge_scored({"gap": 0.3, "bound": 0.2, "over": 1.0, "divergences": 3.0}).passed
    assert not judge_scored({"gap": math.inf, "bound": 0.0, "over": 1.0, "divergences": 0.0}).passed


def test_a_verdict_is_json_even_when_its_bound_is_infinite() -> None:
    verdict = judge(Tolerance("lossy", bound=1.0), "float32", TRUTH, {"out": TRUTH["out"].float()}, None)
    assert verdict.as_record()["tensors"]["out"]["bound_max"] is None


def test_empty_tensors_are_right() -> None:
    empty = {"out": torch.empty(0, 4, dtype=torch.float64)}
    assert judge(SAME, "float32", empty, {"out": torch.empty(0, 4)}, {"out": torch.empty(0, 4)}).passed
