"""The kernels of LayerNorm + dropout + residual add; what they compute and why so is in layer_norm_dropout_add.py."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._rows import INTERPRETED
from kernels.dropout_mask import keep_tile

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _load(pointer, stride, row, rows, column, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a tensor, zero outside it. EVEN: every row is one of it."""
    mask = column < COLUMNS if EVEN else (row < rows) & (column < COLUMNS)
    return tl.load(pointer + row * stride + column, mask=mask, other=0.0)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _two_sums(a, b):
    """The sums of a and b (ROWS, BLOCK) along their rows, with the barriers of one."""
    if _INTERPRETED:
        first, second = tl.sum(a, axis=1, keep_dims=True), tl.sum(b, axis=1, keep_dims=True)
    else:
        first, second = tl.reduce((a, b), 1, _add_pairs, keep_dims=True)
    return first, second


@triton.jit
def _statistics(x, x_first, eps, in_row, COLUMNS: tl.constexpr, ONE_PASS: tl.constexpr):
    """Mean and reciprocal deviation of rows x (ROWS, BLOCK) float32; x_first (ROWS, 1) their first elements."""
    if ONE_PASS:
        shifted = tl.where(in_row, x - x_first, 0.0)
        level, square = _two_sums(shifted, shifted * shifted)
        level /= COLUMNS
        mean = x_first + level
        variance = square / COLUMNS - level * level
        rstd = tl.rsqrt(tl.where(variance < 0.0, 0.0, variance) + eps)  # a choice, since a maximum would lose NaN
    else:
        mean = tl.sum(x, axis=1, keep_dims=True) / COLUMNS
        centred = tl.where(in_row, x - mean, 0.0)
        variance = tl.sum(centred * centred, axis=1, keep_dims=True) / COLUMNS
        rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    return mean, rstd


@triton.jit(do_not_specialize=["seed", "threshold"])
def forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    x_stride,
    residual_stride,
    eps,
    seed,
    threshold,
    scale,
    DROP: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_PASS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """One tile a program: everything is asked for first, the mask is made while it is on its way."""
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < COLUMNS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    x = _load(x_ptr, x_stride, row, rows, column, COLUMNS, EVEN)
    x_first = tl.load(x_ptr + row * x_stride, mask=row < rows, other=0.0)
    residual = _load(residual_ptr, residual_stride, row, rows, column, COLUMNS, EVEN)
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0)
    bias = tl.load(bias_ptr + column, mask=in_row, other=0.0)
    if DROP:
        # Here, before anything waits for a load.
        keep = tl.where(keep_tile(seed, row, threshold, GROUPS, ROWS, BLOCK, ROUNDS), scale, 0.0)
    x = x.to(tl.float32)
    mean, rstd = _statistics(x, x_first.to(tl.float32), eps, in_row, COLUMNS, ONE_PASS)
    out = (x - mean) * rstd * weight.to(tl.float32) + bias.to(tl.float32)
    if DROP:
        out *= keep  # a product, not a choice: NaN and inf that are dropped become NaN, as in the plain formula
    out += residual.to(tl.float32)
    mask = in_row if EVEN else (row < rows) & in_row
    tl.store(out_ptr + row * COLUMNS + column, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _backward_tile(
    start,
    grad_weight,
    grad_bias,
    weight,
    grad_out_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    grad_x_ptr,
    rows,
    grad_out_stride,
    x_stride,
    seed,
    threshold,
    scale,
    DROP: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """One tile from its first row: both sums and the tile's share of them."""
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < COLUMNS
    row = start + tl.arange(0, ROWS)[:, None]
    grad = _load(grad_out_ptr, grad_out_stride, row, rows, column, COLUMNS, EVEN).to(tl.float32)
    x = _load(x_ptr, x_stride, row, rows, column, COLUMNS, EVEN).to(tl.float32)
    mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    if DROP:
        grad *= tl.where(keep_tile(seed, row, threshold, GROUPS, ROWS, BLOCK, ROUNDS), scale, 0.0)
    normed = tl.where(in_row, (x - mean) * rstd, 0.0)
    grad_bias += grad
    grad_weight += grad * normed
    grad *= weight.to(tl.float32)
    along, level = _two_sums(grad * normed, grad)
    portion = rstd / COLUMNS
    grad_x = (grad * rstd - level * portion) - normed * (along * portion)
    inside = in_row if EVEN else (row < rows) & in_row
    tl.store(grad_x_ptr + row * COLUMNS + column, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    return grad_weight, grad_bias


@triton.jit(do_not_specialize=["seed", "threshold"])
def backward_kernel(
    grad_out_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    grad_out_stride,
    x_stride,
    seed,
    threshold,
    scale,
    DROP: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    ROUNDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """This program's tiles, a grid apart, and its partial rows of both sums."""
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < COLUMNS
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0)
    grad_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    grad_bias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    step = tl.num_programs(0).to(tl.int64) * ROWS
    start = tl.program_id(0).to(tl.int64) * ROWS
    if _INTERPRETED:  # Triton 3.6's interpreter has no loop over bounds that are known at run time only
        while start < rows:
            grad_weight, grad_bias = _backward_tile(
                start, grad_weight, grad_bias, weight, grad_out_ptr, x_ptr, mean_ptr, rstd_ptr, grad_x_ptr, rows,
                grad_out_stride, x_stride, seed, threshold, scale, DROP, COLUMNS, GROUPS, BLOCK, ROWS, EVEN, ROUNDS,
            )  # fmt: skip
            start += step
    else:
        for here in tl.range(start, rows, step, num_stages=STAGES):
            grad_weight, grad_bias = _backward_tile(
                here, grad_weight, grad_bias, weight, grad_out_ptr, x_ptr, mean_ptr, rstd_ptr, grad_x_ptr, rows,
                grad_out_stride, x_stride, seed, threshold, scale, DROP, COLUMNS, GROUPS, BLOCK, ROWS, EVEN, ROUNDS,
            )  # fmt: skip
    target = partial_ptr + tl.program_id(0).to(tl.int64) * (2 * COLUMNS) + column
    tl.store(target, tl.sum(grad_weight, axis=0, keep_dims=True), mask=in_row)
    tl.store(target + COLUMNS, tl.sum(grad_bias, axis=0, keep_dims=True), mask=in_row)
