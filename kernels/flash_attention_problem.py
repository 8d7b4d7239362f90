"""What an attention call computes, checked: shapes, masks and scale as one value, before any kernel is chosen.

Every refusal is a ValueError that names the argument, says what it is and what is supported.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from ._rows import INTERPRETED, check_device

HEAD_DIMS = (16, 32, 64, 96, 128, 256)
GPU_DTYPES = (torch.float16, torch.bfloat16)

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Problem:
    """One attention call. `q_len` and `kv_len` are the longest of the batch when lengths vary.

    Query i of a sequence stands at position p = i + kv_len - q_len on the keys' axis (the last query on the last
    key) and sees the keys p - left .. p + right; None is no bound on that side. `softcap` 0 is none.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    left: int | None
    right: int | None
    scale: float
    softcap: float
    varlen: bool


def check_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Problem:
    """Check a call of `flash_attention` and return what it computes; ValueError when it is not supported."""
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, q, varlen)
    if k.shape != v.shape:
        raise ValueError(f"v: shape {tuple(v.shape)} differs from k's {tuple(k.shape)}; keys and values must agree")
    head_dim, heads, kv_heads = q.shape[-1], q.shape[-2], k.shape[-2]
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"q: head dimension {head_dim} is not supported; use one of {_listed(HEAD_DIMS)}")
    if k.shape[-1] != head_dim:
        raise ValueError(f"k: head dimension {k.shape[-1]} differs from q's {head_dim}; they must agree")
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"k: {kv_heads} heads do not divide q's {heads}; use as many heads as q, or a divisor (grouped queries)"
        )
    if varlen:
        batch, q_len, kv_len = _check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    else:
        if max_seqlen_q is not None or max_seqlen_k is not None:
            raise ValueError("max_seqlen_q, max_seqlen_k: only used with cu_seqlens_q and cu_seqlens_k; leave them out")
        batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
        if k.shape[0] != batch:
            raise ValueError(f"k: batch {k.shape[0]} differs from q's {batch}; they must agree")
    left, right = _check_window(window)
    if causal:
        right = 0
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap: {softcap} is not supported; use a finite positive cap, or 0 for none")
    scale = head_dim**-0.5 if scale is None else float(scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale: {scale} is not supported; use a finite positive number, or None for head_dim ** -0.5")
    # A bound that reaches past every key is none: the kernel then skips its arithmetic.
    if left is not None and left >= max(kv_len - 1, 0) and not varlen:
        left = None
    if right is not None and right >= max(q_len - 1, 0) and not varlen:
        right = None
    return Problem(batch, heads, kv_heads, q_len, kv_len, head_dim, left, right, scale, float(softcap), varlen)


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(str(value) for value in values)


def _check_tensor(name: str, tensor: torch.Tensor, q: torch.Tensor, varlen: bool) -> None:
    rank, layout = (3, "[tokens, heads, head_dim]") if varlen else (4, "[batch, sequence, heads, head_dim]")
    if tensor.ndim != rank:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)} has {tensor.ndim} dimensions; it must be {layout}")
    check_device(name, tensor)
    supported = (*GPU_DTYPES, torch.float32) if INTERPRETED else GPU_DTYPES
    if tensor.dtype not in supported:
        raise ValueError(f"{name}: dtype {tensor.dtype} is not supported; use {_listed(supported)}")
    if tensor.dtype != q.dtype:
        raise ValueError(f"{name}: dtype {tensor.dtype} differs from q's {q.dtype}; they must agree")
    if tensor.device != q.device:
        raise ValueError(f"{name}: is on {tensor.device}, q on {q.device}; they must be on one device")
    if tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: its last dimension has stride {tensor.stride(-1)}, only 1 is supported; call .contiguous() first"
        )


def _check_window(window: Window | None) -> Window:
    if window is None:
        return None, None
    if not (isinstance(window, tuple) and len(window) == 2):
        raise ValueError(f"window: {window!r} is not supported; use (left, right), None on an unbounded side")
    for bound in window:
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 0):
            raise ValueError(f"window: {window!r} is not supported; its bounds are None or integers from 0")
    return window


def _check_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[int, int, int]:
    """The batch size and the longest sequences.

    Values are read where that costs nothing (on the CPU); reading them on a GPU would stop it, so there they are the
    caller's word.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing}: missing; a variable-length batch needs both cu_seqlens_q and cu_seqlens_k")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu.dtype != torch.int32 or cu.ndim != 1 or not cu.is_contiguous() or len(cu) < 2:
            raise ValueError(
                f"{name}: {cu.dtype} of shape {tuple(cu.shape)}; it must be a contiguous int32 vector of batch + 1 "
                "cumulative lengths that starts with 0"
            )
        if cu.device != q.device:
            raise ValueError(f"{name}: is on {cu.device}, q on {q.device}; they must be on one device")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_k: {len(cu_seqlens_k)} entries, cu_seqlens_q has {len(cu_seqlens_q)}; they must agree"
        )
    longest = []
    for name, limit, tokens in (("max_seqlen_q", max_seqlen_q, len(q)), ("max_seqlen_k", max_seqlen_k, len(k))):
        if limit is None or isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= tokens:
            raise ValueError(
                f"{name}: {limit!r}; a variable-length batch needs its longest sequence here, an integer from 0 to "
                f"{tokens} (the tokens in all)"
            )
        longest.append(limit)
    for name, cu, limit, tokens in (
        ("cu_seqlens_q", cu_seqlens_q, longest[0], len(q)),
        ("cu_seqlens_k", cu_seqlens_k, longest[1], len(k)),
    ):
        if cu.device.type == "cpu":
            _check_values(name, cu.tolist(), limit, tokens)
    return len(cu_seqlens_q) - 1, longest[0], longest[1]


def _check_values(name: str, cu: list[int], limit: int, tokens: int) -> None:
    lengths = [end - start for start, end in itertools.pairwise(cu)]
    if cu[0] != 0 or min(lengths) < 0 or cu[-1] > tokens:
        raise ValueError(f"{name}: {cu} must rise from 0 to at most the {tokens} tokens")
    if max(lengths) > limit:
        longest = f"max_seqlen_{name[-1]}"
        raise ValueError(f"{longest}: {limit} is less than the longest sequence, {max(lengths)}")
