"""Residual add + RMSNorm in one pass, forward and backward.

    summed = x + residual                      (rounded to the dtype of x, as the next block reads it)
    out    = summed * rstd * weight,           rstd = 1 / sqrt(mean(summed²) + eps), one a row

Bytes through device memory, per element of e bytes:

    forward    plain  add (3e) + square and mean (1e, more when eager upcasts) + scale (2e) + weight (2e)
               fused  read x and residual, write summed and out: 4e
    backward   plain  about a dozen element-wise passes and two reductions
               fused  read grad_out and summed, write grad_in: 3e; 4e with a gradient on `summed`

The rest (weight, rstd, the partial weight gradients) is below 2 % for rows that fill the chip.

Design. A tile is as many whole rows as make about 4,096 elements, so a row is read once and stays in registers
between the reduction and the scaling. The forward gives each program one tile and loads all that it needs at once:
nothing is carried from tile to tile, and the programs that are resident overlap each other's reductions with their
traffic. The backward sums the weight's gradient over rows, so its grid is persistent: each program walks over tiles
with a stride of the grid, the next tile on its way to shared memory while the present one is reduced, keeps its share
of the weight gradient in float32 registers and writes one partial row; a second kernel adds the partial rows in a
fixed order. No atomics, so the gradient is the same to the bit from run to run. Loads carry no cache hints: on Hopper
evict-first loads are several percent slower. Offsets are 64 bits wide.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, section 3; the split of the weight
gradient into partial rows follows the layer-norm tutorial of Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels._rows import (
    INTERPRETED,
    as_rows,
    check_beside,
    check_float,
    check_like,
    check_vector,
    check_width,
    multiprocessors,
    on_device_of,
)
from kernels._tiles import sum_rows

MAX_COLUMNS = 16_384
_SHARED_BYTES = 200 * 1024  # of the 227 KiB that a program can have
_INTERPRETED = tl.constexpr(INTERPRETED)


class ForwardLaunch(NamedTuple):
    """The shape of a forward launch, by row length; the one place to tune."""

    tile_rows: int
    block: int  # columns padded to a power of two
    warps: int


class BackwardLaunch(NamedTuple):
    """The shape of a backward launch, by row length; the one place to tune."""

    tile_rows: int
    block: int
    warps: int
    registers: int  # a thread
    hold: bool  # whether the weight stays in registers
    stages: int  # of one program a multiprocessor: the tile in hand, one that is freed, and those on their way


def forward_shape(columns: int, itemsize: int) -> ForwardLaunch:
    """A thread holds 32 bytes of each tensor: two 16-byte accesses under way for each."""
    block = triton.next_power_of_2(columns)
    tile_rows = max(1, 4096 // block)
    return ForwardLaunch(tile_rows, block, min(32, max(2, tile_rows * block * itemsize // 1024)))


def backward_shape(columns: int, itemsize: int) -> BackwardLaunch:
    """Tiles of 16 KiB a tensor for 512 threads, two of them in shared memory; the longest rows load nothing ahead."""
    block = triton.next_power_of_2(columns)
    tile_rows = max(1, 16_384 // (block * itemsize))
    size = tile_rows * block * itemsize
    warps = 16 if size <= 16_384 else 32
    hold = block <= 8192
    stages = 3 if hold and 3 * 2 * size <= _SHARED_BYTES else 1
    return BackwardLaunch(tile_rows, block, warps, 65_536 // (32 * warps), hold, stages)


@triton.jit
def _forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    summed_ptr,
    rstd_ptr,
    rows,
    x_stride,
    residual_stride,
    eps,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < COLUMNS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = in_row if ROWS == 1 else (row < rows) & in_row
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0)
    # The norm is that of the rounded sum, which is what the caller gets and what the backward reads.
    rounded = (x.to(tl.float32) + residual.to(tl.float32)).to(summed_ptr.dtype.element_ty)
    tl.store(summed_ptr + row * COLUMNS + column, rounded, mask=mask)
    summed = rounded.to(tl.float32)
    mean_square = tl.sum(summed * summed, axis=1, keep_dims=True) / COLUMNS
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    out = summed * rstd * weight.to(tl.float32)
    tl.store(out_ptr + row * COLUMNS + column, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _backward_tile(
    start,
    grad_weight,
    weight,
    weight_ptr,
    grad_out_ptr,
    grad_summed_ptr,
    summed_ptr,
    rstd_ptr,
    grad_in_ptr,
    rows,
    grad_out_stride,
    grad_summed_stride,
    summed_stride,
    HAS_GRAD_SUMMED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HOLD: tl.constexpr,
):
    """One tile from its first row: grad_weight and the tile's share of it. With HOLD `weight` holds the weight."""
    column = tl.arange(0, BLOCK)[None, :]
    row = start + tl.arange(0, ROWS)[:, None]
    mask = (row < rows) & (column < COLUMNS)
    grad = tl.load(grad_out_ptr + row * grad_out_stride + column, mask=mask, other=0.0).to(tl.float32)
    summed = tl.load(summed_ptr + row * summed_stride + column, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    if HAS_GRAD_SUMMED and HOLD:
        passed = tl.load(grad_summed_ptr + row * grad_summed_stride + column, mask=mask, other=0.0)
    normed = summed * rstd
    grad_weight += grad * normed
    if not HOLD:
        weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0)
    grad = grad * weight.to(tl.float32)
    along = tl.sum(grad * normed, axis=1, keep_dims=True) / COLUMNS
    grad_in = (grad - normed * along) * rstd
    if HAS_GRAD_SUMMED:
        if not HOLD:  # as late as can be: the longest rows have no registers for it before
            passed = tl.load(grad_summed_ptr + row * grad_summed_stride + column, mask=mask, other=0.0)
        grad_in += passed.to(tl.float32)
    tl.store(grad_in_ptr + row * COLUMNS + column, grad_in.to(grad_in_ptr.dtype.element_ty), mask=mask)
    return grad_weight


@triton.jit
def _backward_kernel(
    grad_out_ptr,
    grad_summed_ptr,
    summed_ptr,
    weight_ptr,
    rstd_ptr,
    grad_in_ptr,
    partial_ptr,
    rows,
    grad_out_stride,
    grad_summed_stride,
    summed_stride,
    HAS_GRAD_SUMMED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HOLD: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    weight = 0.0
    if HOLD:
        weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0)
    grad_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    step = tl.num_programs(0).to(tl.int64) * ROWS
    start = tl.program_id(0).to(tl.int64) * ROWS
    if _INTERPRETED:  # Triton 3.6's interpreter has no loop over bounds that are known at run time only
        while start < rows:
            grad_weight = _backward_tile(
                start, grad_weight, weight, weight_ptr, grad_out_ptr, grad_summed_ptr, summed_ptr, rstd_ptr,
                grad_in_ptr, rows, grad_out_stride, grad_summed_stride, summed_stride, HAS_GRAD_SUMMED,
                COLUMNS, BLOCK, ROWS, HOLD,
            )  # fmt: skip
            start += step
    else:
        for here in tl.range(start, rows, step, num_stages=STAGES):
            grad_weight = _backward_tile(
                here, grad_weight, weight, weight_ptr, grad_out_ptr, grad_summed_ptr, summed_ptr, rstd_ptr,
                grad_in_ptr, rows, grad_out_stride, grad_summed_stride, summed_stride, HAS_GRAD_SUMMED,
                COLUMNS, BLOCK, ROWS, HOLD,
            )  # fmt: skip
    partial = tl.sum(grad_weight, axis=0, keep_dims=True)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * COLUMNS + column, partial, mask=column < COLUMNS)


def add_rms_norm_forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add `residual` to `x` and normalize the sum by its root mean square.

    x, residual  (..., columns), float32, float16 or bfloat16, evenly strided rows of 1 to 16,384 elements
    weight       (columns,), contiguous, the dtype of x or float32

    Returns out and summed (the shape and dtype of x, contiguous) and rstd (rows,) in float32, which the backward
    needs. Raises ValueError naming the argument that is not supported.
    """
    check_float("x", x)
    check_like("residual", residual, "x", x)
    x_rows, residual_rows = as_rows("x", x), as_rows("residual", residual)
    rows, columns = x_rows.shape
    check_width("x", columns, MAX_COLUMNS)
    check_vector("weight", weight, columns, "x", x, dtypes=(torch.float32,))

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = torch.empty_like(out)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows == 0:
        return out, summed, rstd
    launch = forward_shape(columns, x.element_size())
    with on_device_of(x):
        _forward_kernel[(triton.cdiv(rows, launch.tile_rows),)](
            x_rows,
            residual_rows,
            weight,
            out,
            summed,
            rstd,
            rows,
            x_rows.stride(0),
            residual_rows.stride(0),
            eps,
            COLUMNS=columns,
            BLOCK=launch.block,
            ROWS=launch.tile_rows,
            num_warps=launch.warps,
        )
    return out, summed, rstd


def add_rms_norm_backward(
    grad_out: torch.Tensor,
    grad_summed: torch.Tensor | None,
    summed: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `add_rms_norm_forward` from what it returned.

    grad_out     (..., columns), the gradient of out
    grad_summed  the gradient of summed from its other uses, or None
    summed, weight, rstd as the forward took or returned them

    Returns grad_in (the gradient of x and of residual, which are the same tensor) and grad_weight (columns,) in
    the dtype of weight. Raises ValueError naming the argument that is not supported.
    """
    check_float("summed", summed)
    check_like("grad_out", grad_out, "summed", summed)
    summed_rows, grad_rows = as_rows("summed", summed), as_rows("grad_out", grad_out)
    rows, columns = summed_rows.shape
    check_width("summed", columns, MAX_COLUMNS)
    passed_rows = grad_rows
    if grad_summed is not None:
        check_like("grad_summed", grad_summed, "summed", summed)
        passed_rows = as_rows("grad_summed", grad_summed)
    check_vector("weight", weight, columns, "summed", summed, dtypes=(torch.float32,))
    if tuple(rstd.shape) != (rows,) or rstd.dtype != torch.float32:
        raise ValueError(f"rstd: {rstd.dtype} of shape {tuple(rstd.shape)}; it must be float32 of ({rows},)")
    check_beside("rstd", rstd, "summed", summed, dtypes=(torch.float32,))

    grad_in = torch.empty(summed.shape, dtype=summed.dtype, device=summed.device)
    if rows == 0:
        return grad_in, torch.zeros_like(weight)
    launch = backward_shape(columns, summed.element_size())
    grid = (min(triton.cdiv(rows, launch.tile_rows), multiprocessors(summed.device)),)
    partial = torch.empty((grid[0], columns), dtype=torch.float32, device=summed.device)
    with on_device_of(summed):
        _backward_kernel[grid](
            grad_rows,
            passed_rows,
            summed_rows,
            weight,
            rstd,
            grad_in,
            partial,
            rows,
            grad_rows.stride(0),
            passed_rows.stride(0),
            summed_rows.stride(0),
            HAS_GRAD_SUMMED=grad_summed is not None,
            COLUMNS=columns,
            BLOCK=launch.block,
            ROWS=launch.tile_rows,
            HOLD=launch.hold,
            STAGES=launch.stages,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )
        grad_weight = sum_rows(partial, weight.dtype)
    return grad_in, grad_weight


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, summed, rstd = add_rms_norm_forward(x, residual, weight, eps)
        ctx.save_for_backward(summed, weight, rstd)
        ctx.set_materialize_grads(False)
        return out, summed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_summed: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        summed, weight, rstd = ctx.saved_tensors
        if grad_out is None:
            return grad_summed, grad_summed, None, None
        # Autograd hands over expanded gradients (of a sum, say): those have no rows to stride over.
        passed = None if grad_summed is None else grad_summed.contiguous()
        grad_in, grad_weight = add_rms_norm_backward(grad_out.contiguous(), passed, summed, weight, rstd)
        return grad_in, grad_in, grad_weight, None


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x + residual, differentiable once: (out, summed). Arguments as `add_rms_norm_forward`."""
    out, summed = _AddRMSNorm.apply(x, residual, weight, eps)
    return out, summed
