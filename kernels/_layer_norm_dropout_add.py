"""The kernels of LayerNorm + dropout + residual add; what they compute and why so is in layer_norm_dropout_add.py.

A tile is (ROWS, CHUNKS, SPAN): rows of BLOCK = CHUNKS * SPAN elements, each in CHUNKS pieces. Triton deals warps out
along a piece first and then to other rows, so SPAN / 256 warps share a row (32 threads of 8 elements each) and a thread
has some of every piece of its row: the pieces decide how many elements a thread adds before it asks others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._rows import INTERPRETED
from kernels.dropout_mask import keep_tile

_INTERPRETED = tl.constexpr(INTERPRETED)


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
    """A row's columns in its place in a tile: (1, CHUNKS, SPAN)."""
    SPAN: tl.constexpr = BLOCK // CHUNKS
    return tl.arange(0, CHUNKS)[None, :, None] * SPAN + tl.arange(0, SPAN)[None, None, :]


@triton.jit
def _keep(seed, start, threshold, BLOCK: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, ROUNDS: tl.constexpr):
    """The mask of a tile from its first row, made with pieces and rows exchanged.

    Tensors that are not loaded have their warps dealt out to the second dimension before the first, loaded ones the
    other way round; exchanged, both agree on who has what, and nothing goes through shared memory.
    """
    GROUPS: tl.constexpr = BLOCK // CHUNKS // 8
    group = tl.arange(0, CHUNKS)[:, None, None] * GROUPS + tl.arange(0, GROUPS)[None, None, :]
    row = start + tl.arange(0, ROWS)[None, :, None]
    return tl.permute(keep_tile(seed, row, group, threshold, ROUNDS), (1, 0, 2))


@triton.jit
def _load(pointer, stride, row, rows, column, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a tensor, zero outside it. EVEN: every row is one of it."""
    mask = column < COLUMNS if EVEN else (row < rows) & (column < COLUMNS)
    return tl.load(pointer + row.to(tl.int64) * stride + column, mask=mask, other=0.0)


@triton.jit
def _load_vector(pointer, column, COLUMNS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """A vector along a row; for every row of a tile where warps have rows of their own, so that each holds its part."""
    if CHUNKS > 1:
        column = column + tl.zeros((ROWS, 1, 1), dtype=tl.int32)
    return tl.load(pointer + column, mask=column < COLUMNS, other=0.0)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sum(a):
    """The sum of a tile along its rows, (ROWS, 1, 1): a thread's pieces first."""
    return tl.sum(tl.sum(a, axis=1, keep_dims=True), axis=2, keep_dims=True)


@triton.jit
def _two_sums(a, b):
    """The sums of a and b along their rows, with the barriers of one."""
    if _INTERPRETED:
        first, second = _sum(a), _sum(b)
    else:
        first, second = tl.reduce((a, b), 1, _add_pairs, keep_dims=True)
        first, second = tl.reduce((first, second), 2, _add_pairs, keep_dims=True)
    return first, second


@triton.jit
def _standardise(x, x_first, eps, in_row, COLUMNS: tl.constexpr, ONE_PASS: tl.constexpr):
    """Rows x float32 less their mean, over their deviation; that mean, and the reciprocal of that deviation.

    x_first (ROWS, 1, 1) the rows' first elements.
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
    """One tile a program: everything is asked for first, the mask is made while it is on its way."""
    column = _columns(BLOCK, CHUNKS)
    in_row = column < COLUMNS
    start = tl.program_id(0) * ROWS
    row = start + tl.arange(0, ROWS)[:, None, None]
    x = _load(x_ptr, x_stride, row, rows, column, COLUMNS, EVEN)
    x_first = tl.load(x_ptr + row.to(tl.int64) * x_stride, mask=row < rows, other=0.0)
    residual = _load(residual_ptr, residual_stride, row, rows, column, COLUMNS, EVEN)
    weight = _load_vector(weight_ptr, column, COLUMNS, ROWS, CHUNKS)
    bias = _load_vector(bias_ptr, column, COLUMNS, ROWS, CHUNKS)
    if DROP:
        # Here, before anything waits for a load.
        keep = tl.where(_keep(seed, start, threshold, BLOCK, ROWS, CHUNKS, ROUNDS), scale, 0.0)
    x = _widen(x, PAIRS)
    normed, mean, rstd = _standardise(x, x_first.to(tl.float32), eps, in_row, COLUMNS, ONE_PASS)
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
    row = start + tl.arange(0, ROWS)[:, None, None]
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
    row = start + tl.arange(0, ROWS)[:, None, None]
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
    grad_weight = tl.zeros((ROWS, CHUNKS, BLOCK // CHUNKS), dtype=tl.float32)
    grad_bias = tl.zeros((ROWS, CHUNKS, BLOCK // CHUNKS), dtype=tl.float32)
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
    tl.store(target, tl.sum(grad_weight, axis=0, keep_dims=True) * scale, mask=in_row)
    tl.store(target + COLUMNS, tl.sum(grad_bias, axis=0, keep_dims=True) * scale, mask=in_row)
