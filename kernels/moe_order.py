"""Tokens in the order of their experts, without the host learning how many each expert has.

A router gives every token K experts of E. Their rows are to lie together, expert after expert and tokens in order
within one: a stable counting sort of P = T · K small whole numbers, in two launches:

    count   every program counts its part of the pairs by expert
    place   every program adds up what the programs before it counted, ranks its own pairs and writes their rows

Bytes: 8 P of expert numbers twice, 8 P of places, and counts that stay in the L2. A radix sort of 64-bit keys with
indices moves some 30 times P through more launches, and what it gives still has to be cut into experts.

Products over such rows come in tiles of TILE rows of one expert. How many there are only the device knows; that they
are at most (P + min(E, P) · (TILE - 1)) / TILE the host knows too. So a grid is made for that many, `tiles` says which
expert and rows a program has, and those without return at once: no synchronisation, no capacity, no row of padding.

The numbers that hang on how many pairs there are, and the places in one allocation that do, are not specialized on:
a rank of several gets another number of them every step, and each divisibility by 16 would be compiled anew.

Sources: Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2023, sections 4 and 5.2; the
tile table is that of block-sparse kernels, kept on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels._rows import check_device, on_device_of

MAX_EXPERTS = 1024
_PROGRAMS = 256  # at most: each reads all others' counts
_CELLS = 8192  # pairs by experts that a program compares at once: 64 registers a thread
_WARPS = 4


class Order(NamedTuple):
    """Where every pair of a token and an expert lies; P pairs, E experts, at most R rows and N tiles; int32."""

    order_R: torch.Tensor  # row -> pair, token · K + choice; rows from ends_E[-1] on are not written
    slots_P: torch.Tensor  # pair -> row, -1 where the expert is none of these
    ends_E: torch.Tensor  # the row after an expert's last
    tiles_3N: (
        torch.Tensor
    )  # of every tile: its expert (-1: there is no such tile), its first row, the row after its last
    tile: int  # rows a tile
    spans: list[tuple[int, int]] | None = (
        None  # every expert's first row and the row after its last, where the host knows
    )


@triton.jit
def _load_experts(experts_ptr, pair, pairs, experts):
    """Experts of these pairs; -1 where there is no pair, or none of these experts."""
    expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1)
    return tl.where((expert >= 0) & (expert < experts), expert, -1).to(tl.int32)


@triton.jit(do_not_specialize=["pairs", "span"])
def count_kernel(
    experts_ptr, counts_ptr, pairs, experts, span,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """This program's `span` pairs, counted by expert."""
    program = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in tl.range(program * span, program * span + span, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        expert = _load_experts(experts_ptr, pair, pairs, experts)
        counts += tl.sum((expert[:, None] == lane[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + program * EXPERTS + lane, counts)


@triton.jit(
    do_not_specialize=[
        "order_ptr", "slots_ptr", "ends_ptr", "tiles_ptr", "programs", "pairs", "room", "span", "max_tiles", "share",
    ]
)  # fmt: skip
def place_kernel(
    experts_ptr, counts_ptr, order_ptr, slots_ptr, ends_ptr, tiles_ptr,
    programs, pairs, experts, room, span, max_tiles, share,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows of this program's pairs, and its `share` of the table of tiles. room: rows that there are at most."""
    program = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for start in tl.range(0, programs, BLOCK):
        other = start + tl.arange(0, BLOCK)
        cell = counts_ptr + other[:, None] * EXPERTS + lane[None, :]
        counts = tl.load(cell, mask=(other < programs)[:, None], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((other < program)[:, None], counts, 0), 0)
    ends = tl.cumsum(total, 0)
    free = ends - total + before
    starts = tl.minimum(ends - total, room)
    ends = tl.minimum(ends, room)
    if program == 0:
        tl.store(ends_ptr + lane, ends, mask=lane < experts)

    for start in tl.range(program * span, program * span + span, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        expert = _load_experts(experts_ptr, pair, pairs, experts)
        mine = (expert[:, None] == lane[None, :]).to(tl.int32)
        row = tl.sum(mine * (free[None, :] + tl.cumsum(mine, 0) - 1), 1)
        has = (expert >= 0) & (row < room)
        tl.store(order_ptr + row, pair, mask=has)
        tl.store(slots_ptr + pair, tl.where(has, row, -1), mask=pair < pairs)
        free += tl.sum(mine, 0)

    tiles = (ends - starts + TILE - 1) // TILE
    tile_ends = tl.cumsum(tiles, 0)
    for start in tl.range(program * share, program * share + share, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        inside = (tile < program * share + share) & (tile < max_tiles)
        owner = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), 1)  # EXPERTS when there is no such tile
        own = owner[:, None] == lane[None, :]
        first = starts[None, :] + (tile[:, None] - (tile_ends - tiles)[None, :]) * TILE
        first_row = tl.sum(tl.where(own, first, 0), 1)
        last_row = tl.minimum(first_row + TILE, tl.sum(tl.where(own, ends[None, :], 0), 1))
        tl.store(tiles_ptr + tile, tl.where(owner < EXPERTS, owner, -1), mask=inside)
        tl.store(tiles_ptr + max_tiles + tile, first_row, mask=inside)
        tl.store(tiles_ptr + 2 * max_tiles + tile, last_row, mask=inside)


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """The most tiles of `tile` rows that `pairs` rows of `experts` experts can need, however they are spread."""
    return min(pairs, (pairs + min(experts, pairs) * (tile - 1)) // tile)


def expert_order(experts_TK: torch.Tensor, experts: int, tile: int, most: int | None = None) -> Order:
    """Sorts pairs of tokens and experts by expert; stable, and the same from run to run.

    Args:
        experts_TK: each token's experts, int64 or int32, contiguous. A pair whose number is not in [0, experts) gets no
            row: so a rank leaves out what others have.
        experts: how many there are, 1 to 1024.
        tile: rows a tile, a power of two.
        most: how many pairs have a row at most, where the caller knows it; further ones, the last in order, get none.

    Raises:
        ValueError: a dtype, shape, device or number outside what is said here; the argument is named.
    """
    check_device("experts", experts_TK)
    if experts_TK.dtype not in (torch.int64, torch.int32) or experts_TK.ndim != 2 or not experts_TK.is_contiguous():
        raise ValueError(
            f"experts: {experts_TK.dtype} of shape {tuple(experts_TK.shape)}, strides {experts_TK.stride()}; int64 or "
            "int32 (tokens, choices), contiguous"
        )
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"experts: {experts} of them are not supported; use 1 to {MAX_EXPERTS}")
    if tile < 1 or tile & (tile - 1):
        raise ValueError(f"tile: {tile} rows; it must be a power of two")
    pairs = experts_TK.numel()
    if pairs >= 2**31:
        raise ValueError(f"experts: {pairs} pairs are more than 2^31 - 1")
    room = pairs if most is None else min(pairs, most)
    if room < 0:
        raise ValueError(f"most: {most} rows; it must not be negative")
    wide = max(16, triton.next_power_of_2(experts))
    block = max(16, min(128, _CELLS // wide))
    span = block * max(1, triton.cdiv(pairs, block * _PROGRAMS))
    programs = max(1, triton.cdiv(pairs, span))
    many = most_tiles(room, experts, tile)
    sizes = [programs * wide, room, pairs, experts, 3 * many]
    counts, order, slots, ends, tiles = experts_TK.new_empty(sum(sizes), dtype=torch.int32).split(sizes)
    with on_device_of(experts_TK):
        count_kernel[(programs,)](experts_TK, counts, pairs, experts, span, BLOCK=block, EXPERTS=wide, num_warps=_WARPS)
        place_kernel[(programs,)](
            experts_TK, counts, order, slots, ends, tiles,
            programs, pairs, experts, room, span, many, triton.cdiv(many, programs),
            BLOCK=block, EXPERTS=wide, TILE=tile, num_warps=_WARPS,
        )  # fmt: skip
    return Order(order, slots, ends, tiles.view(3, many), tile)
