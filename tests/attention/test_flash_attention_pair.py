"""The flash_attention pair: its counts, its oracle, and that every variant here computes the same function."""

from __future__ import annotations

import pytest
import torch

from harness.discover import find, load_pair, workloads_of
from harness.opcase import op_builder
from harness.pair import Context, Inputs
from harness.workload import Workload
from impls.attention import flash_attention as pair_module
from impls.attention.plain_attention import blocked_attention, plain_attention, visible

CONTEXT = Context(device=torch.device("cpu"), dtype=torch.float16, seed=3)


def workload(name: str, **dims: int | str | bool) -> Workload:
    found = {w.name: w for w in workloads_of(find("flash_attention"))}[name]
    return found.replace(**dims) if dims else found


def test_flops_are_four_d_a_visible_pair_and_backward_is_twice_forward() -> None:
    full, causal = workload("d128_4k_full_for"), workload("d128_4k_causal_for")
    assert pair_module.work(full).flops == 4 * 4 * 16 * 4096**2 * 128
    assert pair_module.work(causal).flops == 4 * 4 * 16 * (4096 * 4097 // 2) * 128
    assert pair_module.work(workload("d128_4k_full_bac")).flops == 2 * pair_module.work(full).flops
    windowed = workload("window_16k_fwd")
    assert pair_module.work(windowed).flops == 4 * 32 * (16384 * 1024 - 1024 * 1023 // 2) * 128


def test_every_grid_workload_is_sixteen_thousand_tokens_two_thousand_wide() -> None:
    grid = [w for w in workloads_of(find("flash_attention")) if w.name.startswith("d")]
    assert len(grid) == 2 * 4 * 2 * 2
    assert all((w.tokens, w.heads * w.head_dim, w.dtype) == (16384, 2048, "bfloat16") for w in grid)


def test_the_prediction_favours_the_fused_way_and_more_under_a_mask() -> None:
    full, causal = (pair_module.predict(workload(f"d128_4k_{mask}_for")) for mask in ("full", "causal"))
    assert 1 < full < causal


@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (4, 0), (3, 2)], ids=str)
def test_blocks_of_queries_give_the_formula_and_its_gradients(
    bounds: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("impls.attention.plain_attention._BLOCK_BYTES", 2000)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 21, h, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    leaves = [[t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2)]
    blocked = blocked_attention(*leaves[0], bounds)
    plain = plain_attention(*leaves[1], visible(21, 21, bounds, q.device))
    torch.testing.assert_close(blocked, plain)
    for got, expected in zip(
        torch.autograd.grad(blocked.square().sum(), leaves[0]),
        torch.autograd.grad(plain.square().sum(), leaves[1]),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def test_queries_before_the_first_key_give_zero() -> None:
    q, k = torch.ones(1, 5, 1, 4), torch.ones(1, 2, 1, 4)
    out = plain_attention(q, k, k, visible(5, 2, (None, 0), q.device))
    assert (out[0, :3] == 0).all()
    assert (out[0, 3:] == 1).all()


def test_a_plain_way_that_cannot_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Small())
    reason = pair_module.plain_fits(workload("d64_16k_full_bac"))
    assert reason is not None
    assert "S=16384" in reason
    assert "80" in reason
    assert pair_module.plain_fits(workload("d128_4k_full_for")) is None


def test_the_peers_without_a_window_say_so() -> None:
    assert pair_module.no_window(workload("window_16k_fwd")) is not None
    assert pair_module.no_window(workload("d128_4k_full_for")) is None


def test_the_optimized_variant_says_which_kernel_ran() -> None:
    pair, small = load_pair(find("flash_attention")), workload("smoke_fwd", tokens=16, seq=16)
    inputs = Inputs(pair.inputs(small, CONTEXT), seed=3)
    case = op_builder(pair, pair.variant("optimized"))(small, CONTEXT)
    case.load(inputs)
    case.run()
    assert "triton" in case.choice()["kernel"]
    baseline = op_builder(pair, pair.variant("baseline"))(small, CONTEXT)
    baseline.load(inputs)
    baseline.run()
    torch.testing.assert_close(case.result()["out"], baseline.result()["out"], rtol=0, atol=2e-3)
