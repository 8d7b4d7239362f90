"""Bias + GELU in one pass each way: out = gelu(x + bias), in the tanh form or the erf form.

    erf    gelu(u) = u * Phi(u),                       Phi the normal distribution function
    tanh   gelu(u) = u * sigmoid(2 * sqrt(2 / pi) * (u + 0.044715 * u³)),     which is 0.5 * u * (1 + tanh(...))

Bytes through device memory, per element of e bytes:

    forward    plain  add (2e) + gelu (2e): 4e
               fused  read x, write out: 2e
    backward   plain  gelu's gradient (3e) + its sum over rows (1e), with x + bias stored
               fused  read grad and x, write the gradient: 3e; the sum is taken on the way

Design. The forward takes one tile a program: its loads are all issued at the start, and the programs that are resident
hide each other's latency. In the backward a program owns a block of columns and walks down the rows, loading the next
tile before it computes the present one; it keeps its columns' bias gradient in float32 registers and writes one partial
row, which a second kernel adds up in a fixed order (no atomics).

Arithmetic. At 2e bytes an element, 16-bit tensors leave about 30 instructions an element before the multiprocessors
bind instead of the memory, so 16-bit inputs are computed with few: an exponential and a reciprocal as the special
function unit gives them (relative error 2⁻²², results below 2⁻¹²⁶ taken as zero), where `tl.exp` and a division spend
six more instructions on subnormal numbers and on the last bits. Phi is then

    tanh   1 / (1 + 2**(-u * (c0 + c1 * u²)))
    erf    1/2 + sign(u) * (1/2 - tail(|u|)),  the tail from Abramowitz and Stegun's formula 7.1.26 (error below 1.5e-7,
           a thousandth of bfloat16's rounding), which shares its exponential with the density of the gradient

float32 inputs take tl.exp, and erf itself.

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels._rows import (
    INTERPRETED,
    as_rows,
    check_float,
    check_like,
    check_vector,
    multiprocessors,
    on_device_of,
)
from kernels._tiles import sum_rows

FORMS = ("tanh", "erf")
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _exp2(x):
    """2**x in one instruction; the interpreter, which runs no PTX, takes its own."""
    if _INTERPRETED:
        result = tl.exp2(x)
    else:
        result = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def _reciprocal(x):
    """1 / x in one instruction, of numbers from one to inf."""
    if _INTERPRETED:
        result = 1.0 / x
    else:
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def _gelu_float32(u, TANH: tl.constexpr):
    """The value of gelu at u and its derivative there, to the last bits of float32."""
    if TANH:
        square = u * u
        inner = 1.5957691216057308 * u * (1.0 + 0.044715 * square)  # 2 sqrt(2 / pi)
        # From the exponential that does not overflow, and without 1 - phi, which would cancel.
        small = tl.exp(-tl.abs(inner))
        share = 1.0 / (1.0 + small)
        phi = tl.where(inner < 0.0, small * share, share)
        slope = phi + u * (small * share * share) * (1.5957691216057308 * (1.0 + 0.134145 * square))
    else:
        phi = 0.5 * (1.0 + tl.erf(0.7071067811865476 * u))
        slope = phi + u * 0.3989422804014327 * tl.exp(-0.5 * u * u)  # 1 / sqrt(2 pi)
    return u * phi, slope


@triton.jit
def _gelu_16_bit(u, TANH: tl.constexpr):
    """The value of gelu at u and its derivative there, for results that are rounded to 16 bits."""
    if TANH:
        square = u * u
        # -2 sqrt(2 / pi) log2(e), and 0.044715 of it. Where the exponential overflows, phi is zero, as it should be.
        phi = _reciprocal(1.0 + _exp2(u * (-2.302208198144325 - 0.10294323958 * square)))
        out = u * phi
        # phi (1 - phi) is off by 2⁻²⁴ at most. The last factor alone may overflow, as in the plain formula.
        slope = phi + (u * (phi - phi * phi)) * (1.5957691216057308 + 0.21406444881780076 * square)
    else:
        size = tl.abs(u)
        t = _reciprocal(1.0 + 0.2316418877 * size)  # 0.3275911 / sqrt(2)
        series = 0.5307027145
        series = series * t - 0.7265760135
        series = series * t + 0.7107068705
        series = series * t - 0.142248368
        series = series * t + 0.127414796
        scaled = 0.8493218002880191 * u  # sqrt(log2(e) / 2)
        bell = _exp2(-scaled * scaled)
        beyond = 0.5 - (series * t) * bell  # of the half that lies on u's side of zero, what lies within u
        out = 0.5 * u + size * beyond
        slope = 0.5 + tl.where(u < 0.0, -beyond, beyond) + u * 0.3989422804014327 * bell  # 1 / sqrt(2 pi)
    return out, slope


@triton.jit
def _gelu(u, TANH: tl.constexpr, EXACT: tl.constexpr):
    if EXACT:
        value, slope = _gelu_float32(u, TANH)
    else:
        value, slope = _gelu_16_bit(u, TANH)
    return value, slope


@triton.jit
def _below(index, end, EVEN: tl.constexpr):
    """index < end, or true without a comparison where tiles divide the tensor evenly."""
    return tl.full(index.shape, 1, tl.int1) if EVEN else index < end


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
    ACROSS: tl.constexpr,
    EVEN: tl.constexpr,
    WALK: tl.constexpr,
):
    column = (tl.program_id(0) % ACROSS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_row = _below(column, columns, EVEN)
    start = (tl.program_id(0) // ACROSS).to(tl.int64) * ROWS
    row = start + tl.arange(0, ROWS)[:, None]
    bias = tl.load(bias_ptr + column, mask=in_row, other=0.0)
    if WALK:
        bias = bias.to(tl.float32)
        step = (tl.num_programs(0) // ACROSS).to(tl.int64) * ROWS
        x_next = tl.load(x_ptr + row * x_stride + column, mask=(row < rows) & in_row, other=0.0)
        while start < rows:
            x = x_next.to(tl.float32)
            mask = _below(row, rows, EVEN) & in_row
            target = out_ptr + row * columns + column
            start += step
            row += step
            x_next = tl.load(x_ptr + row * x_stride + column, mask=(row < rows) & in_row, other=0.0)
            out, _ = _gelu(x + bias, TANH, EXACT)
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        mask = _below(row, rows, EVEN) & in_row
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
        out, _ = _gelu(x.to(tl.float32) + bias.to(tl.float32), TANH, EXACT)
        tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=mask)


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
    ACROSS: tl.constexpr,
    EVEN: tl.constexpr,
):
    column = (tl.program_id(0) % ACROSS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_row = _below(column, columns, EVEN)
    walker = tl.program_id(0) // ACROSS
    start = walker.to(tl.int64) * ROWS
    step = (tl.num_programs(0) // ACROSS).to(tl.int64) * ROWS
    row = start + tl.arange(0, ROWS)[:, None]
    x_next = tl.load(x_ptr + row * x_stride + column, mask=(row < rows) & in_row, other=0.0)
    grad_next = tl.load(grad_ptr + row * grad_stride + column, mask=(row < rows) & in_row, other=0.0)
    bias = tl.load(bias_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    grad_bias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    while start < rows:
        x = x_next.to(tl.float32)
        grad = grad_next.to(tl.float32)
        mask = _below(row, rows, EVEN) & in_row
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
    tl.store(partial_ptr + walker.to(tl.int64) * columns + column, partial, mask=in_row)


class Launch(NamedTuple):
    """The shape of one launch; the one place to tune."""

    block: int
    tile_rows: int
    warps: int
    registers: int  # a thread, so that the programs meant to be resident are
    programs: int  # that walk down the rows, a multiprocessor; 0 for one tile a program (forward only)


def launch_shape(columns: int, itemsize: int, *, backward: bool) -> Launch:
    """Tiles 4 KiB wide, so that a program reads and writes long runs: 16 bytes of each row for each of 256 threads.

    The forward takes two rows a tile. The backward holds twice as much an element and takes one; four programs a
    multiprocessor walk, and their partial rows cost little, since each is only as wide as its block.
    """
    block = min(4096 // itemsize, triton.next_power_of_2(columns))
    tile_rows = (4096 if backward else 8192) // itemsize // block
    return Launch(block, tile_rows, 8, 64, 4 if backward else 0)


def _programs(launch: Launch, rows: int, columns: int, device: torch.device) -> tuple[int, int]:
    """How many programs stand side by side across the columns, and how many down the rows."""
    across, tiles = triton.cdiv(columns, launch.block), triton.cdiv(rows, launch.tile_rows)
    if launch.programs == 0:
        return across, tiles
    return across, min(tiles, max(1, launch.programs * multiprocessors(device) // across))


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
    launch = launch_shape(columns, x.element_size(), backward=False)
    across, down = _programs(launch, rows, columns, x.device)
    with on_device_of(x):
        _forward_kernel[(across * down,)](
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
            ACROSS=across,
            EVEN=columns % launch.block == 0 and rows % launch.tile_rows == 0,
            WALK=launch.programs > 0,
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
    launch = launch_shape(columns, x.element_size(), backward=True)
    across, down = _programs(launch, rows, columns, x.device)
    partial = torch.empty((down, columns), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _backward_kernel[(across * down,)](
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
            ACROSS=across,
            EVEN=columns % launch.block == 0 and rows % launch.tile_rows == 0,
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
