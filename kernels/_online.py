"""The online softmax of one long row: its maximum and its sum of exponentials in one read, without barriers.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_statistics(
    row_ptr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
    AHEAD: tl.constexpr,
    TOTAL: tl.constexpr,
    base=0.0,
):
    """The maximum, the sum of exp(x - maximum) and, with TOTAL, the sum of x - base of a long row, read once.

    Each of LANES carries a maximum and a sum of its own over UNROLL vectors of VECTOR neighbouring elements a turn:
    so many loads are in flight, twice as many where the next turn's are issued AHEAD of this turn's arithmetic. Only
    the end of the row is masked.

    A row of -inf alone has maximum -inf and sum 0; NaN and +inf make the sum NaN.
    """
    TURN: tl.constexpr = UNROLL * LANES * VECTOR
    FULL: tl.constexpr = COLUMNS // TURN
    vector = tl.arange(0, UNROLL)[:, None, None] * LANES + tl.arange(0, LANES)[None, :, None]
    offset = vector * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    maximum = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    power = tl.zeros((LANES,), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    if AHEAD and FULL > 0:
        x_next = tl.load(row_ptr + offset)
        for turn in range(1, FULL):
            x = x_next
            x_next = tl.load(row_ptr + turn * TURN + offset)
            maximum, power, total = _take_in(x.to(tl.float32), maximum, power, total, base, TOTAL)
        maximum, power, total = _take_in(x_next.to(tl.float32), maximum, power, total, base, TOTAL)
    else:
        for turn in range(FULL):
            x = tl.load(row_ptr + turn * TURN + offset)
            maximum, power, total = _take_in(x.to(tl.float32), maximum, power, total, base, TOTAL)
    if FULL * TURN < COLUMNS:
        in_row = offset < COLUMNS - FULL * TURN
        x = tl.load(row_ptr + FULL * TURN + offset, mask=in_row, other=float("-inf"))
        maximum, power, _ = _take_in(x.to(tl.float32), maximum, power, total, base, False)
        if TOTAL:
            total += tl.sum(tl.sum(tl.where(in_row, x.to(tl.float32) - base, 0.0), axis=2), axis=0)
    highest = tl.max(maximum, axis=0)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, tl.sum(power * tl.exp(maximum - level), axis=0), tl.sum(total, axis=0)


@triton.jit
def _take_in(x, maximum, power, total, base, TOTAL: tl.constexpr):
    """One turn of every lane: rescale its sum to the risen maximum, then add."""
    risen = tl.maximum(maximum, tl.max(tl.max(x, axis=2), axis=0))
    # Until a lane has seen a finite number its maximum is -inf, and -inf - -inf would be NaN.
    level = tl.where(risen == float("-inf"), 0.0, risen)
    added = tl.sum(tl.sum(tl.exp(x - level[None, :, None]), axis=2), axis=0)
    if TOTAL:
        total += tl.sum(tl.sum(x - base, axis=2), axis=0)
    return risen, power * tl.exp(maximum - level) + added, total
