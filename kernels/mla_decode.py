"""Attention of one new token a sequence over compressed latents (multi-head latent attention, absorbed form).

    out[b, h] = softmax((q[b, h, :R] · c_b ᵀ + q[b, h, R:] · r_bᵀ) · scale) · c_b

The cache of a sequence is one row a position, (R latent | Q rotary) numbers that all heads share, and the latents are
keys and values at once (DeepSeek-V2, 2024, section 2.1 and appendix B): they are read once and used in two products.

Bytes: context · (R + Q) · itemsize a sequence, for all heads together. With H heads each of these numbers meets about
4·H FLOPs, so at 128 heads arithmetic and memory bind at about the same time, and below that memory does.

Design. One program per sequence, block of heads and split of the context. A block of at most 64 heads keeps its output
(R numbers a head) in registers; blocks of one sequence are neighbours in the grid and find the latents in the L2. The
context is split and merged as in :mod:`kernels.paged_attention`.

A tile of latents lies in shared memory and is an operand of both products. With few heads these can be taken the other
way round (``turned``): positions, then latent numbers, are the rows, and heads the columns. 64 rows are what Hopper's
asynchronous product takes from shared memory; 16 rows of heads would be held, whole, by each warp's registers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kernels._rows import check_float, multiprocessors, on_device_of
from kernels.paged_attention import MAX_SPLITS, choose_splits, merge_splits_kernel, overlapped


class Launch(NamedTuple):
    """The shape of one launch, by number of heads; the one place to tune."""

    heads: int  # of a block
    tile: int  # context positions reduced at a time
    warps: int
    stages: int
    programs: int  # resident on a multiprocessor at once
    turned: bool = False  # heads are the columns of both products


def launch_shape(heads: int, itemsize: int) -> Launch:
    """A block of 64 heads has 128 KiB of output to hold, which takes the registers of eight warps."""
    if heads <= 16:
        return Launch(16, 64, 8, 3, 1) if itemsize <= 2 else Launch(16, 16, 4, 2, 2)
    if heads <= 32:
        return Launch(32, 32 if itemsize <= 2 else 16, 8, 2, 1)
    return Launch(64, 32, 8, 4, 1) if itemsize <= 2 else Launch(64, 16, 8, 2, 1)


@triton.jit
def mla_decode_kernel(
    q_ptr, cache_ptr, lengths_ptr, out_ptr, lse_ptr, q_stride, cache_batch_stride, cache_stride, heads, splits,
    scale_log2,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr,
    TURNED: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """One split of one sequence for one block of heads."""
    if OVERLAPPED:
        gdc_launch_dependents()
    block = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    share = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    start = split * share
    stop = tl.minimum(length, start + share)

    head = block * HEADS + tl.arange(0, HEADS)
    latent = tl.arange(0, LATENT_PAD)
    rope = tl.arange(0, ROPE_PAD)
    real = head < heads
    in_latent = latent < LATENT
    in_rope = rope < ROPE
    q = q_ptr + row * q_stride + head[:, None] * (LATENT + ROPE)
    q_latent = tl.load(q + latent[None, :], mask=real[:, None] & in_latent[None, :], other=0.0)
    q_rope = tl.load(q + LATENT + rope[None, :], mask=real[:, None] & in_rope[None, :], other=0.0)

    cache = cache_ptr + row * cache_batch_stride
    acc = tl.zeros([LATENT_PAD, HEADS], tl.float32) if TURNED else tl.zeros([HEADS, LATENT_PAD], tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    for begin in tl.range(start, stop, TILE):
        place = begin + tl.arange(0, TILE)
        seen = place < stop
        cell = cache + place.to(tl.int64)[:, None] * cache_stride
        c = tl.load(cell + latent[None, :], mask=seen[:, None] & in_latent[None, :], other=0.0)
        r = tl.load(cell + LATENT + rope[None, :], mask=seen[:, None] & in_rope[None, :], other=0.0)
        if TURNED:
            scores = tl.dot(c, q_latent.T, input_precision="ieee" if EXACT else "tf32")
            scores = tl.dot(r, q_rope.T, scores, input_precision="ieee" if EXACT else "tf32") * scale_log2
            scores = tl.where(seen[:, None], scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 0))
            p = tl.exp2(scores - new_largest[None, :])
            alpha = tl.exp2(largest - new_largest)
            total = total * alpha + tl.sum(p, 0)
            acc = tl.dot(c.T, p.to(c.dtype), acc * alpha[None, :], input_precision="ieee" if EXACT else "tf32")
        else:
            scores = tl.dot(q_latent, c.T, input_precision="ieee" if EXACT else "tf32")
            scores = tl.dot(q_rope, r.T, scores, input_precision="ieee" if EXACT else "tf32") * scale_log2
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            p = tl.exp2(scores - new_largest[:, None])
            alpha = tl.exp2(largest - new_largest)
            total = total * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(c.dtype), c, acc * alpha[:, None], input_precision="ieee" if EXACT else "tf32")
        largest = new_largest

    if TURNED:
        acc = tl.trans(acc)
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    out_row = row * heads + head
    if SPLIT:
        out_row = out_row * splits + split
        lse = tl.where(empty, float("-inf"), largest + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(lse_ptr + out_row, lse, mask=real)
    tl.store(
        out_ptr + out_row[:, None] * LATENT + latent[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & in_latent[None, :],
    )


def mla_decode(
    q_BHX: torch.Tensor,
    cache_BCX: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    latent: int,
    scale: float,
    splits: int | None = None,
) -> torch.Tensor:
    """The heads' mixtures of latents, (B, H, R) in the dtype of the queries; zeros for a sequence of length 0.

    Args:
        q_BHX: queries carried into the latents' space, then the rotary part: X = R + Q; contiguous.
        cache_BCX: latents and rotary keys of every position, in the queries' dtype; rows contiguous.
        lengths_B: int32, positions that each sequence attends to, at most C.
        latent: R, up to 512. scale: of the scores, which belongs to the model's head width, not to R.
        splits: programs a sequence and block of heads; chosen for the chip when None.

    Raises:
        ValueError: a shape, stride, dtype or device outside what is said here; the argument is named.
    """
    check_float("q", q_BHX)
    if q_BHX.ndim != 3 or not q_BHX.is_contiguous():
        raise ValueError(f"q: shape {tuple(q_BHX.shape)}, strides {q_BHX.stride()}; contiguous (B, heads, R + Q)")
    batch, heads, width = q_BHX.shape
    if cache_BCX.ndim != 3 or cache_BCX.shape[0] != batch or cache_BCX.shape[2] != width or cache_BCX.stride(2) != 1:
        raise ValueError(
            f"cache: shape {tuple(cache_BCX.shape)}, strides {cache_BCX.stride()}; ({batch}, positions, {width}) needed"
        )
    if cache_BCX.dtype != q_BHX.dtype or cache_BCX.device != q_BHX.device:
        raise ValueError(f"cache: {cache_BCX.dtype} on {cache_BCX.device} does not go with queries in {q_BHX.dtype}")
    if not 1 <= latent < width or latent > 512:
        raise ValueError(f"latent: {latent}; it must be at most 512 and leave a rotary part of the {width} numbers")
    if lengths_B.dtype != torch.int32 or tuple(lengths_B.shape) != (batch,) or lengths_B.device != q_BHX.device:
        raise ValueError(f"lengths: {lengths_B.dtype} {tuple(lengths_B.shape)}; int32 ({batch},) is needed")
    shape = launch_shape(heads, q_BHX.element_size())
    blocks = triton.cdiv(heads, shape.heads)
    if splits is None:
        rows, chip = max(1, batch * blocks), multiprocessors(q_BHX.device)
        splits = choose_splits(rows, cache_BCX.shape[1], chip, shape.tile, shape.programs, shape.programs)
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits: {splits} is not between 1 and {MAX_SPLITS}")
    out = torch.empty(batch, heads, latent, dtype=q_BHX.dtype, device=q_BHX.device)
    if not batch:
        return out
    target, lse = out, None
    if splits > 1:
        target = torch.empty(batch, heads, splits, latent, dtype=torch.float32, device=q_BHX.device)
        lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=q_BHX.device)
    padded = max(16, triton.next_power_of_2(latent))
    overlap = overlapped(q_BHX.device) and splits > 1
    with on_device_of(q_BHX):
        mla_decode_kernel[(blocks, splits, batch)](
            q_BHX, cache_BCX, lengths_B, target, lse,
            q_BHX.stride(0), cache_BCX.stride(0), cache_BCX.stride(1), heads, splits, scale * math.log2(math.e),
            LATENT=latent, LATENT_PAD=padded, ROPE=width - latent,
            ROPE_PAD=max(16, triton.next_power_of_2(width - latent)),
            HEADS=shape.heads, TILE=shape.tile, SPLIT=splits > 1, EXACT=q_BHX.dtype == torch.float32,
            TURNED=shape.turned, OVERLAPPED=overlap,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        if splits > 1:
            merge_splits_kernel[(batch * heads,)](
                target, lse, out, splits,
                WIDTH=latent, WIDTH_PAD=padded, TILE=8, MOST=triton.next_power_of_2(splits),
                OVERLAPPED=overlap, num_warps=4, **({"launch_pdl": True} if overlap else {}),
            )  # fmt: skip
    return out
