"""Softmax over the last dimension, forward and backward.

    y_i = exp(x_i - max x) / sum_j exp(x_j - max x)                gradient: y_i * (g_i - sum_j y_j g_j)

Bytes through device memory, per element of e bytes:

    forward    plain  maximum (1e), subtract (2e), exp (2e), sum (1e), divide (2e): 8e
               fused  rows to 32,768 columns: read x, write y: 2e
                      longer rows: read x, read x again, write y: 3e, less what the caches still hold
    backward   plain  multiply (3e), sum (1e), subtract (2e), multiply (3e): 9e
               fused  read grad and y, write the gradient: 3e; longer rows (over 32,768 columns in 16 bits, 16,384 in
                      32) 5e, less what the caches hold

Design, by the length of a row:

- Most rows that are read once: one tile of whole rows a program, loaded at its start and kept in registers. Nothing is
  carried from tile to tile, so the hardware's own scheduling of programs overlaps the loads of one with the arithmetic
  and the stores of others. Tiles that fit the tensor have no masks.
- Over 16,384 columns to 32,768, in 16 bits: a row in float32 would fill a multiprocessor's registers, and nothing else
  would be in flight while it is reduced. So it is held in 16 bits, in half of them, and converted again for each use:
  in the forward two programs of 32 warps fit then, one's loads beside the other's arithmetic.
- Longer rows: two passes by a wide program, the first an online softmax (`row_statistics`), the second from
  the end of the row backwards, from what the caches saw last.

Rows read once carry no cache hints: on Hopper evict-first loads and streaming stores are several percent slower.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels._online import row_statistics
from kernels._rows import INTERPRETED, as_rows, check_float, check_like, check_width, multiprocessors, on_device_of

MAX_COLUMNS = 131_072


class Launch(NamedTuple):
    """The shape of one launch for rows that are read once."""

    tile_rows: int
    block: int  # columns padded to a power of two
    warps: int
    convert_again: bool = False  # 16-bit rows stay so between reductions, in half the registers
    registers: int | None = None  # a thread at most


class LongLaunch(NamedTuple):
    """The shape of one launch for rows that are read in two passes."""

    lanes: int
    vector: int  # elements a lane: 16 bytes
    unroll: int  # vectors a lane a turn of the first pass
    warps: int
    programs: int  # a multiprocessor; 0: one row a program
    ahead: bool = True  # the next turn's loads before this turn's arithmetic


def reads_once(columns: int, itemsize: int, *, backward: bool) -> bool:
    """Whether a row stays in registers between its reduction and its result."""
    return columns <= (16_384 if backward and itemsize > 2 else 32_768)


def launch_shape(columns: int, itemsize: int, *, backward: bool) -> Launch:
    """Shapes for rows read once, by their padded length."""
    block = triton.next_power_of_2(columns)
    if block == 32_768 and itemsize == 2:
        return Launch(1, block, 32, convert_again=True, registers=None if backward else 32)
    tile_rows = max(1, 2048 // block)
    warps = max(1, min(32, tile_rows * block * itemsize // 1024))  # 32 bytes of each tensor a thread
    return Launch(tile_rows, block, warps)


def long_shape(columns: int, itemsize: int, *, backward: bool) -> LongLaunch:
    """Shapes for rows read twice: two 16-byte accesses of each tensor a thread and turn."""
    warps, programs = (32, 2) if backward else (16, 4)
    return LongLaunch(lanes=32 * warps, vector=16 // itemsize, unroll=2, warps=warps, programs=programs)


@triton.jit
def _load_rows(pointer, stride, row, column, inside, OTHER: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        values = tl.load(pointer + row * stride + column, mask=inside, other=OTHER)
    else:
        values = tl.load(pointer + row * stride + column)
    return values


@triton.jit
def _store_rows(pointer, row, column, values, inside, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    values = values.to(pointer.dtype.element_ty)
    if MASKED:
        tl.store(pointer + row * COLUMNS + column, values, mask=inside)
    else:
        tl.store(pointer + row * COLUMNS + column, values)


@triton.jit
def _again(x, AGAIN: tl.constexpr):
    """x, and with AGAIN nothing that was made of it: what is converted once more need not be kept meanwhile."""
    if AGAIN:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _softmax_of(x, AGAIN: tl.constexpr):
    highest = tl.max(x.to(tl.float32), axis=1, keep_dims=True)
    x = _again(x, AGAIN)
    power = tl.exp(x.to(tl.float32) - highest)
    scale = tl.div_rn(1.0, tl.sum(power, axis=1, keep_dims=True))
    if AGAIN:
        power = tl.exp(_again(x, AGAIN).to(tl.float32) - highest)
    return power * scale


@triton.jit
def _forward_kernel(
    x_ptr,
    y_ptr,
    rows,
    x_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """One tile a program."""
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (column < COLUMNS)
    # A row past the end is the last one again: nothing but -inf in it would be NaN, which nobody asked for.
    x = _load_rows(x_ptr, x_stride, tl.minimum(row, rows - 1), column, column < COLUMNS, float("-inf"), MASKED)
    _store_rows(y_ptr, row, column, _softmax_of(x, AGAIN), inside, COLUMNS, MASKED)


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
    MASKED: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """One tile a program."""
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (column < COLUMNS)
    grad = _load_rows(grad_ptr, grad_stride, row, column, inside, 0.0, MASKED)
    y = _load_rows(y_ptr, y_stride, row, column, inside, 0.0, MASKED)
    level = tl.sum(y.to(tl.float32) * grad.to(tl.float32), axis=1, keep_dims=True)
    grad_x = _again(y, AGAIN).to(tl.float32) * (_again(grad, AGAIN).to(tl.float32) - level)
    _store_rows(grad_x_ptr, row, column, grad_x, inside, COLUMNS, MASKED)


@triton.jit
def _long_forward_kernel(
    x_ptr,
    y_ptr,
    rows,
    x_stride,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    BLOCK: tl.constexpr = UNROLL * LANES * VECTOR
    TURNS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    offset = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        x_row = x_ptr + row * x_stride
        y_row = y_ptr + row * COLUMNS
        maximum, power, _ = row_statistics(x_row, COLUMNS, LANES, VECTOR, UNROLL, AHEAD, False)
        scale = tl.div_rn(1.0, power)
        back = offset + (TURNS - 1) * BLOCK
        x_next = tl.load(x_row + back, mask=back < COLUMNS, other=0.0, eviction_policy="evict_first")
        for turn in range(TURNS):
            x = x_next.to(tl.float32)
            here = offset + (TURNS - 1 - turn) * BLOCK
            back = here - BLOCK
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
    BLOCK: tl.constexpr = LANES * VECTOR
    TURNS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        grad_row = grad_ptr + row * grad_stride
        y_row = y_ptr + row * y_stride
        along = tl.zeros((LANES, VECTOR), dtype=tl.float32)
        for turn in range(TURNS):
            here = offset + turn * BLOCK
            mask = here < COLUMNS
            grad = tl.load(grad_row + here, mask=mask, other=0.0).to(tl.float32)
            along += grad * tl.load(y_row + here, mask=mask, other=0.0).to(tl.float32)
        level = tl.sum(tl.sum(along, axis=1), axis=0)
        for turn in range(TURNS):
            here = offset + (TURNS - 1 - turn) * BLOCK
            mask = here < COLUMNS
            grad = tl.load(grad_row + here, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            y = tl.load(y_row + here, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            grad_x = (y * (grad - level)).to(grad_x_ptr.dtype.element_ty)
            tl.store(grad_x_ptr + row * COLUMNS + here, grad_x, mask=mask, eviction_policy="evict_first")
        row += tl.num_programs(0)


def _once(launch: Launch, rows: int, columns: int) -> dict[str, Any]:
    """Constants and options of a kernel that reads rows once."""
    return {
        "COLUMNS": columns,
        "BLOCK": launch.block,
        "ROWS": launch.tile_rows,
        "MASKED": columns != launch.block or rows % launch.tile_rows != 0,
        "AGAIN": launch.convert_again and not INTERPRETED,
        "num_warps": launch.warps,
        "maxnreg": launch.registers,
    }


def _grid(tiles: int, device: torch.device, programs: int) -> tuple[int]:
    return (min(tiles, multiprocessors(device) * programs) if programs else tiles,)


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
    tensors = (x_rows, y, rows, x_rows.stride(0))
    with on_device_of(x):
        if not reads_once(columns, x.element_size(), backward=False):
            long = long_shape(columns, x.element_size(), backward=False)
            _long_forward_kernel[_grid(rows, x.device, long.programs)](
                *tensors,
                COLUMNS=columns,
                LANES=long.lanes,
                VECTOR=long.vector,
                UNROLL=long.unroll,
                AHEAD=long.ahead,
                num_warps=long.warps,
            )
            return y
        launch = launch_shape(columns, x.element_size(), backward=False)
        _forward_kernel[(triton.cdiv(rows, launch.tile_rows),)](*tensors, **_once(launch, rows, columns))
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
    tensors = (grad_rows, y_rows, grad_x, rows, grad_rows.stride(0), y_rows.stride(0))
    with on_device_of(y):
        if reads_once(columns, y.element_size(), backward=True):
            launch = launch_shape(columns, y.element_size(), backward=True)
            _backward_kernel[(triton.cdiv(rows, launch.tile_rows),)](*tensors, **_once(launch, rows, columns))
        else:
            long = long_shape(columns, y.element_size(), backward=True)
            _long_backward_kernel[_grid(rows, y.device, long.programs)](
                *tensors,
                COLUMNS=columns,
                LANES=long.unroll * long.lanes,
                VECTOR=long.vector,
                num_warps=long.warps,
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
