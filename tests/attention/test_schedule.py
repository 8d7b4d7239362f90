"""The order of a Hopper forward's tiles, and how evenly it loads a device."""

from __future__ import annotations

import types

import pytest
import torch

from impls.attention.schedule import Grid, imbalance, table
from kernels import flash_attention_hopper, flash_attention_plan
from kernels.flash_attention_problem import Problem


def kernels_order(grid: Grid) -> list[tuple[int, int, int]]:
    """(batch and head, first row, key tiles) of every tile, from the kernel's own source run as Python."""
    language = types.SimpleNamespace(minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b), constexpr=int)
    kernel = flash_attention_hopper
    tile, walked = (types.FunctionType(f.fn.__code__, {"gl": language}) for f in (kernel._tile, kernel._key_tiles))
    length = grid.num_tiles * 128
    schedule = (length, length, grid.num_tiles, 4, 4, grid.num_heads, grid.heads_per_section)
    found = []
    for index in range(grid.num_tiles * grid.num_heads):
        batch, head, _, start = tile(index, schedule, 128, grid.causal)
        blocks, _ = walked(start, length, length, 128, 128, grid.causal)
        found.append((batch * 4 + head, start, blocks))
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("section", [1, 3, 5, 8])
def test_the_steps_are_the_kernels_own_and_every_tile_comes_once(section: int, causal: bool) -> None:
    grid = Grid(6, 8, section, causal)
    order = kernels_order(grid)
    assert sorted((head, start) for head, start, _ in order) == [(h, 128 * t) for h in range(8) for t in range(6)]
    assert grid.steps() == [blocks for _, _, blocks in order]


def test_a_counter_gives_the_next_tile_to_whoever_is_free() -> None:
    assert imbalance([4, 1, 1, 1, 1], "fixed", 2, overhead=0) == 6 / 4
    assert imbalance([4, 1, 1, 1, 1], "counter", 2, overhead=0) == 1.0
    assert imbalance([3, 3, 3], "counter", 2, overhead=1) == 8 / 6


@pytest.mark.parametrize("dealt_out", [False, True])
def test_sections_hold_no_more_than_the_cache_and_are_nearly_of_one_size(dealt_out: bool) -> None:
    for groups in range(1, 70):
        for most in range(1, 80):
            size = flash_attention_plan.groups_per_section(groups, most, dealt_out)
            assert 1 <= size <= max(1, min(most, groups))
            sections = -(-groups // size)
            assert groups % size == 0 or sections == -(-groups // min(most, groups)), "no more sections than it takes"
    assert flash_attention_plan.groups_per_section(64, 12, True) == 8
    assert flash_attention_plan.groups_per_section(64, 12, False) == 11
    assert flash_attention_plan.groups_per_section(5, 0, dealt_out) == 1, "one head may fill the cache by itself"


def test_the_heads_of_a_group_stay_in_one_section() -> None:
    q, grouped = torch.empty(1), Problem(4, 16, 4, 4096, 4096, 128, None, 0, 1.0, 0.0, varlen=False)
    assert flash_attention_plan.heads_per_section(grouped, q, 16, 4 * 4096 * 128) % 4 == 0
    assert flash_attention_plan.heads_per_section(grouped, q, 16, 10**12) == 4


def test_what_is_dealt_out_by_equal_sections_is_even() -> None:
    for line in table()[2:]:
        before, now, *dealt = [float(cell.split("(")[0]) for cell in line.split("|")[3:9]]
        assert now <= before
        assert dealt[1] <= 1.02
        assert dealt[1] <= dealt[0] < before
        assert dealt[3] < dealt[2]
    full = Grid(32, 64, 11, causal=False).steps()
    assert imbalance(full, "fixed") == pytest.approx(16 / (2048 / 132))
