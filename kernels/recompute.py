"""Two passes that make activations again where backward needs them, so that forward need not keep them.

    normalize              out = summed * rstd * weight: a norm's output from its input and its row statistic
    swiglu_backward_again  the gate's two gradients, and beside them silu(gate) * up, which the next product read

Bytes through device memory, per element of e bytes:

    normalize   read summed, write out: 2e; the reduction is not done again, nor a sum before it
    gate        read the gradient, gate and up, write both gradients and the product: 6e, where a backward without the
                product moves 5e and a forward of its own 3e more

Design. Element by element, in tiles of :func:`kernels.swiglu.tile_shape`; the expressions are the forward kernels'. The
gate's results are the same to the bit. Of a norm's, where rows are no multiple of 16 bytes, a few in a hundred thousand
16-bit ones round the other way on an H200. The gate's pass writes over what it reads: a program loads its elements of
all three tensors before it stores any, and no other program touches them. So a backward of the gate needs no memory at
all.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4; that the gradients take the place
of gate and up is Liger-Kernel's way (Hsu et al. 2024).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._rows import as_lines, as_rows, check_beside, check_float, check_like, check_vector, on_device_of
from kernels.swiglu import _WARPS, _tile, tile_shape


@triton.jit
def _normalize_kernel(
    summed_ptr, rstd_ptr, weight_ptr, out_ptr, rows, columns, summed_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row, column, mask = _tile(rows, columns, ROWS, BLOCK)
    summed = tl.load(summed_ptr + row * summed_stride + column, mask=mask).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < rows)
    weight = tl.load(weight_ptr + column, mask=column < columns).to(tl.float32)
    out = summed * rstd * weight
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_kernel(grad_ptr, gate_ptr, up_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, column, mask = _tile(rows, columns, ROWS, BLOCK)
    offset = row * columns + column
    grad = tl.load(grad_ptr + offset, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + offset, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offset, mask=mask).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    # From the exponential that does not overflow, and without 1 - sigmoid, which would cancel.
    small = tl.exp(-tl.abs(gate))
    share = 1.0 / (1.0 + small)
    sigmoid = tl.where(gate < 0.0, small * share, share)
    grad_gate = grad * up * (sigmoid + gate * (small * share * share))
    tl.store(gate_ptr + offset, grad_gate.to(gate_ptr.dtype.element_ty), mask=mask)
    tl.store(up_ptr + offset, (grad * gate * sigmoid).to(up_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_ptr + offset, product.to(grad_ptr.dtype.element_ty), mask=mask)


def normalize(summed: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """The first result of `add_rms_norm_forward` again, from its others, within a rounding.

    summed, weight, rstd as it took or returned them. Raises ValueError naming the argument that is not supported.
    """
    check_float("summed", summed)
    summed_rows = as_rows("summed", summed)
    rows, columns = summed_rows.shape
    check_vector("weight", weight, columns, "summed", summed, dtypes=(torch.float32,))
    check_beside("rstd", rstd, "summed", summed, dtypes=(torch.float32,))
    if tuple(rstd.shape) != (rows,) or rstd.dtype != torch.float32:
        raise ValueError(f"rstd: {rstd.dtype} of shape {tuple(rstd.shape)}; it must be float32 of ({rows},)")
    out = torch.empty(summed.shape, dtype=summed.dtype, device=summed.device)
    if out.numel() == 0:
        return out
    tile_rows, block = tile_shape(columns, summed.element_size())
    with on_device_of(summed):
        _normalize_kernel[(triton.cdiv(rows, tile_rows) * triton.cdiv(columns, block),)](
            summed_rows,
            rstd,
            weight,
            out,
            rows,
            columns,
            summed_rows.stride(0),
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return out


def swiglu_backward_again(
    grad_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `swiglu_forward` and its result again, written over what is given.

    grad_out, gate, up  alike and contiguous, float32, float16 or bfloat16

    Returns grad_gate in gate's memory, grad_up in up's, and silu(gate) * up in grad_out's. Autograd is told, so that a
    second backward over the same tensors is refused. Raises ValueError naming the argument at fault.
    """
    check_float("gate", gate)
    for name, tensor in (("up", up), ("grad_out", grad_out)):
        check_like(name, tensor, "gate", gate)
    for name, tensor in (("gate", gate), ("up", up), ("grad_out", grad_out)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: is not contiguous, so its elements cannot be written over in one pass")
    for tensor in (grad_out, gate, up):
        torch.autograd.graph.increment_version(tensor)
    if gate.numel() == 0:
        return gate, up, grad_out
    (lines,) = as_lines(gate=gate)
    rows, columns = lines.shape
    tile_rows, block = tile_shape(columns, gate.element_size())
    with on_device_of(gate):
        _gate_kernel[(triton.cdiv(rows, tile_rows) * triton.cdiv(columns, block),)](
            grad_out, gate, up, rows, columns, ROWS=tile_rows, BLOCK=block, num_warps=_WARPS
        )
    return gate, up, grad_out
