"""Right and wrong are told apart by the pair's rule, and an exception is neither."""

from __future__ import annotations

import math

import pytest
import torch

from harness.check import UNIT, Verdict, judge, judge_scored, sum_floor
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


def _one_after_another(terms: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(terms[0])
    for row in terms:
        total = total + row
    return total


def _judged(terms: torch.Tensor, found: torch.Tensor) -> Verdict:
    """Judges a column sum against float64's; the plain way sums pairwise, and its error is by luck very small."""
    truth = {"grad:weight": terms.double().sum(0)}
    plain = {"grad:weight": terms.T.contiguous().sum(1)}
    result = {"grad:weight": found.to(torch.float32)}
    return judge(SAME, "float32", truth, result, plain, gathered=terms.numel())


@pytest.mark.parametrize("width", [1, 2, 3, 5, 6, 7, 9])
def test_a_few_long_sums_may_be_added_up_in_any_order(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    wrong = 0
    for _ in range(40):
        terms = torch.randn(512, width, generator=generator)
        wrong += not _judged(terms, _one_after_another(terms)).passed
    # One element alone may be near zero, where nothing tells how large a sum is by habit.
    assert wrong <= (3 if width == 1 else 1 if width == 2 else 0)


@pytest.mark.parametrize("width", [1, 3, 7, 576])
@pytest.mark.parametrize("rows", [64, 512, 8192])
def test_few_elements_and_long_sums_hide_no_wrong_kernel(rows: int, width: int) -> None:
    terms = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + width))
    sound = terms.double().sum(0)
    assert _judged(terms, sound).passed
    mutants = {
        "a dropped row": terms[1:].double().sum(0),
        "bfloat16 accumulation": _one_after_another(terms.bfloat16()),
        "bfloat16 partial sums": terms.unflatten(0, (16, -1)).sum(1).bfloat16().double().sum(0),
        "a wrong factor": sound * (1 + 2**-12),
    }
    passed = [name for name, found in mutants.items() if _judged(terms, found).passed]
    assert not passed


def test_the_floor_of_sums_stays_small_and_is_for_sums_in_their_own_precision() -> None:
    assert sum_floor(1.0, 1, 1 << 40, "float32") <= 2**-15
    assert sum_floor(1.0, 64, 64, "float32") == 0
    assert sum_floor(1.0, 1, 1 << 40, "float64") <= 2**-44
    assert sum_floor(1.0, 1, 1 << 40, "bfloat16") < UNIT["bfloat16"] / 64
