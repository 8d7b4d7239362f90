"""The Triton forward's other orders of work, ahead and lazy, give the same attention, also where maxima grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.flash_attention_plan import Config, Tile, forward_launch
from kernels.flash_attention_problem import Problem
from tests.kernels.test_flash_attention import CUDA, DEVICE, DTYPES, Draw, assert_right, random_draw

# On a GPU a tile in which a group of warps has 64 rows, as the warpgroup products want them.
TILE = Tile(128, 64, 8, 2) if CUDA else Tile(32, 16, 4, 1)
SMALL = Config(TILE, *([Tile(64, 64, 4, 2)] * 2 if CUDA else [Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)]))
DESCRIBED = replace(SMALL, descriptors=True)
WAYS = [{"ahead": True}, {"lazy": True}, {"ahead": True, "lazy": True}]


def with_ways(draw: Draw, ways: dict[str, bool], base: Config = SMALL) -> Draw:
    return replace(draw, options={**draw.options, "config": replace(base, **ways)})


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("seed", range(300, 302))
def test_every_order_over_random_options(seed: int, ways: dict[str, bool]) -> None:
    draw = random_draw(seed)
    assert_right(with_ways(draw, ways, DESCRIBED if seed % 2 else SMALL))


def growing(draw: Draw, digits: float, rows: slice = slice(None)) -> list[torch.Tensor]:
    """Tensors whose scores grow by `digits` binary digits from each tile of 16 keys to the next, in some rows."""
    tensors = draw.tensors()
    q, k = tensors[:2]
    step = digits * 0.6931471805599453 * draw.head_dim**0.5
    q[..., 0] = 0.0
    q[rows, :, 0] = 1.0
    k[..., 0] = (torch.arange(k.shape[0]) // 16 * step)[:, None].to(k)
    return tensors


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("digits", [7.9, 30.0])
def test_rows_whose_scores_keep_growing(ways: dict[str, bool], digits: float) -> None:
    """Slower and faster than the reference may lag behind, in all rows of a tile and in one alone."""
    for rows in (slice(None), slice(17, 18)):
        draw = with_ways(Draw([(40, 61)], 1, 1, 16, DTYPES[0]), ways)
        assert_right(draw, growing(draw, digits, rows))


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_one_very_large_logit_in_any_tile(ways: dict[str, bool]) -> None:
    for key in (3, 23):
        draw = with_ways(Draw([(35, 51)], 1, 1, 64, torch.float16), ways)
        tensors = draw.tensors()
        tensors[0][17, 0, 5] = tensors[1][key, 0, 5] = 30000.0
        got = draw.run(tensors)
        assert got["out"].isfinite().all()
        torch.testing.assert_close(got["out"][17, 0], tensors[2][key, 0], rtol=2e-3, atol=0)
        exact = draw.plain(tensors, torch.float64)
        torch.testing.assert_close(got["out"].double(), exact["out"], rtol=0, atol=2e-3)


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("lengths", [[(40, 9)], [(19, 19), (0, 7), (5, 0), (33, 40)]], ids=str)
def test_rows_and_sequences_without_a_key(ways: dict[str, bool], lengths: list[tuple[int, int]]) -> None:
    draw = Draw(lengths, 2, 1, 32, DTYPES[0], causal=True, varlen=len(lengths) > 1)
    got = with_ways(draw, ways).run(draw.tensors())
    if len(lengths) == 1:
        assert (got["out"][:31] == 0).all()
        assert (got["lse"][:, :31] == float("-inf")).all()
    assert_right(with_ways(draw, ways))


def test_values_that_a_window_hides_do_not_reach_the_first_tile() -> None:
    """`ahead` multiplies zeros by some tile's values in its first turn: never by values outside of the window."""
    draw = with_ways(Draw([(8, 64)], 1, 1, 16, DTYPES[0], window=(3, 0)), {"ahead": True})
    tensors = draw.tensors()
    tensors[2][:48] = float("nan")
    got: Any = draw.run([t.to(DEVICE) for t in tensors])
    assert got["out"].isfinite().all()


@pytest.mark.parametrize("ways", [{}, *WAYS], ids=str)
def test_a_record_and_the_launch_say_the_order(ways: dict[str, bool]) -> None:
    config = replace(SMALL, **ways)
    said = config.describe().split(";")[0]
    assert said == f"forward triton, pointers, {TILE}" + "".join(f" {way}" for way in ways)
    p = Problem(1, 1, 1, 8, 8, 16, None, None, 0.25, 0.0, varlen=False)
    q, lse = torch.empty(1, 8, 1, 16), torch.empty(1, 1, 8)
    args = forward_launch(p, config, q, q, q, q, lse, None, None).args
    assert (args["AHEAD"], args["LAZY"]) == (ways.get("ahead", False), ways.get("lazy", False))
