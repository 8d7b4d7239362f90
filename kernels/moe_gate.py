"""What lies between products that take rows laid out: tokens' rows by expert, and the gate with its backward.

Bytes for T tokens of K experts, P = T · K pairs, width D, inner width F and e bytes a number:

    spread          e (D T + D P): a token is read once and written to each of its rows
    gate            e 3 F P: gate and up read, the activation written
    gate backward   e 6 F P: the activation's gradient, gate and up read, their gradients and p · act written, the last
                    over the activation's gradient, in whose place it lies; the router's gradient is a sum on the way

Our first product has these at its ends, where they move e 2 F P less each way. They pay where another product is the
faster by more than that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._rows import on_device_of
from kernels.moe_order import Order

_WARPS = 4


@triton.jit(do_not_specialize=["slots_ptr"])
def spread_kernel(x_ptr, slots_ptr, out_ptr, width, x_stride, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one token to each of its rows. A slot of -1 is none."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x_ptr + token.to(tl.int64) * x_stride + column, mask=inside)
    for choice in tl.static_range(CHOICES):
        slot = tl.load(slots_ptr + token * CHOICES + choice)
        tl.store(out_ptr + slot.to(tl.int64) * width + column, values, mask=inside & (slot >= 0))


def spread(x_TD: torch.Tensor, order: Order, choices: int) -> torch.Tensor:
    """Every row's token (R, D), contiguous; rows that no pair has are not written."""
    tokens, width = x_TD.shape
    out = x_TD.new_empty(order.order_R.shape[0], width)
    block = min(triton.next_power_of_2(width), 32 * _WARPS * 16 // x_TD.element_size())
    spread_kernel[(tokens, triton.cdiv(width, block))](
        x_TD, order.slots_P, out, width, x_TD.stride(0), CHOICES=choices, BLOCK=block, num_warps=_WARPS
    )
    return out


@triton.jit
def sigmoid_of(gate):
    """Its sigmoid, and the sigmoid's derivative: from the exponential that does not overflow, without 1 - sigmoid,
    which would cancel."""
    small = tl.exp(-tl.abs(gate))
    share = 1.0 / (1.0 + small)
    return tl.where(gate < 0.0, small * share, share), small * share * share


@triton.jit(do_not_specialize=["ends_ptr"])
def gate_kernel(kept_ptr, act_ptr, ends_ptr, experts, inner, BLOCK: tl.constexpr):
    """BLOCK columns of one row's activation."""
    row = tl.program_id(0)
    if row >= tl.load(ends_ptr + experts - 1):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    kept = kept_ptr + row.to(tl.int64) * (2 * inner) + column
    gate = tl.load(kept, mask=inside).to(tl.float32)
    up = tl.load(kept + inner, mask=inside).to(tl.float32)
    act = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(act_ptr + row.to(tl.int64) * inner + column, act.to(act_ptr.dtype.element_ty), mask=inside)


def gate(kept_PH: torch.Tensor, order: Order) -> torch.Tensor:
    """silu(gate) · up (P, F) of gate beside up (P, 2F), contiguous."""
    pairs, inner = kept_PH.shape[0], kept_PH.shape[1] // 2
    act = kept_PH.new_empty(pairs, inner)
    block = min(triton.next_power_of_2(inner), 32 * _WARPS * 16 // kept_PH.element_size())
    gate_kernel[(pairs, triton.cdiv(inner, block))](
        kept_PH, act, order.ends_E, order.ends_E.shape[0], inner, BLOCK=block, num_warps=_WARPS
    )
    return act


@triton.jit(do_not_specialize=["order_ptr", "ends_ptr", "parts_ptr"])
def gate_pass_kernel(
    grad_ptr, kept_ptr, router_ptr, grad_kept_ptr, parts_ptr, order_ptr, ends_ptr, experts, inner, BLOCK: tl.constexpr
):
    """One row: gradients of gate and up, p · act in the place of the gradient that came, and p's gradient."""
    row = tl.program_id(0)
    if row >= tl.load(ends_ptr + experts - 1):
        return
    p = tl.load(router_ptr + tl.load(order_ptr + row)).to(tl.float32)
    grad = grad_ptr + row.to(tl.int64) * inner
    kept = kept_ptr + row.to(tl.int64) * (2 * inner)
    grad_kept = grad_kept_ptr + row.to(tl.int64) * (2 * inner)
    dtype: tl.constexpr = grad_kept_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, inner, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < inner
        g = tl.load(grad + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(kept + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(kept + inner + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid, slope = sigmoid_of(gate)
        silu = gate * sigmoid
        act = silu * up
        total += tl.where(inside, g * act, 0.0)
        tl.store(grad + column, (p * act).to(dtype), mask=inside)
        g *= p
        tl.store(grad_kept + column, (g * up * (sigmoid + gate * slope)).to(dtype), mask=inside)
        tl.store(grad_kept + inner + column, (g * silu).to(dtype), mask=inside)
    tl.store(parts_ptr + row, tl.sum(total, 0))


def gate_pass(
    grad_PF: torch.Tensor, kept_PH: torch.Tensor, router_TK: torch.Tensor, order: Order
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of gate and up (P, 2F), p · act (P, F), which overwrites ``grad``, and p's by row (1, P) in float32."""
    pairs, inner = grad_PF.shape
    grad_kept, parts = torch.empty_like(kept_PH), kept_PH.new_empty(1, pairs, dtype=torch.float32)
    block = min(triton.next_power_of_2(inner), 4096 // kept_PH.element_size())
    gate_pass_kernel[(pairs,)](
        grad_PF, kept_PH, router_TK, grad_kept, parts, order.order_R, order.ends_E, order.ends_E.shape[0], inner,
        BLOCK=block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return grad_kept, grad_PF, parts


@triton.jit(do_not_specialize=["ends_ptr"])
def clear_kernel(out_ptr, ends_ptr, size, BLOCK: tl.constexpr):
    """Zeros for an expert that has no row; the others' programs return at once."""
    expert = tl.program_id(0)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends_ptr + expert) > begin:
        return
    out = out_ptr + expert.to(tl.int64) * size
    zeros = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
    for start in tl.range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(out + place, zeros, mask=place < size)


def clear_empty(out: torch.Tensor, order: Order) -> torch.Tensor:
    """``out`` (E, M, N), contiguous, with zeros for the experts that have no row, as their sum over none is."""
    size = out.shape[1] * out.shape[2]
    with on_device_of(out):
        clear_kernel[(out.shape[0], min(64, triton.cdiv(size, 4096)))](
            out, order.ends_E, size, BLOCK=4096, num_warps=_WARPS
        )
    return out
