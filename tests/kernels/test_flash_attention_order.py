"""The Triton forward's programs that start out of step: asked for in the launch, and the same attention to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.flash_attention import flash_attention
from kernels.flash_attention_plan import Tile, choose_config, forward_launch
from kernels.flash_attention_problem import Problem

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
