"""The candidates of benchmarks/moe_shapes.py: each product gives the same with each of them, and all have some."""

from functools import partial

import pytest
import torch

from benchmarks import moe_plans
from benchmarks.moe_shapes import MODELS, Layer, Model, candidates, main
from kernels.moe_plan import GROUPED_MM, LAID_OUT, Shapes, Tile, launch_shapes

PRODUCTS = ("gated", "down", "gate_backward", "back", "weights")


@pytest.mark.parametrize("name", MODELS)
def test_every_product_has_candidates_of_the_kind_of_the_present_choice(name):
    model = MODELS[name]
    shapes = launch_shapes(model.tokens * model.choices, model.experts, 2)
    for product in PRODUCTS:
        present = getattr(shapes, product)
        found = list(candidates(product, present))
        assert len(found) > 8
        assert all(tile.turned == present.turned for tile in found)
        assert present in found or product not in ("gated", "down")


def test_a_product_gives_the_same_whatever_its_tile():
    torch.manual_seed(0)
    layer = Layer(Model(6, 24, 16, 3, 2), "cuda" if torch.cuda.is_available() else "cpu")
    for product in PRODUCTS:
        found = [
            layer.product(product, Tile(rows, 32, 32, 4, 2, 2, turned=turned))().float()
            for rows, turned in ((16, False), (32, True))
        ]
        torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_every_way_of_a_product_gives_the_same_and_every_plan_the_layer():
    torch.manual_seed(0)
    layer = Layer(Model(11, 24, 16, 3, 2), "cuda" if torch.cuda.is_available() else "cpu")
    tile = Tile(16, 32, 32, 4, 2, 2)
    layer.present = Shapes(tile, tile, tile, tile, tile)
    step = moe_plans.Step(layer)
    for product in moe_plans.PRODUCTS:
        found: dict[torch.Size, list[torch.Tensor]] = {}
        for plan in moe_plans.ways(layer.present).values():
            result = step.products(plan)[product]().float()
            found.setdefault(result.shape, []).append(result)
        assert max(map(len, found.values())) >= 2
        for results in found.values():
            for result in results[1:]:
                torch.testing.assert_close(result, results[0], rtol=2e-2, atol=2e-2)
    for call in step.passes().values():
        call()
    truth = step.truth()
    slack = 2 if torch.cuda.is_available() else 4  # the interpreter cuts bfloat16 off instead of rounding it
    base = moe_plans.errors(step.both(moe_plans.grouped_mm), truth)
    for plan in moe_plans.ways(layer.present).values():
        found_errors = moe_plans.errors(step.both(partial(moe_plans.moe_experts, plan=plan)), truth)
        assert all(mine <= slack * plain for mine, plain in zip(found_errors, base, strict=True))


def test_the_best_of_each_counts_the_passes_that_a_product_needs_beside_it():
    present = launch_shapes(8192, 8, 2)
    times = {f"{product}|{way}": 1.0 for product in moe_plans.PRODUCTS for way in moe_plans.ways(present)}
    times |= {
        "gate and up|grouped_mm": 0.7,
        "grad of act|hopper g16": 0.7,
        "down|mm": 0.1,
        "weights, up|grouped_mm": 0.9,
    }
    best = moe_plans.best_of_each(moe_plans.ways(present), times, {"spread": 0.1, "gate": 0.1, "gate backward": 0.3})
    assert best == (GROUPED_MM, present.down, present.gate_backward, present.back, GROUPED_MM)


def test_the_plan_that_is_picked_is_among_those_of_the_benchmark():
    plans = list(moe_plans.ways(launch_shapes(8192, 8, 2)).values())
    assert LAID_OUT in plans
    assert all(plan.rows in (16, 128) for plan in plans)


@pytest.mark.parametrize("main", [main, moe_plans.main])
def test_without_a_gpu_it_says_so(main, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["qwen3_4k"]) == 2
    assert "no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["no_such_model"])
