"""SwiGLU's gate in one pass each way: out = silu(gate) * up.

Bytes through device memory, per element of e bytes:

    forward    plain  silu (read, write) + multiply (two reads, write): 5e
               fused  read gate and up, write out: 3e
    backward   plain  multiply's two products (3e each) + silu's gradient (3e), from a stored silu(gate): 9e
               fused  read grad, gate and up, write both gradients: 5e; silu(gate) is computed again, not stored

Design. Element by element, so contiguous tensors become one long row and strided rows (the two halves of a merged
projection) are walked as they lie. A program takes 2,048 16-bit or 1,024 32-bit elements: 32 bytes a thread of each
tensor, all loads issued before the first use. No program depends on another, so the grid is as large as the work.
Arithmetic is float32 throughout: one rounding where the plain way has two.

Source: Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels._rows import as_lines, check_float, check_like, on_device_of

_WARPS = 4


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's rows and columns (64 bits wide), and which of them exist."""
    blocks = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    row = (program // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, out_ptr, rows, columns, gate_stride, up_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row, column, mask = _tile(rows, columns, ROWS, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    rows,
    columns,
    grad_stride,
    gate_stride,
    up_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = _tile(rows, columns, ROWS, BLOCK)
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask).to(tl.float32)
    # From the exponential that does not overflow, and without 1 - sigmoid, which would cancel.
    small = tl.exp(-tl.abs(gate))
    share = 1.0 / (1.0 + small)
    sigmoid = tl.where(gate < 0.0, small * share, share)
    grad_gate = grad * up * (sigmoid + gate * (small * share * share))
    offset = row * columns + column
    tl.store(grad_gate_ptr + offset, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_up_ptr + offset, (grad * gate * sigmoid).to(grad_up_ptr.dtype.element_ty), mask=mask)


def tile_shape(columns: int, itemsize: int) -> tuple[int, int]:
    """Rows and columns of a tile: 4 KiB of each tensor, two 16-byte accesses for each of 128 threads."""
    elements = 4096 // itemsize
    block = min(elements, triton.next_power_of_2(columns))
    return elements // block, block


def swiglu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    gate, up  (..., columns) alike, float32, float16 or bfloat16, evenly strided rows of any length

    Returns out, contiguous, of the same shape and dtype. Raises ValueError naming the argument at fault.
    """
    check_float("gate", gate)
    check_like("up", up, "gate", gate)
    gate_rows, up_rows = as_lines(gate=gate, up=up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    rows, columns = gate_rows.shape
    tile_rows, block = tile_shape(columns, gate.element_size())
    grid = (triton.cdiv(rows, tile_rows) * triton.cdiv(columns, block),)
    with on_device_of(gate):
        _forward_kernel[grid](
            gate_rows,
            up_rows,
            out,
            rows,
            columns,
            gate_rows.stride(0),
            up_rows.stride(0),
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return out


def swiglu_backward(grad_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients (grad_gate, grad_up) of `swiglu_forward`, contiguous; arguments as there, grad_out like out."""
    check_float("gate", gate)
    check_like("up", up, "gate", gate)
    check_like("grad_out", grad_out, "gate", gate)
    grad_rows, gate_rows, up_rows = as_lines(grad_out=grad_out, gate=gate, up=up)
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty_like(grad_gate)
    if grad_gate.numel() == 0:
        return grad_gate, grad_up
    rows, columns = gate_rows.shape
    tile_rows, block = tile_shape(columns, gate.element_size())
    grid = (triton.cdiv(rows, tile_rows) * triton.cdiv(columns, block),)
    with on_device_of(gate):
        _backward_kernel[grid](
            grad_rows,
            gate_rows,
            up_rows,
            grad_gate,
            grad_up,
            rows,
            columns,
            grad_rows.stride(0),
            gate_rows.stride(0),
            up_rows.stride(0),
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return grad_gate, grad_up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return swiglu_backward(grad_out.contiguous(), *ctx.saved_tensors)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, differentiable once; arguments as `swiglu_forward`."""
    out: torch.Tensor = _SwiGLU.apply(gate, up)
    return out
