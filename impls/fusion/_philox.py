"""Philox-4x32-7 in plain tensor operations: the dropout mask that a pair's kernel must make, by another road.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011, section 3.3.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7


def words(seed: int, first: torch.Tensor, second: torch.Tensor, rounds: int = _ROUNDS) -> list[torch.Tensor]:
    """Four 32-bit words, held in int64, for each counter (first, second, 0, 0) under a 64-bit seed.

    first, second  what broadcasts, 32-bit words held in int64
    """
    c0, c1 = torch.broadcast_tensors(first, second)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(rounds):
        # The products wrap in int64, but their bits are the right ones; the masks drop the sign.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & _MASK) ^ c1 ^ k0, second & _MASK
        c2, c3 = ((first >> 32) & _MASK) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def keep_mask(rows: int, columns: int, threshold: int, seed: int, device: torch.device) -> torch.Tensor:
    """(rows, columns), bool: True where the element's 16-bit draw is at least `threshold`.

    Eight neighbours of a row share a counter, (group in the row, row). Their draws are the low halves of the words 0,
    2, 1 and 3, then the high halves in the same order.
    """
    groups = -(-columns // 8)
    group, row = torch.arange(groups, device=device)[None, :], torch.arange(rows, device=device)[:, None]
    w0, w1, w2, w3 = words(seed, group, row)
    order = (w0, w2, w1, w3)
    draws = torch.stack([word & 0xFFFF for word in order] + [word >> 16 for word in order], dim=-1)
    return (draws >= threshold).view(rows, groups * 8)[:, :columns].contiguous()
