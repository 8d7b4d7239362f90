"""Attention by its formula, holding the scores: the plain way, and the oracle that walks it in blocks of queries.

Shapes: B batch, S query length, K key length, H heads, D head dimension; q [B, S, H, D], k and v [B, K, G, D] with G
a divisor of H. A mask is (left, right), bounds around each query's position on the keys' axis, None for no bound.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

Bounds = tuple[int | None, int | None]

_BLOCK_BYTES = 1 << 30


def visible(q_len: int, kv_len: int, bounds: Bounds, device: torch.device) -> torch.Tensor | None:
    """The mask [S, K], true where a query sees a key, or None when every one does."""
    left, right = bounds
    if left is None and right is None:
        return None
    positions = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    keys = torch.arange(kv_len, device=device)[None, :]
    mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if left is not None:
        mask &= keys >= positions - left
    if right is not None:
        mask &= keys <= positions + right
    return mask


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(Q Kᵀ / √D, masked) V as models wrote it before fused kernels: the softmax in at least float32.

    A query that sees no key gives zeros; it is taken that only a query before the first key sees none, as `visible`
    makes masks. Holds B·H·S·K scores several times over.
    """
    out = _heads_first(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, q.shape[1] > k.shape[1])
    return out.transpose(1, 2).contiguous()  # as the output projection takes it


def _heads_first(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, blind_rows: bool
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    wide = torch.promote_types(q.dtype, torch.float32)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    p = torch.softmax(scores, -1, dtype=wide)
    if mask is not None and blind_rows:
        p = p.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return torch.matmul(p.to(q.dtype), v)


def blocked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    """The same formula over blocks of queries whose scores fit a gibibyte; gradients recompute them.

    For float64 inputs this is the oracle at lengths where the whole score matrix would fill the device.
    """
    queries, keys, values = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    q_len, kv_len = q.shape[1], k.shape[1]
    rows = max(1, _BLOCK_BYTES // max(1, q.shape[0] * q.shape[2] * kv_len * q.element_size()))
    mask = visible(q_len, kv_len, bounds, q.device)
    blocks: list[torch.Tensor] = []
    for start in range(0, q_len, rows):
        part = queries[:, :, start : start + rows]
        seen = None if mask is None else mask[start : start + rows]
        if torch.is_grad_enabled() and rows < q_len:
            blocks.append(checkpoint(_heads_first, part, keys, values, seen, q_len > kv_len, use_reentrant=False))
        else:
            blocks.append(_heads_first(part, keys, values, seen, q_len > kv_len))
    return torch.cat(blocks, 2).transpose(1, 2).contiguous()
