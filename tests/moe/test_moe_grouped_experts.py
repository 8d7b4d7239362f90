"""The pair's counts and its routing, and the way that one line of torch gives, beside the definition."""

import pytest
import torch

from harness import discover
from harness.pair import Context
from harness.workload import parse_workload
from impls.moe import moe_grouped_experts as pair_module
from impls.moe.routing import chances, draw_routing, touched

#: Predicted speedups as the docstring states them, by workload.
PREDICTED = {"mixtral_4k_both": 1.15, "qwen3_4k_both": 23.6, "mixtral_decode64": 1.15, "qwen3_decode64": 43}
SIZES = {"tokens": 50, "width": 16, "inner": 8, "experts": 6, "choices": 2, "skew": 1.0}


def workload(**dims):
    raw = {"name": "w", "tier": "full", "dtype": "float32", **SIZES, **dims}
    return parse_workload("moe_grouped_experts", raw, "here")


def context(seed=3):
    return Context(torch.device("cpu"), torch.float32, seed)


@pytest.mark.parametrize("name", PREDICTED)
def test_predictions_are_those_of_the_docstring(name):
    technique = discover.find("moe_grouped_experts")
    found = {w.name: w for w in discover.workloads_of(technique)}[name]
    assert pair_module.predict(found) == pytest.approx(PREDICTED[name], rel=5e-3)


@pytest.mark.parametrize(
    ("dims", "passes"),
    [({}, True), ({"tokens": 511}, False), ({"inner": 68}, False), ({"direction": "forward"}, True)],
    ids=["many rows", "one too few", "rows of no whole 16 bytes", "forward"],
)
def test_passes_are_counted_where_experts_have_many_rows_that_the_products_for_them_take(dims, passes, monkeypatch):
    monkeypatch.setattr(pair_module, "LAUNCH", 0.0)
    dims = {"tokens": 512, "experts": 8, "width": 128, "inner": 64, "direction": "both"} | dims
    taken, not_taken = (workload(**dims, dtype=dtype) for dtype in ("bfloat16", "float16"))
    needed, steps = pair_module.work(taken), 2 if dims["direction"] == "both" else 1
    products = max(needed.flops / pair_module.PRODUCTS, needed.bytes / pair_module.COPY)
    rows = dims["tokens"] * 2 * 2 / pair_module.COPY  # a number of every pair
    token = 128 + 128 / 2
    plain = products + steps * token * rows
    more = products + ((2 * token + 3 * 64) + (3 * token + 6 * 64) * (steps - 1)) * rows
    ratio = pair_module.predict(not_taken) / pair_module.predict(taken)
    assert ratio == pytest.approx(more / plain if passes else 1.0)


def test_flops_are_three_products_a_pair_and_twice_that_backward():
    forward, backward, both = (
        pair_module.work(workload(direction=direction)).flops for direction in ("forward", "backward", "both")
    )
    assert forward == 50 * 2 * 3 * 2 * 16 * 8
    assert (backward, both) == (2 * forward, 3 * forward)


@pytest.mark.parametrize("dims", [{}, {"experts": 3, "choices": 3}, {"skew": 4.0, "tokens": 4}], ids=str)
def test_all_ways_of_torch_give_the_definition_and_its_gradients(dims):
    inputs = dict(pair_module.inputs(workload(**dims), context()))
    names, results = pair_module.PAIR.differentiable, []
    for function in (pair_module.plain, pair_module.grouped_mm, pair_module.oracle):
        leaves = {n: v.double() if function is pair_module.oracle and n in names else v for n, v in inputs.items()}
        leaves = {n: v.clone().requires_grad_(n in names) for n, v in leaves.items()}
        out = function(**leaves)
        grads = torch.autograd.grad(out, [leaves[n] for n in names], torch.ones_like(out))
        results.append([out.detach(), *grads])
    for found in results[:2]:
        for mine, truth in zip(found, results[2], strict=True):
            torch.testing.assert_close(mine.double(), truth, rtol=1e-4, atol=1e-5)


def test_tokens_choose_distinct_experts_and_weights_add_up_to_one():
    for choices in (1, 4, 6):
        experts, weights = draw_routing(workload(choices=choices), context(), salt=1)
        assert all(len(set(row)) == choices for row in experts.tolist())
        torch.testing.assert_close(weights.sum(1), torch.ones(50))
        again, _ = draw_routing(workload(choices=choices), context(), salt=1)
        assert torch.equal(experts, again)
    with pytest.raises(ValueError, match="cannot choose 7 of 6 experts"):
        draw_routing(workload(choices=7), context(), salt=1)


@pytest.mark.parametrize(("skew", "slack"), [(0.0, 0.01), (1.0, 0.03)])
def test_experts_are_chosen_as_often_as_expected(skew, slack):
    drawn, _ = draw_routing(workload(tokens=20000, experts=16, choices=3, skew=skew), context(), salt=2)
    shares = torch.bincount(drawn.flatten(), minlength=16) / 20000
    expected = torch.tensor(chances(16, 3, skew))
    assert expected.sum() == pytest.approx(3)
    assert (shares - expected).abs().max() < slack
    assert touched(1, 16, 3, skew) == pytest.approx(3)
    assert touched(20000, 16, 3, skew) == pytest.approx(16)


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ({"dtype": "float32"}, "takes bfloat16"),
        ({"dtype": "bfloat16", "inner": 12}, "whole 16 bytes"),
        ({"dtype": "bfloat16"}, None),
    ],
)
def test_what_torch_s_product_cannot_take_is_said(dims, words):
    reason = pair_module.not_for_grouped_mm(workload(**dims))
    assert reason is None if words is None else words in reason
