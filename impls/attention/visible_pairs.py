"""How many (query, key) pairs a mask leaves: what attention's FLOPs are counted from."""

from __future__ import annotations


def visible_pairs(q_len: int, kv_len: int, *, left: int | None = None, right: int | None = None) -> int:
    """Pairs of one head of one sequence, exactly.

    Query i stands at p = i + kv_len - q_len on the keys' axis (the last query on the last key) and sees the keys
    p - left .. p + right that exist; None is no bound. A causal mask is right=0, and a square one of length S leaves
    S·(S + 1)/2 pairs. ValueError for a negative length or bound.
    """
    for name, value in (("q_len", q_len), ("kv_len", kv_len), ("left", left), ("right", right)):
        if value is not None and value < 0:
            raise ValueError(f"{name}: {value} is negative; lengths and bounds count from 0")
    if left is None and right is None:
        return q_len * kv_len
    offset = kv_len - q_len
    # Keys up to the right bound, less those before the left one: each a sum of min(max(p + shift, 0), kv_len).
    upper = q_len * kv_len if right is None else _clipped_sum(offset + right + 1, q_len, kv_len)
    lower = 0 if left is None else _clipped_sum(offset - left, q_len, kv_len)
    return max(0, upper - lower)


def _clipped_sum(start: int, count: int, most: int) -> int:
    """Σ min(max(start + i, 0), most) for i in [0, count)."""
    first = min(max(0, -start), count)  # where the terms leave zero
    full = min(max(first, most - start), count)  # where they reach `most`
    rising = full - first
    return rising * (start + first) + rising * (rising - 1) // 2 + (count - full) * most
