"""Bias + GELU in one pass each way: out = gelu(x + bias), in the tanh form or the erf form.

    erf    gelu(u) = u * Phi(u),                       Phi the normal distribution function
    tanh   gelu(u) = u * sigmoid(2 * sqrt(2 / pi) * (u + 0.044715 * u³)),     which is 0.5 * u * (1 + tanh(...))

Bytes through device memory, per element of e bytes:

    forward    plain  add (2e) + gelu (2e): 4e
               fused  read x, write out: 2e
    backward   plain  gelu's gradient (3e) + its sum over rows (1e), with x + bias stored
               fused  read grad and x, write the gradient: 3e; the sum is taken on the way

Design. A program owns a block of columns and walks down the rows in tiles, loading the next tile before it computes
the present one; in the backward it keeps its columns' bias gradient in float32 registers and writes one partial row,
which a second kernel adds up in a fixed order (no atomics). At 2e bytes an element, 16-bit tensors leave about
25 instructions an element before arithmetic binds, and float32's erf alone takes as many; so 16-bit inputs take Phi
from Abramowitz and Stegun's formula 7.1.26 (error below 1.5e-7, a thousandth of bfloat16's rounding), which shares
its exponential with the density that the gradient needs. float32 inputs take erf itself.

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels._rows import (
    as_rows,
    check_float,
    check_like,
    check_vector,
    multiprocessors,
    on_device_of,
)
from kernels._tiles import sum_rows

FORMS = ("tanh", "erf")


@triton.jit
def _gelu(u, TANH: tl.constexpr, EXACT: tl.constexpr):
    """The value of gelu at u and its derivative there, in float32."""
    if TANH:
        square = u * u
        inner = 1.5957691216057308 * u * (1.0 + 0.044715 * square)  # 2 sqrt(2 / pi)
        # From the exponential that does not overflow, and without 1 - phi, which would cancel.
        small = tl.exp(-tl.abs(inner))
        share = 1.0 / (1.0 + small)
        phi = tl.where(inner < 0.0, small * share, share)
        slope = phi + u * (small * share * share) * (1.5957691216057308 * (1.0 + 0.134145 * square))
    else:
        bell = tl.exp(-0.5 * u * u)
        if EXACT:
            phi = 0.5 * (1.0 + tl.erf(0.7071067811865476 * u))
        else:
            t = 1.0 / (1.0 + 0.2316418877 * tl.abs(u))  # 0.3275911 / sqrt(2)
            series = 1.061405429
            series = series * t - 1.453152027
            series = series * t + 1.421413741
            series = series * t - 0.284496736
            series = series * t + 0.254829592
            tail = 0.5 * series * t * bell
            phi = tl.where(u < 0.0, tail, 1.0 - tail)
        slope = phi + u * 0.3989422804014327 * bell  # 1 / sqrt(2 pi)
    return u * phi, slope


@triton.jit
def _forward_kernel(
    x_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    x_stride,
    TANH: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_row = column < columns
    bias = tl.load(bias_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    step = tl.num_programs(1).to(tl.int64) * ROWS
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    start = tl.program_id(1).to(tl.int64) * ROWS
    x_next = tl.load(x_ptr + row * x_stride + column, mask=(row < rows) & in_row, other=0.0)
    while start < rows:
        x = x_next.to(tl.float32)
        mask = (row < rows) & in_row
        target = out_ptr + row * columns + column
        start += step
        row += step
        x_next = tl.load(x_ptr + row * x_stride + column, mask=(row < rows) & in_row, other=0.0)
        out, _ = _gelu(x + bias, TANH, EXACT)
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr,
    x_ptr,
    bias_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    columns,
    grad_stride,
    x_stride,
    TANH: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_row = column < columns
    bias = tl.load(bias_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    grad_bias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    step = tl.num_programs(1).to(tl.int64) * ROWS
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    start = tl.program_id(1).to(tl.int64) * ROWS
    x_next = tl.load(x_ptr + row * x_stride + column, mask=(row < rows) & in_row, other=0.0)
    grad_next = tl.load(grad_ptr + row * grad_stride + column, mask=(row < rows) & in_row, other=0.0)
    while start < rows:
        x = x_next.to(tl.float32)
        grad = grad_next.to(tl.float32)
        mask = (row < rows) & in_row
        target = grad_x_ptr + row * columns + column
        start += step
        row += step
        x_next = tl.load(x_ptr + row * x_stride + column, mask=(row < rows) & in_row, other=0.0)
        grad_next = tl.load(grad_ptr + row * grad_stride + column, mask=(row < rows) & in_row, other=0.0)
        _, slope = _gelu(x + bias, TANH, EXACT)
        grad_x = grad * slope
        # Rows past the end carry a gradient of zero, but gelu of a bias that is not finite would make it NaN.
        grad_bias += tl.where(mask, grad_x, 0.0)
        tl.store(target, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    partial = tl.sum(grad_bias, axis=0, keep_dims=True)
    tl.store(partial_ptr + tl.program_id(1).to(tl.int64) * columns + column, partial, mask=in_row)


class Launch(NamedTuple):
    """The shape of one launch; the one place to tune."""

    block: int
    tile_rows: int
    warps: int
    registers: int  # a thread, so that all programs are resident at once
    column_programs: int
    row_programs: int  # the most


def launch_shape(columns: int, itemsize: int, processors: int, *, backward: bool) -> Launch:
    """Tiles of 4 KiB a tensor for 128 threads, as wide as 1 KiB allows: two 16-byte accesses a thread.

    The programs that are resident at once walk down the rows: eight a multiprocessor, or four in the backward, which
    holds more. Their partial rows cost the backward little, since each is only as wide as its block.
    """
    block = min(1024 // itemsize, triton.next_power_of_2(columns))
    tile_rows = 4096 // itemsize // block
    column_programs = triton.cdiv(columns, block)
    programs = 4 if backward else 8
    row_programs = max(1, programs * processors // column_programs)
    return Launch(block, tile_rows, 4, 65_536 // (4 * 32 * programs), column_programs, row_programs)


def _check(x: torch.Tensor, bias: torch.Tensor, form: str) -> torch.Tensor:
    check_float("x", x)
    rows = as_rows("x", x)
    check_vector("bias", bias, rows.shape[1], "x", x, dtypes=(torch.float32,))
    if form not in FORMS:
        raise ValueError(f"form: {form!r} is not known; use 'tanh' or 'erf'")
    return rows


def bias_gelu_forward(x: torch.Tensor, bias: torch.Tensor, form: str = "tanh") -> torch.Tensor:
    """gelu(x + bias).

    x     (..., columns), float32, float16 or bfloat16, evenly strided rows
    bias  (columns,), contiguous, the dtype of x or float32
    form  "tanh" or "erf"

    Returns out, contiguous, like x. Raises ValueError naming the argument that is not supported.
    """
    x_rows = _check(x, bias, form)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows, columns = x_rows.shape
    launch = launch_shape(columns, x.element_size(), multiprocessors(x.device), backward=False)
    grid = (launch.column_programs, min(launch.row_programs, triton.cdiv(rows, launch.tile_rows)))
    with on_device_of(x):
        _forward_kernel[grid](
            x_rows,
            bias,
            out,
            rows,
            columns,
            x_rows.stride(0),
            TANH=form == "tanh",
            EXACT=x.dtype == torch.float32,
            BLOCK=launch.block,
            ROWS=launch.tile_rows,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )
    return out


def bias_gelu_backward(
    grad_out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, form: str = "tanh"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients (grad_x like x, grad_bias like bias) of `bias_gelu_forward`; grad_out like its result."""
    x_rows = _check(x, bias, form)
    check_like("grad_out", grad_out, "x", x)
    grad_rows = as_rows("grad_out", grad_out)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if grad_x.numel() == 0:
        return grad_x, torch.zeros_like(bias)
    rows, columns = x_rows.shape
    launch = launch_shape(columns, x.element_size(), multiprocessors(x.device), backward=True)
    grid = (launch.column_programs, min(launch.row_programs, triton.cdiv(rows, launch.tile_rows)))
    partial = torch.empty((grid[1], columns), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _backward_kernel[grid](
            grad_rows,
            x_rows,
            bias,
            grad_x,
            partial,
            rows,
            columns,
            grad_rows.stride(0),
            x_rows.stride(0),
            TANH=form == "tanh",
            EXACT=x.dtype == torch.float32,
            BLOCK=launch.block,
            ROWS=launch.tile_rows,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )
        grad_bias = sum_rows(partial, bias.dtype)
    return grad_x, grad_bias


class _BiasGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, form: str) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        ctx.form = form
        return bias_gelu_forward(x, bias, form)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, bias = ctx.saved_tensors
        return *bias_gelu_backward(grad_out.contiguous(), x, bias, ctx.form), None


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, form: str = "tanh") -> torch.Tensor:
    """gelu(x + bias), differentiable once; arguments as `bias_gelu_forward`."""
    out: torch.Tensor = _BiasGELU.apply(x, bias, form)
    return out
