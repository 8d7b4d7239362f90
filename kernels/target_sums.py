"""Sums of scaled rows by index: the part that targets have in the gradients of a linear layer before a cross entropy.

    at rows    out[t] += own[t] * source[target[t]]                      for every token t
    by target  out[v] += sum over the tokens t with target[t] = v of own[t] * source[t]

Each sum is taken in float32 in a fixed order and rounded once, where it is added to what stands in `out`. Bytes: a row
read, a row read and written for each token, nothing for a target outside the rows of `out` or `source`.

Design. At rows: a program a token and block of columns. By target: the tokens are sorted by target (stably, so the
order within one is fixed), and the program of the first token of a run walks the run; the others return. A run is as
long as a target is frequent, which costs latency, not bytes. No atomics: the same bits from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._rows import check_beside, check_float, on_device_of

_BLOCK = 1024
_WARPS = 4


@triton.jit
def _at_rows_kernel(
    out_ptr,
    own_ptr,
    source_ptr,
    target_ptr,
    out_stride,
    source_stride,
    source_step,
    limit,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < COLUMNS
    target = tl.load(target_ptr + row).to(tl.int64)
    if (target >= 0) & (target < limit):
        here = out_ptr + row * out_stride + column
        source = tl.load(source_ptr + target * source_stride + column * source_step, mask=in_row, other=0.0).to(
            tl.float32
        )
        total = tl.load(here, mask=in_row, other=0.0).to(tl.float32) + tl.load(own_ptr + row) * source
        tl.store(here, total.to(out_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def _by_target_kernel(
    out_ptr,
    own_ptr,
    source_ptr,
    target_ptr,
    order_ptr,
    rows,
    out_stride,
    source_stride,
    source_step,
    limit,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < COLUMNS
    target = tl.load(target_ptr + tl.load(order_ptr + place)).to(tl.int64)
    before = tl.load(order_ptr + place - 1, mask=place > 0, other=0)
    first = (place == 0) | (tl.load(target_ptr + before).to(tl.int64) != target)
    if first & (target >= 0) & (target < limit):
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        following = target
        while following == target:
            row = tl.load(order_ptr + place).to(tl.int64)
            source = tl.load(source_ptr + row * source_stride + column * source_step, mask=in_row, other=0.0)
            total += tl.load(own_ptr + row) * source.to(tl.float32)
            place += 1
            behind = tl.load(order_ptr + place, mask=place < rows, other=0)
            following = tl.where(place < rows, tl.load(target_ptr + behind).to(tl.int64), -1)
        here = out_ptr + target * out_stride + column
        total += tl.load(here, mask=in_row, other=0.0).to(tl.float32)
        tl.store(here, total.to(out_ptr.dtype.element_ty), mask=in_row)


def add_at_rows_(out: torch.Tensor, own: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """out[t] += own[t] * source[target[t]], in place.

    out     (tokens, width), float32, float16 or bfloat16, unit column stride
    own     (tokens,) float32
    source  (vocabulary, width), any strides
    target  (tokens,) int64 or int32; a token whose target is no row of source is left alone

    Raises ValueError naming the argument that is not supported.
    """
    _check(out, own, source, target)
    tokens, width = out.shape
    if tokens and width:
        with on_device_of(out):
            _at_rows_kernel[(tokens, triton.cdiv(width, _BLOCK))](
                out, own, source, target, out.stride(0), *source.stride(), source.shape[0],
                COLUMNS=width, BLOCK=min(_BLOCK, triton.next_power_of_2(width)), num_warps=_WARPS,
            )  # fmt: skip


def add_by_target_(out: torch.Tensor, own: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """out[v] += the sum of own[t] * source[t] over the tokens t with target[t] = v, in place.

    out     (vocabulary, width), float32, float16 or bfloat16, unit column stride
    own     (tokens,) float32
    source  (tokens, width), any strides
    target  (tokens,) int64 or int32; a token whose target is no row of out counts for nothing

    Raises ValueError naming the argument that is not supported.
    """
    _check(out, own, source, target)
    tokens, width = source.shape
    if tokens and width:
        order = torch.argsort(target, stable=True)
        with on_device_of(out):
            _by_target_kernel[(tokens, triton.cdiv(width, _BLOCK))](
                out, own, source, target, order, tokens, out.stride(0), *source.stride(), out.shape[0],
                COLUMNS=width, BLOCK=min(_BLOCK, triton.next_power_of_2(width)), num_warps=_WARPS,
            )  # fmt: skip


def _check(out: torch.Tensor, own: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    check_float("out", out)
    check_float("source", source)
    check_beside("source", source, "out", out, dtypes=(torch.float32, torch.float16, torch.bfloat16))
    tokens = target.shape[0] if target.ndim == 1 else -1
    if tokens < 0 or target.dtype not in (torch.int64, torch.int32) or not target.is_contiguous():
        raise ValueError(
            f"target: {target.dtype} of {tuple(target.shape)}; it must be contiguous int64 or int32, one a token"
        )
    if tuple(own.shape) != (tokens,) or own.dtype != torch.float32 or not own.is_contiguous():
        raise ValueError(f"own: {own.dtype} of {tuple(own.shape)}; it must be contiguous float32 of ({tokens},)")
    if out.ndim != 2 or source.ndim != 2 or out.shape[1] != source.shape[1]:
        raise ValueError(f"source: shape {tuple(source.shape)} does not go with out's {tuple(out.shape)}")
    if out.shape[1] > 1 and out.stride(1) != 1:
        raise ValueError(f"out: its last dimension has stride {out.stride(1)}, only 1 is supported")
