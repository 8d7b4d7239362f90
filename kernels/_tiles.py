"""Sums of partial rows: what the row-wise kernels with a weight gradient share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_REDUCE_COLUMNS = 32  # 128 bytes of float32: one full line of every partial row
_REDUCE_ROWS = 256  # eight 16-byte loads in flight for each of 256 threads


@triton.jit
def _sum_rows_kernel(partial_ptr, out_ptr, rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    start = tl.program_id(0) * 0
    while start < rows:
        mask = (start + row < rows) & (column < COLUMNS)
        total += tl.load(partial_ptr + (start + row) * COLUMNS + column, mask=mask, other=0.0)
        start += ROWS
    total = tl.sum(total, axis=0, keep_dims=True)
    tl.store(out_ptr + column, total.to(out_ptr.dtype.element_ty), mask=column < COLUMNS)


def sum_rows(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add the rows of `partial` (programs, columns) float32 in a fixed order; the sum (columns,) in `dtype`."""
    rows, columns = partial.shape
    out = torch.empty(columns, dtype=dtype, device=partial.device)
    grid = (triton.cdiv(columns, _REDUCE_COLUMNS),)
    _sum_rows_kernel[grid](partial, out, rows, COLUMNS=columns, BLOCK=_REDUCE_COLUMNS, ROWS=_REDUCE_ROWS, num_warps=8)
    return out
