"""Softmax over the last dimension, forward and backward.

    y_i = exp(x_i - max x) / sum_j exp(x_j - max x)                gradient: y_i * (g_i - sum_j y_j g_j)

Bytes through device memory, per element of e bytes:

    forward    plain  maximum (1e), subtract (2e), exp (2e), sum (1e), divide (2e): 8e
               fused  rows that fit the registers: read x, write y: 2e
                      longer rows: read x, read x again, write y: 3e, less what the L2 still holds of the first read
    backward   plain  multiply (3e), sum (1e), subtract (2e), multiply (3e): 9e
               fused  read grad and y, write the gradient: 3e; longer rows 5e, less what the L2 holds

Design. Rows that fit a multiprocessor's registers (32,768 columns forward, 16,384 backward, where two tensors are
held) are read once, in tiles of whole rows, by a persistent grid that loads ahead. Longer rows, to 131,072 columns,
are read in two passes by one wide program a multiprocessor, so that few rows share the L2 at a time. The first pass
is the online softmax: every thread carries its own running maximum and sum, rescaled when the maximum moves, and the
threads meet only at the end of the row, so no barrier stands between its loads. The second pass walks the row
backwards, from what the caches saw last.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels._rows import as_rows, check_float, check_like, check_width, multiprocessors, on_device_of
from kernels._tiles import load_tile

MAX_COLUMNS = 131_072
_LONG_WARPS = 32


class Launch(NamedTuple):
    """The shape of one launch for rows that are read once; the one place to tune."""

    tile_rows: int
    block: int  # columns padded to a power of two
    warps: int
    programs: int  # a multiprocessor
    registers: int  # a thread, so that all these programs are resident at once
    prefetch: bool


def reads_once(columns: int, *, backward: bool) -> bool:
    """Whether a row stays in registers between its reduction and its result."""
    return columns <= (16_384 if backward else 32_768)


def launch_shape(columns: int, itemsize: int, *, backward: bool) -> Launch:
    """A thread holds 32 bytes of each tensor up to 32 warps a row; then its share grows, with nothing loaded ahead."""
    block = triton.next_power_of_2(columns)
    tile_rows = max(1, (2048 if backward else 4096) // block)
    wanted = max(4, tile_rows * block * itemsize // 1024)
    warps = min(32, wanted)
    resident = 16 if tile_rows > 1 else 24 if backward else 32
    programs = max(1, resident // warps)
    registers = min(128, 65_536 // (32 * warps * programs))
    return Launch(tile_rows, block, warps, programs, registers, wanted <= 32)


@triton.jit
def _forward_kernel(
    x_ptr,
    y_ptr,
    rows,
    x_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < COLUMNS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    start = tl.program_id(0).to(tl.int64) * ROWS
    if PREFETCH:
        x_next = load_tile(x_ptr, x_stride, start, rows, column, in_row, ROWS)
    while start < rows:
        row = start + tl.arange(0, ROWS)[:, None]
        if PREFETCH:
            x = x_next.to(tl.float32)
            x_next = load_tile(x_ptr, x_stride, start + step, rows, column, in_row, ROWS)
        else:
            x = load_tile(x_ptr, x_stride, start, rows, column, in_row, ROWS).to(tl.float32)
        x = tl.where(in_row, x, float("-inf"))
        power = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
        y = power * tl.div_rn(1.0, tl.sum(power, axis=1, keep_dims=True))
        tl.store(y_ptr + row * COLUMNS + column, y.to(y_ptr.dtype.element_ty), mask=(row < rows) & in_row)
        start += step


@triton.jit
def _backward_kernel(
    grad_ptr,
    y_ptr,
    grad_x_ptr,
    rows,
    grad_stride,
    y_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < COLUMNS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    start = tl.program_id(0).to(tl.int64) * ROWS
    if PREFETCH:
        grad_next = load_tile(grad_ptr, grad_stride, start, rows, column, in_row, ROWS)
        y_next = load_tile(y_ptr, y_stride, start, rows, column, in_row, ROWS)
    while start < rows:
        row = start + tl.arange(0, ROWS)[:, None]
        if PREFETCH:
            grad = grad_next.to(tl.float32)
            y = y_next.to(tl.float32)
            grad_next = load_tile(grad_ptr, grad_stride, start + step, rows, column, in_row, ROWS)
            y_next = load_tile(y_ptr, y_stride, start + step, rows, column, in_row, ROWS)
        else:
            grad = load_tile(grad_ptr, grad_stride, start, rows, column, in_row, ROWS).to(tl.float32)
            y = load_tile(y_ptr, y_stride, start, rows, column, in_row, ROWS).to(tl.float32)
        grad_x = y * (grad - tl.sum(y * grad, axis=1, keep_dims=True))
        mask = (row < rows) & in_row
        tl.store(grad_x_ptr + row * COLUMNS + column, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        start += step


@triton.jit
def row_statistics(row_ptr, COLUMNS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, TOTAL: tl.constexpr):
    """The maximum, the sum of exp(x - maximum) and, with TOTAL, the sum of a long row, read once.

    Each of LANES carries a maximum and a sum of its own over VECTOR neighbouring elements a turn. A row of -inf
    alone has maximum -inf and sum 0; NaN and +inf make the sum NaN.
    """
    offset = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    maximum = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    power = tl.zeros((LANES,), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    x_next = tl.load(row_ptr + offset, mask=offset < COLUMNS, other=float("-inf"))
    for turn in range((COLUMNS + LANES * VECTOR - 1) // (LANES * VECTOR)):
        x = x_next.to(tl.float32)
        ahead = offset + (turn + 1) * (LANES * VECTOR)
        x_next = tl.load(row_ptr + ahead, mask=ahead < COLUMNS, other=float("-inf"))
        if TOTAL:
            total += tl.sum(tl.where(ahead - LANES * VECTOR < COLUMNS, x, 0.0), axis=1)
        risen = tl.maximum(maximum, tl.max(x, axis=1))
        # Until a lane has seen a finite number its maximum is -inf, and -inf - -inf would be NaN.
        level = tl.where(risen == float("-inf"), 0.0, risen)
        power = power * tl.exp(maximum - level) + tl.sum(tl.exp(x - level[:, None]), axis=1)
        maximum = risen
    highest = tl.max(maximum, axis=0)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, tl.sum(power * tl.exp(maximum - level), axis=0), tl.sum(total, axis=0)


@triton.jit
def _long_forward_kernel(
    x_ptr, y_ptr, rows, x_stride, COLUMNS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr
):
    offset = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    TURNS: tl.constexpr = (COLUMNS + LANES * VECTOR - 1) // (LANES * VECTOR)
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        x_row = x_ptr + row * x_stride
        y_row = y_ptr + row * COLUMNS
        maximum, power, _ = row_statistics(x_row, COLUMNS, LANES, VECTOR, False)
        scale = tl.div_rn(1.0, power)
        back = offset + (TURNS - 1) * (LANES * VECTOR)
        x_next = tl.load(x_row + back, mask=back < COLUMNS, other=0.0, eviction_policy="evict_first")
        for turn in range(TURNS):
            x = x_next.to(tl.float32)
            here = offset + (TURNS - 1 - turn) * (LANES * VECTOR)
            back = here - LANES * VECTOR
            x_next = tl.load(
                x_row + back, mask=(back >= 0) & (back < COLUMNS), other=0.0, eviction_policy="evict_first"
            )
            y = tl.exp(x - maximum) * scale
            tl.store(y_row + here, y.to(y_ptr.dtype.element_ty), mask=here < COLUMNS, eviction_policy="evict_first")
        row += tl.num_programs(0)


@triton.jit
def _long_backward_kernel(
    grad_ptr,
    y_ptr,
    grad_x_ptr,
    rows,
    grad_stride,
    y_stride,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    offset = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    TURNS: tl.constexpr = (COLUMNS + LANES * VECTOR - 1) // (LANES * VECTOR)
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        grad_row = grad_ptr + row * grad_stride
        y_row = y_ptr + row * y_stride
        along = tl.zeros((LANES, VECTOR), dtype=tl.float32)
        for turn in range(TURNS):
            here = offset + turn * (LANES * VECTOR)
            mask = here < COLUMNS
            grad = tl.load(grad_row + here, mask=mask, other=0.0).to(tl.float32)
            along += grad * tl.load(y_row + here, mask=mask, other=0.0).to(tl.float32)
        level = tl.sum(tl.sum(along, axis=1), axis=0)
        for turn in range(TURNS):
            here = offset + (TURNS - 1 - turn) * (LANES * VECTOR)
            mask = here < COLUMNS
            grad = tl.load(grad_row + here, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            y = tl.load(y_row + here, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            grad_x = (y * (grad - level)).to(grad_x_ptr.dtype.element_ty)
            tl.store(grad_x_ptr + row * COLUMNS + here, grad_x, mask=mask, eviction_policy="evict_first")
        row += tl.num_programs(0)


def long_shape(itemsize: int) -> dict[str, int]:
    """Lanes and elements a lane for rows read in two passes: two 16-byte accesses for each of 1,024 threads."""
    return {"LANES": 2048, "VECTOR": 16 // itemsize, "num_warps": _LONG_WARPS}


def softmax_forward(x: torch.Tensor) -> torch.Tensor:
    """Softmax of x over its last dimension.

    x  (..., columns), float32, float16 or bfloat16, evenly strided rows of 1 to 131,072 elements

    Returns y, contiguous, like x. NaN or +inf anywhere in a row, or -inf everywhere in it, make all of it NaN, as the
    plain formula does. Raises ValueError naming the argument that is not supported.
    """
    check_float("x", x)
    x_rows = as_rows("x", x)
    rows, columns = x_rows.shape
    check_width("x", columns, MAX_COLUMNS)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    processors, itemsize = multiprocessors(x.device), x.element_size()
    with on_device_of(x):
        if reads_once(columns, backward=False):
            launch = launch_shape(columns, itemsize, backward=False)
            _forward_kernel[(min(triton.cdiv(rows, launch.tile_rows), processors * launch.programs),)](
                x_rows,
                y,
                rows,
                x_rows.stride(0),
                COLUMNS=columns,
                BLOCK=launch.block,
                ROWS=launch.tile_rows,
                PREFETCH=launch.prefetch,
                num_warps=launch.warps,
                maxnreg=launch.registers,
            )
        else:
            _long_forward_kernel[(min(rows, processors),)](
                x_rows, y, rows, x_rows.stride(0), COLUMNS=columns, **long_shape(itemsize)
            )
    return y


def softmax_backward(grad_out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient of x from that of y = `softmax_forward(x)`; contiguous, like y. Raises ValueError as there."""
    check_float("y", y)
    check_like("grad_out", grad_out, "y", y)
    y_rows, grad_rows = as_rows("y", y), as_rows("grad_out", grad_out)
    rows, columns = y_rows.shape
    check_width("y", columns, MAX_COLUMNS)
    grad_x = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if rows == 0:
        return grad_x
    processors, itemsize = multiprocessors(y.device), y.element_size()
    with on_device_of(y):
        if reads_once(columns, backward=True):
            launch = launch_shape(columns, itemsize, backward=True)
            _backward_kernel[(min(triton.cdiv(rows, launch.tile_rows), processors * launch.programs),)](
                grad_rows,
                y_rows,
                grad_x,
                rows,
                grad_rows.stride(0),
                y_rows.stride(0),
                COLUMNS=columns,
                BLOCK=launch.block,
                ROWS=launch.tile_rows,
                PREFETCH=launch.prefetch,
                num_warps=launch.warps,
                maxnreg=launch.registers,
            )
        else:
            _long_backward_kernel[(min(rows, processors),)](
                grad_rows,
                y_rows,
                grad_x,
                rows,
                grad_rows.stride(0),
                y_rows.stride(0),
                COLUMNS=columns,
                **long_shape(itemsize),
            )
    return grad_x


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = softmax_forward(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return softmax_backward(grad_out.contiguous(), y)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, differentiable once; argument as `softmax_forward`."""
    y: torch.Tensor = _Softmax.apply(x)
    return y
