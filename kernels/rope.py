"""Rotary position embedding of queries and keys in one pass, in place.

    first'  = first * cos(position) - second * sin(position)
    second' = second * cos(position) + first * sin(position)

where first and second are the two halves of the rotated part of a head (the "rotate half" layout of Llama in
Hugging Face's code). The gradient is the rotation by the opposite angle.

Bytes through device memory, per element of q and k of e bytes:

    forward   plain  negate one half (1e), concatenate (2e), two products (2e each), one sum (3e): 10e
              fused  read and write: 2e
    backward  plain  two products (2e each), negate (1e), two slices padded by zeros (2e each), two sums (3e each): 15e
              fused  read and write: 2e

The tables add rotated width / 2 elements each a token, shared by all heads: 1 / (query heads + key heads) of 2e.

Design. One program a token: it reads that token's row of both tables once and rotates all query and key heads with
it, so grouped-query shapes cost one launch. A thread holds 16-byte pieces of both halves. Positions are read from
memory, in any order. A position outside the tables gives NaN instead of whatever lies behind them.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.4.2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels._rows import check_beside, check_device, check_float, on_device_of


@triton.jit
def _rotate_heads(
    in_ptr,
    out_ptr,
    in_head,
    out_head,
    cos,
    sin,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    mask = (head < HEADS) & (lane < HALF)
    source = in_ptr + head * in_head + lane
    first = tl.load(source, mask=mask).to(tl.float32)
    second = tl.load(source + HALF, mask=mask).to(tl.float32)
    target = out_ptr + head * out_head + lane
    tl.store(target, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    sequence,
    table_length,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    q_out_batch,
    q_out_token,
    q_out_head,
    k_out_batch,
    k_out_token,
    k_out_head,
    position_batch,
    position_token,
    HAS_POSITIONS: tl.constexpr,
    BACKWARD: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = (tl.program_id(0) // sequence).to(tl.int64)
    token = (tl.program_id(0) % sequence).to(tl.int64)
    position = token
    if HAS_POSITIONS:
        position = tl.load(position_ptr + batch * position_batch + token * position_token).to(tl.int64)
    lane = tl.arange(0, BLOCK)[None, :]
    mask = lane < HALF
    inside = (position >= 0) & (position < table_length)
    outside = tl.where(inside, 0.0, float("nan"))
    cos = tl.load(cos_ptr + position * HALF + lane, mask=mask & inside, other=0.0).to(tl.float32) + outside
    sin = tl.load(sin_ptr + position * HALF + lane, mask=mask & inside, other=0.0).to(tl.float32) + outside
    if BACKWARD:
        sin = -sin
    _rotate_heads(
        q_ptr + batch * q_batch + token * q_token,
        q_out_ptr + batch * q_out_batch + token * q_out_token,
        q_head,
        q_out_head,
        cos,
        sin,
        Q_HEADS,
        HALF,
        BLOCK_Q,
        BLOCK,
    )
    _rotate_heads(
        k_ptr + batch * k_batch + token * k_token,
        k_out_ptr + batch * k_out_batch + token * k_out_token,
        k_head,
        k_out_head,
        cos,
        sin,
        K_HEADS,
        HALF,
        BLOCK_K,
        BLOCK,
    )


def warps_for(q_heads: int, k_heads: int, half: int, itemsize: int) -> int:
    """Warps a program: about 32 bytes a thread of each half of the queries."""
    elements = triton.next_power_of_2(max(q_heads, k_heads)) * triton.next_power_of_2(half)
    return min(16, max(1, elements * itemsize // 1024))


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
) -> None:
    check_float("q", q)
    check_beside("k", k, "q", q)
    for name, tensor in (("q", q), ("k", k)):
        if tensor.ndim != 4:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}; it must be (batch, sequence, heads, head width)")
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: its last dimension has stride {tensor.stride(-1)}, only 1 is supported")
        if not 1 <= tensor.shape[2] <= 256 and tensor.numel():
            raise ValueError(f"{name}: {tensor.shape[2]} heads are not supported; use 1 to 256")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"k: shape {tuple(k.shape)} does not go with q's {tuple(q.shape)}; all but the heads must agree"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        check_beside(name, table, "q", q, dtypes=(torch.float32,))
        if table.ndim != 2 or not table.is_contiguous() or table.shape != cos.shape:
            raise ValueError(
                f"{name}: shape {tuple(table.shape)}, stride {table.stride()}; cos and sin must both be contiguous "
                "(positions, rotated width / 2)"
            )
        if not 1 <= 2 * table.shape[1] <= q.shape[3]:
            raise ValueError(f"{name}: {table.shape[1]} columns rotate more than a head's width of {q.shape[3]}")
        if table.dtype != cos.dtype:
            raise ValueError(f"sin: dtype {sin.dtype} differs from cos's {cos.dtype}")
    if positions is None:
        if q.shape[1] > cos.shape[0]:
            raise ValueError(f"cos: has {cos.shape[0]} positions, but the sequence has {q.shape[1]}")
        return
    check_device("positions", positions)
    if positions.dtype not in (torch.int32, torch.int64) or positions.device != q.device:
        raise ValueError(f"positions: {positions.dtype} on {positions.device}; use int32 or int64 beside q")
    if tuple(positions.shape) not in {tuple(q.shape[:2]), (1, q.shape[1]), (q.shape[1],)}:
        raise ValueError(
            f"positions: shape {tuple(positions.shape)}; use (batch, sequence), (1, sequence) or (sequence,)"
        )


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    backward: bool,
) -> None:
    batch, sequence, q_heads, _ = q.shape
    if batch * sequence == 0 or q.numel() + k.numel() == 0:
        return
    half = cos.shape[1]
    position_strides = (0, 0)
    if positions is not None:
        rows = positions.expand(batch, sequence)
        position_strides = (rows.stride(0), rows.stride(1))
    k_heads = k.shape[2]
    with on_device_of(q):
        _rope_kernel[(batch * sequence,)](
            q,
            k,
            q_out,
            k_out,
            cos,
            sin,
            cos if positions is None else positions,
            sequence,
            cos.shape[0],
            *q.stride()[:3],
            *k.stride()[:3],
            *q_out.stride()[:3],
            *k_out.stride()[:3],
            *position_strides,
            HAS_POSITIONS=positions is not None,
            BACKWARD=backward,
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            HALF=half,
            BLOCK_Q=triton.next_power_of_2(q_heads),
            BLOCK_K=triton.next_power_of_2(k_heads),
            BLOCK=triton.next_power_of_2(half),
            num_warps=warps_for(q_heads, k_heads, half, q.element_size()),
        )


def rope_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k in place and return them.

    q, k       (batch, sequence, heads, head width), any strides but a last one of 1; the heads of q and k may differ
    cos, sin   (table positions, rotated width / 2), contiguous, the dtype of q or float32; a rotated width below the
               head width leaves the rest of each head alone
    positions  (batch, sequence), (1, sequence) or (sequence,), int32 or int64; None counts from 0

    A position outside the tables gives NaN. Raises ValueError naming the argument that is not supported.
    """
    _check(q, k, cos, sin, positions)
    _launch(q, k, q, k, cos, sin, positions, backward=False)
    return q, k


def rope_backward(
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the gradients back, in place, and return them; arguments as `rope_forward`."""
    _check(grad_q, grad_k, cos, sin, positions)
    _launch(grad_q, grad_k, grad_q, grad_k, cos, sin, positions, backward=True)
    return grad_q, grad_k


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor | None,
        inplace: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin, positions)
        if inplace:
            ctx.mark_dirty(q, k)
            return rope_forward(q, k, cos, sin, positions)
        _check(q, k, cos, sin, positions)
        outputs = _beside(q, cos), _beside(k, cos)
        _launch(q, k, *outputs, cos, sin, positions, backward=False)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, positions = ctx.saved_tensors
        sources = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in (grad_q, grad_k)]
        _check(*sources, cos, sin, positions)
        # Written beside, not over, the incoming gradients: others may hold them. The bytes are the same.
        grads = [_beside(grad, cos) for grad in sources]
        _launch(*sources, *grads, cos, sin, positions, backward=True)
        return grads[0], grads[1], None, None, None, None


def _beside(heads: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """A tensor for the result, laid out as `heads`; it holds their values where nothing is rotated."""
    return torch.empty_like(heads) if 2 * cos.shape[1] == heads.shape[-1] else heads.clone()


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    inplace: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope_forward` with a gradient. In place, neither q nor k may be a leaf that requires grad."""
    q_out, k_out = _Rope.apply(q, k, cos, sin, positions, inplace)
    return q_out, k_out
