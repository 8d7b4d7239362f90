"""Attention of one new token a sequence over a paged key-value cache (decode).

    out[b, h] = softmax(q[b, h] · K_b[kv(h)]ᵀ · scale) · V_b[kv(h)]

K_b and V_b lie in blocks of P slots that the block table of sequence b lists in order (Kwon et al., SOSP 2023,
"PagedAttention", section 4.1). A page holds one head's slots next to each other, (blocks, KV heads, P, E), so that a
page is one stream of P · E numbers.

Bytes through device memory: 2 · context · E · itemsize for each sequence and KV head, each read once; all query heads
of a KV head share one program, since otherwise the cache would be read once for every one of them. The rest (queries,
outputs, partial results, tables) is below 1 % from contexts of 1,000 on. At 4.2 TB/s a batch of 32 with 4,096 tokens,
8 KV heads of 128 in bfloat16 (537 MB) takes 128 µs; nothing here is bound by arithmetic.

Design. One program per sequence, KV head and split of the context: 16 rows of queries (padded; the tensor core's
least) against tiles of keys, softmax online in base 2. The heads of one sequence are neighbours in the grid, so that
a page's heads, which are neighbours in memory, are read at about the same time. Loads of the next tiles are in flight
while the present one is reduced (``num_stages``). When sequences times KV heads do not fill the chip, the context is
split, each split writes a partial result with its logarithm of the sum, and a second kernel merges them
("Flash-Decoding", Dao et al., 2023). How the context is cut depends on the batch unless ``splits`` is given, so that
a caller can have results that do not depend on the batch.

An 8-bit cache (int8, float8_e4m3fn) carries one scale a KV head for keys and one for values; it is widened in
registers, and the scales meet scores and output, not every element. Widening is what binds there, so float8 goes to
float16, one conversion where bfloat16 takes two: its numbers are float16 numbers too, and a row of queries is divided
by its largest magnitude first, so that it keeps its bits. int8 to bfloat16 takes a few bit operations, no conversion.
The second product wants values transposed, and shared memory transposes nothing narrower than 16 bits but byte by byte:
values are read as pairs of neighbouring columns (PAIRED), and even and odd columns are products of their own.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._rows import INTERPRETED, check_device, check_float, multiprocessors, on_device_of

CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
BLOCK_SIZES = (16, 256)
MAX_SPLITS = 128
#: Whether the merge is launched while the splits still run, and waits on the device for their end (from Hopper on).
OVERLAP = False
_MERGE_TILE = 16


class Launch(NamedTuple):
    """The shape of one launch, by head width and cache element; the one place to tune."""

    tile: int  # context positions reduced at a time
    warps: int
    stages: int  # tiles in flight
    programs: int  # that a multiprocessor needs to have all the loads in flight that it can use
    resident: int  # that fit on one at a time


def launch_shape(width: int, itemsize: int, rows: float = 0.0) -> Launch:
    """Tiles of about 16 KiB of keys and as much of values, for ``rows`` sequences times KV heads a multiprocessor.

    A tile's addresses come from the block table, so its loads wait for another load: the compiler spends part of the
    stages on the table, and five of them buffer two tiles (72 KiB of shared memory at a width of 128). Two programs
    have 128 KiB in flight, more than latency times bandwidth; further splits would only add starts and merges. Three
    fit beside each other. Where there are more rows than that, four programs with one tile less in flight were measured
    ahead, since they need no splits.
    """
    padded = triton.next_power_of_2(width)
    tile = max(16, min(128, 16_384 // (padded * itemsize)))
    if rows > 3 and itemsize > 1:
        return Launch(tile=tile, warps=4, stages=4, programs=3, resident=4)
    return Launch(tile=tile, warps=4, stages=5, programs=2, resident=3)


@lru_cache(maxsize=4096)
def choose_splits(rows: int, longest: int, multiprocessors: int, tile: int, programs: int, resident: int) -> int:
    """How many programs share one sequence and KV head.

    The fewest that keep the chip within a tenth of the best use that any number would reach. Programs that are all
    resident share the bandwidth, and the multiprocessor that has most of them ends last; of more than fit at a time the
    last wave has too few loads in flight, so that it should be nearly full. No split is shorter than four tiles, so
    that its start and its merge stay small beside it. Remembered, since a search in Python takes as long as a small
    launch.
    """
    most = max(1, min(MAX_SPLITS, longest // (4 * tile)))

    def use(splits: int) -> float:
        each = rows * splits / multiprocessors
        if each <= programs:
            return each / programs
        per = 1 if each <= resident else resident
        return each / per / math.ceil(each / per)

    best = max(use(s) for s in range(1, most + 1))
    return next(s for s in range(1, most + 1) if use(s) >= 0.9 * best)


@triton.jit
def _even(pairs, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Of pairs of 8-bit numbers in int16 the first of each, widened."""
    return (pairs & 0xFF).to(tl.int8).to(KIND, bitcast=True).to(DTYPE)


@triton.jit
def _odd(pairs, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The second of each."""
    return (pairs >> 8).to(tl.int8).to(KIND, bitcast=True).to(DTYPE)


@triton.jit
def paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, lengths_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr,
    q_stride, tables_stride, k_stride, v_stride, splits, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, PAGE: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, TILE: tl.constexpr,
    QUANTIZED: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr, PAIRED: tl.constexpr = False,
    OVERLAPPED: tl.constexpr = False,
):  # fmt: skip
    """One split of one sequence and KV head. Strides are in elements; q and out are (B, heads, E), contiguous heads."""
    if OVERLAPPED:
        gdc_launch_dependents()
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)

    length = tl.load(lengths_ptr + row)
    # Whole tiles for every split but the last; a split beyond the context has nothing and says so.
    share = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    start = split * share
    stop = tl.minimum(length, start + share)

    group = tl.arange(0, GROUP_PAD)
    column = tl.arange(0, WIDTH_PAD)
    in_group = group < GROUP
    in_width = column < WIDTH
    q_heads = head * GROUP + group
    q = tl.load(
        q_ptr + row * q_stride + q_heads[:, None] * WIDTH + column[None, :],
        mask=in_group[:, None] & in_width[None, :],
        other=0.0,
    )
    if QUANTIZED:
        scale_log2 *= tl.load(k_scale_ptr + head)
    if k_ptr.dtype.element_ty == tl.float8e4nv and not EXACT:
        size = tl.max(tl.abs(q.to(tl.float32)), 1)[:, None]
        size = tl.where(size > 0.0, size, 1.0)
        q = (q.to(tl.float32) / size).to(tl.float16)
        factor = size * scale_log2
    else:
        factor = scale_log2

    table = tables_ptr + row * tables_stride
    k_head = k_ptr + head * PAGE * WIDTH
    v_head = v_ptr + head * PAGE * WIDTH
    pair = tl.arange(0, WIDTH_PAD // 2)
    acc = tl.zeros([GROUP_PAD, WIDTH_PAD // 2 if PAIRED else WIDTH_PAD], tl.float32)
    acc_odd = acc
    total = tl.zeros([GROUP_PAD], tl.float32)
    largest = tl.full([GROUP_PAD], float("-inf"), tl.float32)

    for begin in tl.range(start, stop, TILE):
        place = begin + tl.arange(0, TILE)
        seen = place < stop
        block = tl.load(table + place // PAGE, mask=seen, other=0).to(tl.int64)
        offset = place % PAGE * WIDTH
        k = tl.load(
            k_head + (block * k_stride + offset)[:, None] + column[None, :],
            mask=seen[:, None] & in_width[None, :],
            other=0.0,
        )
        if QUANTIZED:
            k = k.to(q.dtype)
        scores = tl.dot(q, k.T, input_precision="ieee" if EXACT else "tf32") * factor
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp2(scores - new_largest[:, None])
        alpha = tl.exp2(largest - new_largest)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        # Slots that were never written may hold anything: they are read as zeros, for 0 · NaN is NaN.
        v_rows = v_head + (block * v_stride + offset)[:, None]
        if PAIRED:
            pairs = tl.load(
                v_rows.to(tl.pointer_type(tl.int16)) + pair[None, :],
                mask=seen[:, None] & (pair < WIDTH // 2)[None, :],
                other=0,
            )
            weights = p.to(q.dtype)
            acc_odd = acc_odd * alpha[:, None]
            acc = tl.dot(weights, _even(pairs, v_ptr.dtype.element_ty, q.dtype), acc)
            acc_odd = tl.dot(weights, _odd(pairs, v_ptr.dtype.element_ty, q.dtype), acc_odd)
        else:
            v = tl.load(v_rows + column[None, :], mask=seen[:, None] & in_width[None, :], other=0.0)
            if QUANTIZED:
                v = v.to(q.dtype)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee" if EXACT else "tf32")
        largest = new_largest

    if PAIRED:
        acc = tl.join(acc, acc_odd).reshape(GROUP_PAD, WIDTH_PAD)
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    if QUANTIZED:
        acc *= tl.load(v_scale_ptr + head)
    out_row = (row * KV_HEADS + head) * GROUP + group
    if SPLIT:
        out_row = out_row * splits + split
        lse = tl.where(empty, float("-inf"), largest + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(lse_ptr + out_row, lse, mask=in_group)
    tl.store(
        out_ptr + out_row[:, None] * WIDTH + column[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=in_group[:, None] & in_width[None, :],
    )


@triton.jit
def merge_splits_kernel(
    partial_ptr, lse_ptr, out_ptr, splits,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr,
    OVERLAPPED: tl.constexpr = False,
):  # fmt: skip
    """Weighs the partial results of one query head by their share of the softmax's sum; always in the same order."""
    if OVERLAPPED:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    every = tl.arange(0, MOST)
    all_lse = tl.load(lse_ptr + row * splits + every, mask=every < splits, other=float("-inf"))
    largest = tl.max(all_lse, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(all_lse - largest), 0)
    acc = tl.zeros([WIDTH_PAD], tl.float32)
    for start in tl.range(0, splits, TILE):
        split = start + tl.arange(0, TILE)
        lse = tl.load(lse_ptr + row * splits + split, mask=split < splits, other=float("-inf"))
        partial = tl.load(
            partial_ptr + (row * splits + split)[:, None] * WIDTH + column[None, :],
            mask=(split < splits)[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        acc += tl.sum(partial * tl.exp2(lse - largest)[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * WIDTH + column, acc.to(out_ptr.dtype.element_ty), mask=column < WIDTH)


def paged_decode(
    q_BHE: torch.Tensor,
    k_NKPE: torch.Tensor,
    v_NKPE: torch.Tensor,
    tables_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float | None = None,
    longest: int | None = None,
    splits: int | None = None,
    k_scale_K: torch.Tensor | None = None,
    v_scale_K: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output (B, H, E) in the dtype of the queries; zeros for a sequence of length 0.

    Args:
        q_BHE: queries, float32, float16 or bfloat16, contiguous but for the stride of B.
        k_NKPE, v_NKPE: the cache, N blocks of P slots (a power of two from 16 to 256), in the queries' dtype, int8
            or float8_e4m3fn; contiguous but for the stride of N.
        tables_BM: int32, the blocks of each sequence in order; entries beyond its length are not read.
        lengths_B: int32, positions that each sequence attends to.
        scale: of the scores; E ** -0.5 when None.
        longest: the largest length that may occur, on the host: it only decides how the context is split. The width
            of the tables when None.
        splits: programs a sequence and KV head; chosen for the chip when None.
        k_scale_K, v_scale_K: float32, one scale a KV head, required by an 8-bit cache and refused by another.

    Raises:
        ValueError: a shape, stride, dtype or device outside what is said here; the argument is named.
    """
    batch, heads, width = _check_query(q_BHE)
    kv_heads, page = check_cache(k_NKPE, v_NKPE, q_BHE)
    check_tables(tables_BM, lengths_B, batch, q_BHE.device)
    quantized = check_scales(k_NKPE, k_scale_K, v_scale_K, kv_heads)
    rows, chip = max(1, batch * kv_heads), multiprocessors(q_BHE.device)
    shape = launch_shape(width, k_NKPE.element_size(), rows / chip if splits is None else 0.0)
    if splits is None:
        context = tables_BM.shape[1] * page if longest is None else longest
        splits = choose_splits(rows, context, chip, shape.tile, shape.programs, shape.resident)
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits: {splits} is not between 1 and {MAX_SPLITS}")
    out = torch.empty(batch, heads, width, dtype=q_BHE.dtype, device=q_BHE.device)
    if not batch:
        return out
    if splits > 1:
        target = torch.empty(batch, heads, splits, width, dtype=torch.float32, device=q_BHE.device)
        lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=q_BHE.device)
    else:
        target, lse = out, None
    group, padded = heads // kv_heads, triton.next_power_of_2(width)
    overlap = overlapped(q_BHE.device) and splits > 1
    with on_device_of(q_BHE):
        paged_decode_kernel[(kv_heads, splits, batch)](
            q_BHE, k_NKPE, v_NKPE, tables_BM, lengths_B, k_scale_K, v_scale_K, target, lse,
            q_BHE.stride(0), tables_BM.stride(0), k_NKPE.stride(0), v_NKPE.stride(0), splits,
            (width**-0.5 if scale is None else scale) * math.log2(math.e),
            KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), PAGE=page,
            WIDTH=width, WIDTH_PAD=max(16, padded), TILE=shape.tile,
            QUANTIZED=quantized, SPLIT=splits > 1, EXACT=q_BHE.dtype == torch.float32,
            PAIRED=quantized and q_BHE.dtype != torch.float32 and _in_pairs(v_NKPE), OVERLAPPED=overlap,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        if splits > 1:
            merge_splits_kernel[(batch * heads,)](
                target, lse, out, splits,
                WIDTH=width, WIDTH_PAD=max(16, padded), TILE=_MERGE_TILE, MOST=triton.next_power_of_2(splits),
                OVERLAPPED=overlap, num_warps=4, **({"launch_pdl": True} if overlap else {}),
            )  # fmt: skip
    return out


def _in_pairs(pages: torch.Tensor) -> bool:
    """Whether every row of an 8-bit cache begins at an even byte and has an even number of columns."""
    return pages.shape[-1] % 2 == 0 and pages.stride(0) % 2 == 0 and pages.data_ptr() % 2 == 0


def overlapped(device: torch.device) -> bool:
    """Whether merges on this device are launched as :data:`OVERLAP` says: it must be a GPU that can."""
    return OVERLAP and not INTERPRETED and torch.cuda.get_device_capability(device)[0] >= 9


def _check_query(q_BHE: torch.Tensor) -> tuple[int, int, int]:
    check_float("q", q_BHE)
    if q_BHE.ndim != 3:
        raise ValueError(f"q: shape {tuple(q_BHE.shape)}; it must be (sequences, heads, width)")
    batch, heads, width = q_BHE.shape
    if batch and (q_BHE.stride(2) != 1 or q_BHE.stride(1) != width):
        raise ValueError(f"q: strides {q_BHE.stride()}; its heads must be contiguous, call .contiguous() first")
    return batch, heads, width


def check_cache(k_NKPE: torch.Tensor, v_NKPE: torch.Tensor, q: torch.Tensor) -> tuple[int, int]:
    """KV heads and slots a block; ValueError unless keys and values are a cache that goes with the queries."""
    for name, pages in (("k", k_NKPE), ("v", v_NKPE)):
        check_device(name, pages)
        if pages.ndim != 4 or pages.shape != k_NKPE.shape:
            raise ValueError(f"{name}: shape {tuple(pages.shape)}; a cache is (blocks, KV heads, slots, width)")
        if pages.dtype not in CACHE_DTYPES or (pages.element_size() > 1 and pages.dtype != q.dtype):
            raise ValueError(f"{name}: dtype {pages.dtype}; use the queries' {q.dtype}, int8 or float8_e4m3fn")
        if pages.dtype != k_NKPE.dtype or pages.device != q.device:
            raise ValueError(f"{name}: {pages.dtype} on {pages.device}; keys, values and queries must go together")
        page, width = pages.shape[2:]
        if pages.stride()[1:] != (page * width, width, 1):
            raise ValueError(f"{name}: strides {pages.stride()}; the slots of a block must be contiguous")
    _, kv_heads, page, width = k_NKPE.shape
    if width != q.shape[-1] or q.shape[-2] % kv_heads:
        raise ValueError(
            f"q: {q.shape[-2]} heads of {q.shape[-1]} do not go with a cache of {kv_heads} heads of {width}"
        )
    if page & (page - 1) or not BLOCK_SIZES[0] <= page <= BLOCK_SIZES[1]:
        raise ValueError(f"k: blocks of {page} slots are not supported; use a power of two from 16 to 256")
    return kv_heads, page


def check_tables(tables_BM: torch.Tensor, lengths_B: torch.Tensor, batch: int, device: torch.device) -> None:
    """ValueError unless there is one table row and one length for each sequence."""
    for name, tensor, ndim in (("tables", tables_BM, 2), ("lengths", lengths_B, 1)):
        if tensor.dtype != torch.int32 or tensor.device != device:
            raise ValueError(f"{name}: {tensor.dtype} on {tensor.device}; it must be int32 on {device}")
        if tensor.ndim != ndim or tensor.shape[0] != batch:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)} does not go with {batch} sequences")
    if tables_BM.stride(1) != 1 and tables_BM.shape[1] > 1:
        raise ValueError(f"tables: stride {tables_BM.stride()}; rows must be contiguous, call .contiguous() first")


def check_scales(
    pages: torch.Tensor, k_scale_K: torch.Tensor | None, v_scale_K: torch.Tensor | None, kv_heads: int
) -> bool:
    """Whether the cache is 8-bit; ValueError unless it then, and only then, has its scales."""
    quantized = pages.element_size() == 1
    for name, scales in (("k_scale", k_scale_K), ("v_scale", v_scale_K)):
        if (scales is not None) != quantized:
            raise ValueError(f"{name}: a cache in {pages.dtype} {'needs' if quantized else 'takes no'} scales")
        if scales is not None and (scales.dtype != torch.float32 or tuple(scales.shape) != (kv_heads,)):
            raise ValueError(f"{name}: {scales.dtype} {tuple(scales.shape)}; one float32 a KV head, ({kv_heads},)")
    return quantized
