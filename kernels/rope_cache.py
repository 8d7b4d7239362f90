"""Rotary positions and the cache write in one pass over a step's queries, keys and values.

    q, k ← rotated by their positions' angles (Su et al., 2021, "RoFormer", section 3.2.2; channel i with i + E/2)
    cache[slot] ← k, v                        (rounded to the cache's dtype; int8 and fp8 divided by their scale)

Done apart these are two rotations that write q and k back, and two scattered copies that read them again: k goes
through memory five times, v three times. Here q and k and v are read once, q and the cache written once.

One program per token and KV head holds the query heads of the group, the key and the value: a few hundred numbers, so
one warp. Angles come from a table of cosines and sines in float32, products are taken in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._rows import check_float, on_device_of
from kernels.paged_attention import check_cache, check_scales


@triton.jit
def rope_cache_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, k_cache_ptr, v_cache_ptr,
    k_scale_ptr, v_scale_ptr, q_out_ptr,
    q_stride, k_stride, v_stride, q_out_stride, k_cache_stride, v_cache_stride,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    QUANTIZED: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    """One token and KV head. A negative slot is padding: its query is rotated, nothing is written to the cache."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, HALF_PAD)
    in_half = half < HALF
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_ptr + position * HALF + half, mask=in_half, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + half, mask=in_half, other=0.0)

    group = tl.arange(0, GROUP_PAD)
    mask = (group < GROUP)[:, None] & in_half[None, :]
    in_q = (head * GROUP + group)[:, None] * (2 * HALF) + half[None, :]
    q = q_ptr + token * q_stride + in_q
    low = tl.load(q, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(q + HALF, mask=mask, other=0.0).to(tl.float32)
    q_out = q_out_ptr + token * q_out_stride + in_q
    out_type = q_out_ptr.dtype.element_ty
    tl.store(q_out, (low * cos[None, :] - high * sin[None, :]).to(out_type), mask=mask)
    tl.store(q_out + HALF, (high * cos[None, :] + low * sin[None, :]).to(out_type), mask=mask)

    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        k = k_ptr + token * k_stride + head * (2 * HALF) + half
        v = v_ptr + token * v_stride + head * (2 * HALF) + half
        low_k = tl.load(k, mask=in_half, other=0.0).to(tl.float32)
        high_k = tl.load(k + HALF, mask=in_half, other=0.0).to(tl.float32)
        turned_low = low_k * cos - high_k * sin
        turned_high = high_k * cos + low_k * sin
        low_v = tl.load(v, mask=in_half, other=0.0).to(tl.float32)
        high_v = tl.load(v + HALF, mask=in_half, other=0.0).to(tl.float32)
        if QUANTIZED:
            # The attention kernel would have seen the rotated key rounded to the model's dtype first.
            k_scale = 1.0 / tl.load(k_scale_ptr + head)
            v_scale = 1.0 / tl.load(v_scale_ptr + head)
            turned_low, turned_high = turned_low * k_scale, turned_high * k_scale
            low_v, high_v = low_v * v_scale, high_v * v_scale
            if INTEGER:
                turned_low, turned_high = _to_int8(turned_low), _to_int8(turned_high)
                low_v, high_v = _to_int8(low_v), _to_int8(high_v)
            else:
                turned_low, turned_high = _within_fp8(turned_low), _within_fp8(turned_high)
                low_v, high_v = _within_fp8(low_v), _within_fp8(high_v)
        kind = k_cache_ptr.dtype.element_ty
        in_page = (head * PAGE + slot % PAGE) * (2 * HALF) + half
        k_cell = k_cache_ptr + slot // PAGE * k_cache_stride + in_page
        v_cell = v_cache_ptr + slot // PAGE * v_cache_stride + in_page
        tl.store(k_cell, turned_low.to(kind), mask=in_half)
        tl.store(k_cell + HALF, turned_high.to(kind), mask=in_half)
        tl.store(v_cell, low_v.to(kind), mask=in_half)
        tl.store(v_cell + HALF, high_v.to(kind), mask=in_half)


@triton.jit
def _to_int8(x):
    """Rounded to the nearest integer of -127 to 127, halves away from zero."""
    x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return tl.where(x >= 0, tl.floor(x + 0.5), tl.ceil(x - 0.5))


@triton.jit
def _within_fp8(x):
    """Saturated to the largest finite number of e4m3, which has no infinity."""
    return tl.minimum(tl.maximum(x, -448.0), 448.0)


def rope_cache(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    cos_LF: torch.Tensor,
    sin_LF: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    k_NKPE: torch.Tensor,
    v_NKPE: torch.Tensor,
    *,
    k_scale_K: torch.Tensor | None = None,
    v_scale_K: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates queries and keys and puts keys and values in their slots; the rotated queries, (T, H, E), contiguous.

    Args:
        q_THE, k_TKE, v_TKE: of the step's T tokens; heads contiguous, any stride of T (views of one product).
        cos_LF, sin_LF: float32, contiguous, by position, F = E / 2 angles each.
        positions_T: int64, below L. slots_T: int64, block · P + offset, or negative for padding.
        k_NKPE, v_NKPE: the cache, written in place. k_scale_K, v_scale_K: as in the attention kernel.

    Raises:
        ValueError: a shape, stride, dtype or device outside what is said here; the argument is named.
    """
    check_float("q", q_THE)
    kv_heads, page = check_cache(k_NKPE, v_NKPE, q_THE)
    quantized = check_scales(k_NKPE, k_scale_K, v_scale_K, kv_heads)
    tokens, heads, width = q_THE.shape
    for name, tensor, count in (("q", q_THE, heads), ("k", k_TKE, kv_heads), ("v", v_TKE, kv_heads)):
        if tuple(tensor.shape) != (tokens, count, width) or tensor.dtype != q_THE.dtype:
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}; ({tokens}, {count}, {width}) is needed")
        if tokens and tensor.stride()[1:] != (width, 1):
            raise ValueError(f"{name}: strides {tensor.stride()}; a token's heads must be contiguous")
    for name, table in (("cos", cos_LF), ("sin", sin_LF)):
        if table.dtype != torch.float32 or table.ndim != 2 or table.shape[1] * 2 != width or not table.is_contiguous():
            raise ValueError(f"{name}: {table.dtype} {tuple(table.shape)}; needs float32 (positions, {width // 2})")
    for name, index in (("positions", positions_T), ("slots", slots_T)):
        if index.dtype != torch.int64 or tuple(index.shape) != (tokens,):
            raise ValueError(f"{name}: {index.dtype} {tuple(index.shape)}; int64 ({tokens},) is needed")
    q_out = torch.empty(tokens, heads, width, dtype=q_THE.dtype, device=q_THE.device)
    if not tokens:
        return q_out
    group, half = heads // kv_heads, width // 2
    with on_device_of(q_THE):
        rope_cache_kernel[(tokens, kv_heads)](
            q_THE, k_TKE, v_TKE, cos_LF, sin_LF, positions_T, slots_T, k_NKPE, v_NKPE, k_scale_K, v_scale_K, q_out,
            q_THE.stride(0), k_TKE.stride(0), v_TKE.stride(0), q_out.stride(0), k_NKPE.stride(0), v_NKPE.stride(0),
            GROUP=group, GROUP_PAD=triton.next_power_of_2(group), PAGE=page,
            HALF=half, HALF_PAD=triton.next_power_of_2(half),
            QUANTIZED=quantized, INTEGER=k_NKPE.dtype == torch.int8, num_warps=1,
        )  # fmt: skip
    return q_out
