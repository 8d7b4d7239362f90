"""Attention of chunks of new tokens over a paged key-value cache (prefill, whole or in chunks).

Each sequence brings some new tokens, whose keys and values are in its blocks already; each of them attends to every
position up to its own:

    out[t, h] = softmax(q[t, h] · K_b[:p+1]ᵀ · scale) · V_b[:p+1],    p = length_b - new_b + (t - start_b)

Chunks of different sequences lie one after another in one tensor (Agrawal et al., OSDI 2024, "Sarathi-Serve").

Design. One program per tile of queries, KV head and sequence. A tile holds rows of (new token, query head of the
KV head's group), so that the keys are read once for the whole group. Keys are always reduced in the same order from
position 0 on, in tiles of one size: what a row computes does not depend on how its prompt was cut into chunks, on its
place in the tile, nor on its neighbours. A tile whose keys all rows see is not masked.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels._rows import check_float, on_device_of
from kernels.paged_attention import check_cache, check_scales, check_tables


@triton.jit
def paged_prefill_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, lengths_ptr, starts_ptr, k_scale_ptr, v_scale_ptr, out_ptr,
    q_stride, out_stride, tables_stride, k_stride, v_stride, scale_log2,
    GROUP: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, QUANTIZED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """ROWS rows of TOKENS new tokens; row r is token r // GROUP and head r % GROUP of the group."""
    sequence = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(starts_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - first
    tile = tl.program_id(0)
    if tile * TOKENS >= new:
        return
    length = tl.load(lengths_ptr + sequence)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH_PAD)
    in_width = column < WIDTH
    token = tile * TOKENS + row // GROUP
    real = (row < TOKENS * GROUP) & (token < new)
    position = length - new + token
    q_row = (first + token).to(tl.int64)
    in_row = (head * GROUP + row % GROUP) * WIDTH
    mask = real[:, None] & in_width[None, :]
    q = tl.load(q_ptr + (q_row * q_stride + in_row)[:, None] + column[None, :], mask=mask, other=0.0)
    if QUANTIZED:
        scale_log2 *= tl.load(k_scale_ptr + head)

    # Every row sees the keys up to the first token's position; the last token's row sees the most.
    everyone = length - new + tile * TOKENS + 1
    stop = tl.minimum(length, length - new + (tile + 1) * TOKENS)

    table = tables_ptr + sequence * tables_stride
    k_head = k_ptr + head * PAGE * WIDTH
    v_head = v_ptr + head * PAGE * WIDTH
    acc = tl.zeros([ROWS, WIDTH_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for begin in tl.range(0, stop, TILE):
        place = begin + tl.arange(0, TILE)
        inside = place < stop
        block = tl.load(table + place // PAGE, mask=inside, other=0).to(tl.int64)
        offset = place % PAGE * WIDTH
        k = tl.load(
            k_head + (block * k_stride + offset)[:, None] + column[None, :],
            mask=inside[:, None] & in_width[None, :],
            other=0.0,
        )
        if QUANTIZED:
            k = k.to(q.dtype)
        scores = tl.dot(q, k.T, input_precision="ieee" if EXACT else "tf32") * scale_log2
        if begin + TILE > everyone:
            scores = tl.where(place[None, :] <= position[:, None], scores, float("-inf"))
        # Position 0 is in the first tile and every row sees it, so the maximum is finite from there on.
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp2(scores - new_largest[:, None])
        alpha = tl.exp2(largest - new_largest)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = tl.load(
            v_head + (block * v_stride + offset)[:, None] + column[None, :],
            mask=inside[:, None] & in_width[None, :],
            other=0.0,
        )
        if QUANTIZED:
            v = v.to(q.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee" if EXACT else "tf32")
        largest = new_largest

    acc = acc / total[:, None]
    if QUANTIZED:
        acc *= tl.load(v_scale_ptr + head)
    out = out_ptr + (q_row * out_stride + in_row)[:, None] + column[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def tile_shape(group: int, width: int, widest: int, itemsize: int) -> tuple[int, int, int, int]:
    """Rows, key tile, warps and stages; the one place to tune. Short chunks take the least tile that holds them."""
    rows = max(16, min(128 if width <= 128 else 64, triton.next_power_of_2(group * widest)))
    rows = max(rows, triton.next_power_of_2(group))
    tile = 64 if itemsize <= 2 else 32
    return rows, tile, 8 if rows >= 128 else 4, 3 if itemsize <= 2 else 2


def paged_prefill(
    q_THE: torch.Tensor,
    k_NKPE: torch.Tensor,
    v_NKPE: torch.Tensor,
    tables_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    starts_B1: torch.Tensor,
    *,
    widest: int,
    scale: float | None = None,
    rows: int | None = None,
    k_scale_K: torch.Tensor | None = None,
    v_scale_K: torch.Tensor | None = None,
    out_THE: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output (T, H, E) in the dtype of the queries; rows of T that belong to no sequence are not written.

    Args:
        q_THE: queries of all chunks, one sequence after another, contiguous but for the stride of T.
        k_NKPE, v_NKPE, k_scale_K, v_scale_K: the cache; see :func:`kernels.paged_attention.paged_decode`.
        tables_BM, lengths_B: int32, block tables and positions in the cache, the new tokens included.
        starts_B1: int32, the first row of each sequence and, last, the end of the last one.
        widest: the most new tokens of one sequence, on the host.
        scale: of the scores; E ** -0.5 when None.
        rows: size of a query tile; a caller that wants the same numbers to the bit in every batch fixes it.
        out_THE: where to write; a new tensor when None.

    Raises:
        ValueError: a shape, stride, dtype or device outside what is said here; the argument is named.
    """
    check_float("q", q_THE)
    if q_THE.ndim != 3 or (q_THE.numel() and q_THE.stride()[1:] != (q_THE.shape[2], 1)):
        raise ValueError(f"q: shape {tuple(q_THE.shape)}, strides {q_THE.stride()}; it must be (tokens, heads, width)")
    kv_heads, page = check_cache(k_NKPE, v_NKPE, q_THE)
    sequences = lengths_B.shape[0]
    check_tables(tables_BM, lengths_B, sequences, q_THE.device)
    if starts_B1.dtype != torch.int32 or tuple(starts_B1.shape) != (sequences + 1,):
        raise ValueError(f"starts: {starts_B1.dtype} {tuple(starts_B1.shape)}; int32 ({sequences + 1},) is needed")
    quantized = check_scales(k_NKPE, k_scale_K, v_scale_K, kv_heads)
    _, heads, width = q_THE.shape
    out = torch.empty_like(q_THE, memory_format=torch.contiguous_format) if out_THE is None else out_THE
    if out.shape != q_THE.shape or out.dtype != q_THE.dtype or out.stride()[1:] != (width, 1):
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)} with strides {out.stride()} does not go with q")
    if not sequences or widest < 1:
        return out
    group = heads // kv_heads
    found, tile, warps, stages = tile_shape(group, width, widest, q_THE.element_size())
    rows = found if rows is None else rows
    if rows < max(16, group) or rows & (rows - 1):
        raise ValueError(f"rows: {rows}; a power of two of at least 16 and of the {group} heads of a group is needed")
    tokens = rows // group
    with on_device_of(q_THE):
        paged_prefill_kernel[(triton.cdiv(widest, tokens), kv_heads, sequences)](
            q_THE, k_NKPE, v_NKPE, tables_BM, lengths_B, starts_B1, k_scale_K, v_scale_K, out,
            q_THE.stride(0), out.stride(0), tables_BM.stride(0), k_NKPE.stride(0), v_NKPE.stride(0),
            (width**-0.5 if scale is None else scale) * math.log2(math.e),
            GROUP=group, PAGE=page, WIDTH=width, WIDTH_PAD=max(16, triton.next_power_of_2(width)),
            ROWS=rows, TOKENS=tokens, TILE=tile, QUANTIZED=quantized, EXACT=q_THE.dtype == torch.float32,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out
