"""The kernels of LayerNorm + dropout + residual add; what they compute and why so is in layer_norm_dropout_add.py.

A tile has three dimensions: rows, the CHUNKS pieces that a row is cut in, and a piece. Triton deals warps out along a
piece first and then to other rows, so a piece of 256 elements a warp (32 threads of 8 each) belongs to one row, and a
thread has some of every piece of its row: the pieces decide how many elements a thread adds before it asks others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._rows import INTERPRETED
from kernels.dropout_mask import keep_tile

_INTERPRETED = tl.constexpr(INTERPRETED)
# Of the two dimensions that are not contiguous the one that gets warps first, in the layout of a tile that is loaded.
# Tensors that are not loaded give warps to the second; the mask follows by an exchange, and nothing is moved.
_ROWS_FIRST = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7))
_PIECES = tl.constexpr(1 if _ROWS_FIRST.value else 0)
_ROWS = tl.constexpr(0 if _ROWS_FIRST.value else 1)


@triton.jit
def _widen(x, PAIRS: tl.constexpr):
    """x in float32. PAIRS: bfloat16 two at a time, an instruction an element where the compiler's own way takes 1.5."""
    if PAIRS and x.dtype == tl.bfloat16 and not _INTERPRETED:
        wide = tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }", "=r,=r,r", [x], tl.float32, is_pure=True, pack=2
        )
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def _columns(BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """A row's columns in their places in a tile."""
    SPAN: tl.constexpr = BLOCK // CHUNKS
    piece, within = tl.arange(0, CHUNKS) * SPAN, tl.arange(0, SPAN)[None, None, :]
    return (piece[None, :, None] if _ROWS_FIRST else piece[:, None, None]) + within


@triton.jit
def _rows(start, ROWS: tl.constexpr):
    """Rows from the first on, in their places in a tile."""
    row = start + tl.arange(0, ROWS)
    return row[:, None, None] if _ROWS_FIRST else row[None, :, None]


@triton.jit
def _keep(seed, start, threshold, BLOCK: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, ROUNDS: tl.constexpr):
    """The mask of a tile from its first row."""
    GROUPS: tl.constexpr = BLOCK // CHUNKS // 8
    group = tl.arange(0, CHUNKS)[:, None, None] * GROUPS + tl.arange(0, GROUPS)[None, None, :]
    row = start + tl.arange(0, ROWS)[None, :, None]
    keep = keep_tile(seed, row, group, threshold, ROUNDS)
    return tl.permute(keep, (1, 0, 2)) if _ROWS_FIRST else keep


@triton.jit
def _load(pointer, stride, row, rows, column, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a tensor, zero outside it. EVEN: every row is one of it."""
    mask = column < COLUMNS if EVEN else (row < rows) & (column < COLUMNS)
    return tl.load(pointer + row.to(tl.int64) * stride + column, mask=mask, other=0.0)


@triton.jit
def _load_vector(pointer, column, COLUMNS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """A vector along a row; for every row of a tile where warps have rows of their own, so that each holds its part."""
    if CHUNKS > 1:
        column = column + _rows(0, ROWS) * 0
    return tl.load(pointer + column, mask=column < COLUMNS, other=0.0)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sum(a):
    """The sum of a tile along its rows, one a row: a thread's pieces first."""
    return tl.sum(tl.sum(a, axis=_PIECES, keep_dims=True), axis=2, keep_dims=True)


@triton.jit
def _two_sums(a, b):
    """The sums of a and b along their rows, with the barriers of one."""
    if _INTERPRETED:
        first, second = _sum(a), _sum(b)
    else:
        first, second = tl.reduce((a, b), _PIECES, _add_pairs, keep_dims=True)
        first, second = tl.reduce((first, second), 2, _add_pairs, keep_dims=True)
    return first, second


@triton.jit
def _standardise(x, x_first, eps, in_row, COLUMNS: tl.constexpr, ONE_PASS: tl.constexpr):
    """Rows x float32 less their mean, over their deviation; that mean, and the reciprocal of that deviation.

    x_first the rows' first elements, one a row.
    """
    if ONE_PASS:
        shifted = tl.where(in_row, x - x_first, 0.0)
        level, square = _two_sums(shifted, shifted * shifted)
        level /= COLUMNS
        mean = x_first + level
        variance = square / COLUMNS - level * level
        rstd = tl.rsqrt(tl.where(variance < 0.0, 0.0, variance) + eps)  # a choice, since a maximum would lose NaN
        normed = shifted * rstd - level * rstd  # one multiply-add an element
    else:
        mean = _sum(x) / COLUMNS
        centred = tl.where(in_row, x - mean, 0.0)
        variance = _sum(centred * centred) / COLUMNS
        rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
        normed = centred * rstd
    return normed, mean, rstd


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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_PASS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """One tile a program: rows are asked for first, and the mask is made while they are on their way.

    Weight and bias come late, from a cache: until then their registers are free, so that more programs are resident.
    """
    column = _columns(BLOCK, CHUNKS)
    in_row = column < COLUMNS
    start = tl.program_id(0) * ROWS
    row = _rows(start, ROWS)
    x = _load(x_ptr, x_stride, row, rows, column, COLUMNS, EVEN)
    x_first = tl.load(x_ptr + row.to(tl.int64) * x_stride, mask=row < rows, other=0.0)
    residual = _load(residual_ptr, residual_stride, row, rows, column, COLUMNS, EVEN)
    if DROP:
        # Here, before anything waits for a load.
        keep = tl.where(_keep(seed, start, threshold, BLOCK, ROWS, CHUNKS, ROUNDS), scale, 0.0)
    x = _widen(x, PAIRS)
    normed, mean, rstd = _standardise(x, x_first.to(tl.float32), eps, in_row, COLUMNS, ONE_PASS)
    weight = _load_vector(weight_ptr, column, COLUMNS, ROWS, CHUNKS)
    bias = _load_vector(bias_ptr, column, COLUMNS, ROWS, CHUNKS)
    out = normed * _widen(weight, PAIRS) + _widen(bias, PAIRS)
    if DROP:
        out *= keep  # a product, not a choice: NaN and inf that are dropped become NaN, as in the plain formula
    out += _widen(residual, PAIRS)
    mask = in_row if EVEN else (row < rows) & in_row
    tl.store(out_ptr + row.to(tl.int64) * COLUMNS + column, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _backward_tile(
    start,
    grad,
    x,
    mean,
    rstd,
    grad_weight,
    grad_bias,
    weight,
    grad_x_ptr,
    rows,
    seed,
    threshold,
    DROP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    PAIRS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """The gradient of one tile from its first row, and both sums with the tile's share, which lack the scale."""
    column = _columns(BLOCK, CHUNKS)
    in_row = column < COLUMNS
    row = _rows(start, ROWS)
    grad = _widen(grad, PAIRS)
    if DROP:
        grad *= tl.where(_keep(seed, start, threshold, BLOCK, ROWS, CHUNKS, ROUNDS), 1.0, 0.0)
    normed = tl.where(in_row, _widen(x, PAIRS) * rstd - mean * rstd, 0.0)
    grad_bias += grad
    grad_weight += grad * normed
    grad *= weight
    along, level = _two_sums(grad * normed, grad)
    portion = rstd / COLUMNS
    grad_x = (grad * rstd - level * portion) - normed * (along * portion)
    inside = in_row if EVEN else (row < rows) & in_row
    tl.store(grad_x_ptr + row.to(tl.int64) * COLUMNS + column, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    return grad_weight, grad_bias


@triton.jit
def _backward_loads(
    start,
    grad_out_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    grad_out_stride,
    x_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """What one tile reads; nothing past the last row, so that a tile can be asked for that does not exist."""
    column = _columns(BLOCK, CHUNKS)
    row = _rows(start, ROWS)
    grad = _load(grad_out_ptr, grad_out_stride, row, rows, column, COLUMNS, EVEN)
    x = _load(x_ptr, x_stride, row, rows, column, COLUMNS, EVEN)
    mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    return grad, x, mean, rstd


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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    PAIRS: tl.constexpr,
    ROUNDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """This program's tiles, a grid apart, and its partial rows of both sums.

    STAGES of 0 holds the next tile in registers, 3 and more in shared memory; 1 asks for nothing ahead.
    """
    column = _columns(BLOCK, CHUNKS)
    in_row = column < COLUMNS
    # With the scale: what follows needs it nowhere else but in the sums, which get it at the end.
    weight = _widen(_load_vector(weight_ptr, column, COLUMNS, ROWS, CHUNKS), PAIRS) * scale
    grad_weight = tl.zeros_like(column + _rows(0, ROWS)).to(tl.float32)
    grad_bias = grad_weight
    step = tl.num_programs(0) * ROWS
    start = tl.program_id(0) * ROWS
    if _INTERPRETED:  # Triton 3.6's interpreter has no loop over bounds that are known at run time only
        while start < rows:
            grad, x, mean, rstd = _backward_loads(
                start, grad_out_ptr, x_ptr, mean_ptr, rstd_ptr, rows, grad_out_stride, x_stride, COLUMNS, BLOCK, ROWS,
                CHUNKS, EVEN,
            )  # fmt: skip
            grad_weight, grad_bias = _backward_tile(
                start, grad, x, mean, rstd, grad_weight, grad_bias, weight, grad_x_ptr, rows, seed, threshold, DROP,
                COLUMNS, BLOCK, ROWS, CHUNKS, EVEN, PAIRS, ROUNDS,
            )  # fmt: skip
            start += step
    elif STAGES == 0:
        grad, x, mean, rstd = _backward_loads(
            start, grad_out_ptr, x_ptr, mean_ptr, rstd_ptr, rows, grad_out_stride, x_stride, COLUMNS, BLOCK, ROWS,
            CHUNKS, False,
        )  # fmt: skip
        for here in tl.range(start, rows, step, num_stages=1):
            next_grad, next_x, next_mean, next_rstd = _backward_loads(
                here + step, grad_out_ptr, x_ptr, mean_ptr, rstd_ptr, rows, grad_out_stride, x_stride, COLUMNS, BLOCK,
                ROWS, CHUNKS, False,
            )  # fmt: skip
            grad_weight, grad_bias = _backward_tile(
                here, grad, x, mean, rstd, grad_weight, grad_bias, weight, grad_x_ptr, rows, seed, threshold, DROP,
                COLUMNS, BLOCK, ROWS, CHUNKS, EVEN, PAIRS, ROUNDS,
            )  # fmt: skip
            grad, x, mean, rstd = next_grad, next_x, next_mean, next_rstd
    else:
        for here in tl.range(start, rows, step, num_stages=STAGES):
            grad, x, mean, rstd = _backward_loads(
                here, grad_out_ptr, x_ptr, mean_ptr, rstd_ptr, rows, grad_out_stride, x_stride, COLUMNS, BLOCK, ROWS,
                CHUNKS, EVEN,
            )  # fmt: skip
            grad_weight, grad_bias = _backward_tile(
                here, grad, x, mean, rstd, grad_weight, grad_bias, weight, grad_x_ptr, rows, seed, threshold, DROP,
                COLUMNS, BLOCK, ROWS, CHUNKS, EVEN, PAIRS, ROUNDS,
            )  # fmt: skip
    target = partial_ptr + tl.program_id(0).to(tl.int64) * (2 * COLUMNS) + column
    tl.store(target, tl.sum(grad_weight, axis=_ROWS, keep_dims=True) * scale, mask=in_row)
    tl.store(target + COLUMNS, tl.sum(grad_bias, axis=_ROWS, keep_dims=True) * scale, mask=in_row)
