"""A dropout mask as a function of seed, row and column: made where it is needed, never stored.

Philox-4x32-7 gives four 32-bit words a call; each is split in two, so that one call serves eight neighbouring
elements of a row. An element is dropped when its 16-bit draw lies below round(p * 65536): the rate is p to the nearest
multiple of 2⁻¹⁶, exactly. The key is the seed. The counter is (group in the row, row, 0, 0), so the mask depends on
neither the direction of a pass nor the tiles it is made of nor a row's length; and the first round and half of each of
the next two depend on the row alone or the group alone, which a kernel that keeps its columns does once.

Seven rounds are the fewest that passed every test of BigCrush, ten the authors' default with a margin for keys and
counters that an adversary picks. A product of two 32-bit words is taken as one 64-bit word: half the instructions of
its two halves.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011, section 3.3 and table 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._rows import check_device, check_width, on_device_of

DRAWS = 65_536
GROUP = 8  # elements a Philox call
ROUNDS = 7  # of Philox
MAX_ROWS = 2**30  # 32 bits of a counter, and of a loop over rows
_MAX_COLUMNS = 16_384
_TILE = 2048


@triton.jit
def _halves(a, MULTIPLIER: tl.constexpr):
    """The upper and lower 32 bits of a product."""
    product = a.to(tl.uint64) * MULTIPLIER
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox(seed, first, second, ROUNDS: tl.constexpr):
    """Four words of Philox-4x32 for the counter (first, second, 0, 0), uint32 that broadcast; seed a 64-bit scalar.

    Words stay as small as what they depend on: after one round two know one half of the counter only.
    """
    key0 = seed.to(tl.uint32)
    key1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
    c0, c1 = first, second
    c2 = key0 ^ key0
    c3 = c2
    for _ in tl.static_range(ROUNDS):
        high0, low0 = _halves(c0, 0xD2511F53)
        high2, low2 = _halves(c2, 0xCD9E8D57)
        c0, c1 = high2 ^ c1 ^ key0, low2
        c2, c3 = high0 ^ c3 ^ key1, low0
        key0 = tl.add(key0, 0x9E3779B9, sanitize_overflow=False)
        key1 = tl.add(key1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _above(word, bound):
    """Whether the two draws in a word, low half and high half, are at least the threshold (see `keep_tile`)."""
    return (word << 16) > bound, word > bound


@triton.jit
def keep_tile(seed, row, group, threshold, ROUNDS: tl.constexpr):
    """Which elements of a tile stay: eight draws of 16 bits a Philox call, for eight neighbours in a row.

    row, group  what broadcasts to (..., groups of a row); the mask is (..., 8 * groups)
    threshold   1 to 65,536 of the draws drop their element. A draw is compared where it stands, in the upper half of a
                word: draw >= threshold just if 65,536 * draw + anything below 65,536 > 65,536 * threshold - 1.
    """
    w0, w1, w2, w3 = philox(seed, group.to(tl.uint32), row.to(tl.uint32), ROUNDS)
    w0, w1 = tl.broadcast(w0, w1)
    w2, w3 = tl.broadcast(w2, w3)
    bound = ((threshold - 1).to(tl.uint32) << 16) | 0xFFFF
    low0, high0 = _above(w0, bound)
    low1, high1 = _above(w1, bound)
    low2, high2 = _above(w2, bound)
    low3, high3 = _above(w3, bound)
    even = tl.join(tl.join(low0, high0), tl.join(low1, high1))
    odd = tl.join(tl.join(low2, high2), tl.join(low3, high3))
    keep = tl.join(even, odd)
    return tl.reshape(keep, keep.shape[:-4] + [keep.shape[-4] * 8])  # noqa: RUF005 - Triton knows no starred lists


@triton.jit(do_not_specialize=["seed", "threshold"])
def _mask_kernel(
    out_ptr,
    rows,
    seed,
    threshold,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    keep = keep_tile(seed, row, tl.arange(0, BLOCK // 8)[None, :], threshold, ROUNDS)
    tl.store(out_ptr + row * COLUMNS + column, keep.to(tl.int8), mask=(row < rows) & (column < COLUMNS))


def drop_threshold(p: float) -> int:
    """How many of the 65,536 draws drop an element. Raises ValueError unless 0 <= p <= 1."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p: {p} is not a probability; use 0 to 1")
    return round(p * DRAWS)


def keep_scale(p: float) -> float:
    """What a kept element is multiplied with: one over the exact keep rate (0 when nothing is kept)."""
    kept = DRAWS - drop_threshold(p)
    return DRAWS / kept if kept else 0.0


def check_seed(seed: int) -> None:
    """Raise ValueError unless the seed fits a kernel's argument."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed: {seed} is out of range; use 0 to 2**63 - 1")


def check_rows(rows: int) -> None:
    """Raise ValueError unless every row has a number that a kernel can count with."""
    if rows > MAX_ROWS:
        raise ValueError(f"x: {rows} rows are not supported; use at most {MAX_ROWS}")


def dropout_mask(rows: int, columns: int, p: float, seed: int, device: torch.device | str) -> torch.Tensor:
    """The whole mask (rows, columns), bool, True where an element is kept; at most 16,384 columns."""
    check_seed(seed)
    check_width("columns", columns, _MAX_COLUMNS)
    check_rows(rows)
    out = torch.empty((rows, columns), dtype=torch.int8, device=device)
    check_device("device", out)
    if drop_threshold(p) == 0:
        return torch.ones_like(out, dtype=torch.bool)
    if rows:
        block = max(GROUP, triton.next_power_of_2(columns))
        tile_rows = max(1, _TILE // block)
        with on_device_of(out):
            _mask_kernel[(triton.cdiv(rows, tile_rows),)](
                out,
                rows,
                seed,
                drop_threshold(p),
                COLUMNS=columns,
                BLOCK=block,
                ROWS=tile_rows,
                ROUNDS=ROUNDS,
                num_warps=max(4, block // 1024),
            )
    return out.bool()
