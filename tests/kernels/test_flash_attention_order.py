"""What order is for: Triton forward programs that start out of step, and sums whose order is fixed on request."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.flash_attention import flash_attention, flash_attention_backward
from kernels.flash_attention_plan import Tile, choose_config, forward_launch
from kernels.flash_attention_problem import Problem

MODULE = importlib.import_module("kernels.flash_attention")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
PROBLEM = Problem(2, 33, 33, 1000, 1500, 128, None, None, 128**-0.5, 0.0, varlen=False)


@pytest.mark.parametrize("stagger", [(0, 0), (1024, 2)], ids=str)
def test_a_record_and_the_launch_say_how_far_apart_programs_start(stagger: tuple[int, int]) -> None:
    config = replace(choose_config(PROBLEM, (9, 0), describable=False), stagger=stagger)
    assert ("1024 clocks apart" in config.describe()) == (stagger != (0, 0))
    q, k, lse = torch.empty(2, 1000, 33, 128), torch.empty(2, 1500, 33, 128), torch.empty(2, 33, 1000)
    args = forward_launch(PROBLEM, config, q, k, k, q, lse, None, None).args
    assert (args["STAGGER"], args["FIRST"]) == (stagger[0], 132 * stagger[1])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("tile", [Tile(128, 64, 4, 2), Tile(64, 64, 4, 3)], ids=str)
def test_programs_out_of_step_give_the_same_to_the_bit_on_a_gpu(tile: Tile) -> None:
    generator = torch.Generator().manual_seed(7)
    shapes = [(2, n, 33, 128 if tile.block_m == 128 else 64) for n in (1000, 1500, 1500)]
    q, k, v = (torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes)
    chosen = choose_config(replace(PROBLEM, head_dim=q.shape[-1]), (9, 0), describable=True)
    plain = replace(chosen, forward=tile, hopper=None, stagger=(0, 0))
    late = replace(plain, stagger=(1024, 2))
    assert torch.equal(flash_attention(q, k, v, config=late), flash_attention(q, k, v, config=plain))


def launched(monkeypatch: pytest.MonkeyPatch, dim: int, deterministic: bool, capability: Any) -> list[Any]:
    """What a causal backward on a device of that capability would launch, without launching it."""
    launches: list[Any] = []
    monkeypatch.setattr(MODULE, "run", lambda launch, q: launches.append(launch))
    monkeypatch.setattr(MODULE, "flash_attention_kernel", lambda p, *qkv: choose_config(p, capability, True))
    problem = Problem(1, 2, 1, 300, 400, dim, None, 0, dim**-0.5, 0.0, varlen=False)
    q, k = torch.empty(1, 300, 2, dim, dtype=torch.float16), torch.empty(1, 400, 1, dim, dtype=torch.float16)
    flash_attention_backward(problem, q, k, k, q, torch.empty(1, 2, 300), q, deterministic=deterministic)
    return launches


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_nothing_is_added_in_whatever_order_where_a_fixed_one_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, dim: int, capability: tuple[int, int]
) -> None:
    launches = launched(monkeypatch, dim, True, capability)
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["row_terms_kernel", "backward_kernel", "query_gradient_kernel"]
    assert not launches[1].args["ADD_DQ"]
    free = [launch.kernel.__name__ for launch in launched(monkeypatch, dim, False, capability)]
    assert ("hopper_backward_kernel" in free) == (capability == (9, 0) and dim in (64, 128)), "else this shows nothing"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, where order changes from run to run")
@pytest.mark.parametrize("dim", [64, 128])
def test_the_deterministic_backward_repeats_to_the_bit_over_many_tiles_on_a_gpu(dim: int) -> None:
    q, k, v, grad = (torch.randn(2, 2000, 8, dim, device="cuda", dtype=torch.float16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = flash_attention(*leaves, causal=True, deterministic=True)
    first, second = (torch.autograd.grad(out, leaves, grad, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
