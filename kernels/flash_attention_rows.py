"""What the attention backward does row by row: before its products, and after them.

Before: delta = Σ o·do - dlse and the shift of the exponent for every query row (Dao 2023, section 3.1), and zeros into
the float32 buffer where the tiles of dQ meet. After: dQ from that buffer. Bytes and nothing else, so one pass each, of
8 and 6 bytes an element at 16 bits: the shorter the sequence, the more they weigh against the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .flash_attention_forward import load_tile
from .flash_attention_plan import block_d, cdiv, row_strides, strides
from .flash_attention_problem import Problem
from .launch import Launch

_ROWS = 64
_ELEMENTS = 4096


@triton.jit
def row_terms_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, shift_ptr, delta_ptr, sums_ptr,
    stride_ob, stride_oh, stride_os, stride_dob, stride_doh, stride_dos, stride_lb, stride_lh, stride_gb, stride_gh,
    stride_rb, stride_rh, rows, heads, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HAS_DLSE: tl.constexpr,
    HAS_SUMS: tl.constexpr,
):  # fmt: skip
    """Per query row: delta = Σ o·do - dlse, and the shift of the exponent, log-sum-exp in base 2. With HAS_SUMS also
    zeros in `sums_ptr`, [batch, rows, heads, HEAD_DIM].

    A row that saw no key has log-sum-exp -inf; its shift is +inf, so that every probability recomputed from it is 0.
    """
    # Heads beside each other: the rows that programs read at a time lie together.
    batch = (tl.program_id(0) % num_heads // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    start = tl.program_id(0) // num_heads * BLOCK_M
    offs = start + tl.arange(0, BLOCK_M)
    inside = offs < rows
    o_ptr += batch * stride_ob
    do_ptr += batch * stride_dob
    o = load_tile(o_ptr, 0, head, start, rows, stride_oh, stride_os, HEAD_DIM, BLOCK_M, BLOCK_D, False)
    do = load_tile(do_ptr, 0, head, start, rows, stride_doh, stride_dos, HEAD_DIM, BLOCK_M, BLOCK_D, False)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        dlse = tl.load(dlse_ptr + batch * stride_gb + head * stride_gh + offs, mask=inside, other=0.0)
        delta -= dlse
    lse = tl.load(lse_ptr + batch * stride_lb + head * stride_lh + offs, mask=inside, other=0.0)
    base = batch * stride_rb + head * stride_rh + offs
    shift = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(shift_ptr + base, shift, mask=inside)
    tl.store(delta_ptr + base, delta, mask=inside)
    if HAS_SUMS:
        columns = tl.arange(0, BLOCK_D)
        places = ((batch * rows + offs) * heads + head)[:, None] * HEAD_DIM + columns[None, :]
        held = inside[:, None] & (columns < HEAD_DIM)[None, :]
        tl.store(sums_ptr + places, tl.zeros((BLOCK_M, BLOCK_D), tl.float32), mask=held)


@triton.jit
def query_sums_kernel(sums_ptr, dq_ptr, count, scale, BLOCK: tl.constexpr):
    """dq = scale · sums, `count` elements."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < count
    sums = tl.load(sums_ptr + offs, mask=inside, other=0.0)
    tl.store(dq_ptr + offs, (sums * scale).to(dq_ptr.dtype.element_ty), mask=inside)


def row_terms_launch(
    problem: Problem,
    out: torch.Tensor,
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
    shift: torch.Tensor,
    delta: torch.Tensor,
    sums: torch.Tensor | None,
) -> Launch:
    """What the backward needs of each query row, into `shift` and `delta` (float32, like lse but for the rows' stride),
    and zeros into `sums` (float32, contiguous, like out) unless that is None. A packed batch is one
    long row of tokens here.
    """
    rows = out.shape[-3]
    batch = 1 if problem.varlen else problem.batch
    args = {
        "o_ptr": out,
        "do_ptr": grad_out,
        "lse_ptr": lse,
        "dlse_ptr": grad_lse,
        "shift_ptr": shift,
        "delta_ptr": delta,
        "sums_ptr": sums,
        **strides("o", out, problem.varlen),
        **strides("do", grad_out, problem.varlen),
        **row_strides(lse, problem.varlen),
        "stride_rb": 0 if problem.varlen else shift.stride(0),
        "stride_rh": shift.stride(-2),
        "stride_gb": 0 if grad_lse is None or problem.varlen else grad_lse.stride(0),
        "stride_gh": 0 if grad_lse is None else grad_lse.stride(-2),
        "rows": rows,
        "heads": problem.heads,
        "num_heads": batch * problem.heads,
        "HEAD_DIM": problem.head_dim,
        "BLOCK_M": _ROWS,
        "BLOCK_D": block_d(problem),
        "HAS_DLSE": grad_lse is not None,
        "HAS_SUMS": sums is not None,
    }
    return Launch(row_terms_kernel, (batch * problem.heads * cdiv(rows, _ROWS),), args, 4, 1)


def query_sums_launch(problem: Problem, sums: torch.Tensor, dq: torch.Tensor) -> Launch:
    """dQ from its float32 sums over scale, both contiguous."""
    args = {
        "sums_ptr": sums,
        "dq_ptr": dq,
        "count": dq.numel(),
        "scale": problem.scale,
        "BLOCK": _ELEMENTS,
    }
    return Launch(query_sums_kernel, (cdiv(dq.numel(), _ELEMENTS),), args, 8, 1)
