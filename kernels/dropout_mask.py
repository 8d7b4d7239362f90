"""A dropout mask as a function of seed, row and column: made where it is needed, never stored.

Philox-4x32-10 gives four 32-bit words a call; each is split in two, so that one call serves eight neighbouring
elements of a row. An element is dropped when its 16-bit draw lies below round(p * 65536): the rate is p to the nearest
multiple of 2⁻¹⁶, exactly. The counter of a group is row * ceil(columns / 8) + group, 64 bits wide, so the mask depends
neither on the direction of a pass nor on the tiles it is made of.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011, section 3.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._rows import check_device, check_width, on_device_of

DRAWS = 65_536
GROUP = 8  # elements a Philox call
ROUNDS = 10  # of Philox
_MAX_COLUMNS = 16_384
_TILE = 2048


@triton.jit
def _above(word, bound):
    """Whether the two draws in a word, low half and high half, are at least the threshold (see `keep_tile`)."""
    return (word << 16) > bound, word > bound


@triton.jit
def keep_tile(
    seed, row, threshold, GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr
):
    """Which elements of a tile stay: eight draws of 16 bits a Philox call, for eight neighbours in a row.

    threshold  1 to 65,536 of the draws drop their element. A draw is compared where it stands, in the upper half of a
               word: draw >= threshold just if 65,536 * draw + anything below 65,536 > 65,536 * threshold - 1.
    """
    counter = row * GROUPS + tl.arange(0, BLOCK // 8)[None, :]
    w0, w1, w2, w3 = tl.randint4x(seed, counter, ROUNDS)
    bound = ((threshold - 1).to(tl.uint32) << 16) | 0xFFFF
    low0, high0 = _above(w0, bound)
    low1, high1 = _above(w1, bound)
    low2, high2 = _above(w2, bound)
    low3, high3 = _above(w3, bound)
    even = tl.join(tl.join(low0, high0), tl.join(low1, high1))
    odd = tl.join(tl.join(low2, high2), tl.join(low3, high3))
    return tl.reshape(tl.join(even, odd), (ROWS, BLOCK))


@triton.jit(do_not_specialize=["seed", "threshold"])
def _mask_kernel(
    out_ptr,
    rows,
    seed,
    threshold,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    keep = keep_tile(seed, row, threshold, GROUPS, ROWS, BLOCK, ROUNDS)
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


def dropout_mask(rows: int, columns: int, p: float, seed: int, device: torch.device | str) -> torch.Tensor:
    """The whole mask (rows, columns), bool, True where an element is kept; at most 16,384 columns."""
    check_seed(seed)
    check_width("columns", columns, _MAX_COLUMNS)
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
                GROUPS=triton.cdiv(columns, GROUP),
                BLOCK=block,
                ROWS=tile_rows,
                ROUNDS=ROUNDS,
                num_warps=max(4, block // 1024),
            )
    return out.bool()
