"""Bytes that expert parallelism sends: counted from a routing that is known, or expected of one that is not.

The formulas stand in :mod:`impls.parallel.expert_parallel`. Of an exchange the busiest rank is meant: where experts are
not alike, that with the popular ones sends most results back.
"""

# Shapes: T tokens, K choices.

from __future__ import annotations

from functools import lru_cache
from math import comb
from typing import Any

import torch
from torch import Tensor

from harness.pair import Context
from harness.workload import Workload
from impls.moe.routing import choices_of, draw_routing
from impls.parallel.shared import ITEMSIZE, ring_bytes, split_sizes

CHUNKS = {"optimized": 1, "overlapped": 2}
#: Tokens drawn to count how many ranks a token goes to where experts are not alike.
_SAMPLE = 8192


def elsewhere(experts_TK: Tensor, experts: int, ranks: int) -> list[list[int]]:
    """How many of each rank's tokens go to each rank, [from][to]; the tokens of a rank are its part of all."""
    ends = torch.tensor(split_sizes(experts, ranks), device=experts_TK.device).cumsum(0)
    owner = torch.searchsorted(ends, experts_TK, right=True)
    goes = (owner.unsqueeze(-1) == torch.arange(ranks, device=owner.device)).any(1)
    return [part.sum(0).tolist() for part in goes.split(split_sizes(len(experts_TK), ranks))]


def _exchange_bytes(workload: Workload, sent: float, received: float, chunks: int) -> float:
    """Bytes of a step for rows sent to other ranks and received from them."""
    size, choices = ITEMSIZE[workload.dtype], workload.choices
    rows = (sent + received) * (2 * workload.width + choices) * size + 4 * choices * sent
    return float(rows + 16 * chunks * (workload.ranks - 1))


def _gather_bytes(workload: Workload) -> float:
    size, choices = ITEMSIZE[workload.dtype], workload.choices
    padded = split_sizes(workload.tokens, workload.ranks)[0] * workload.ranks
    return ring_bytes(workload.ranks, padded * (4 * workload.width * size + choices * (8 + 2 * size)))


def routed_bytes(workload: Workload, variant: str, experts_TK: Tensor) -> float:
    """Bytes that the busiest rank sends in a step of one of our variants, for these choices.

    Raises:
        ValueError: a variant that is not ours.
    """
    if variant == "baseline":
        return _gather_bytes(workload)
    if variant not in CHUNKS:
        raise ValueError(f"the bytes of {variant!r} are not counted here")
    goes, ranks = elsewhere(experts_TK, workload.experts, workload.ranks), range(workload.ranks)
    return max(
        _exchange_bytes(
            workload,
            sum(goes[rank][other] for other in ranks if other != rank),
            sum(goes[other][rank] for other in ranks if other != rank),
            CHUNKS[variant],
        )
        for rank in ranks
    )


def reach(workload: Workload) -> tuple[float, float]:
    """Chances that a token goes to a given other rank: on average over all of them, and to the one that most go to.

    Exact where experts are alike and divide over the ranks, else counted from tokens drawn with a seed of their own.
    """
    experts, choices, ranks, skew = workload.experts, choices_of(workload), workload.ranks, float(workload.skew)
    if not skew and experts % ranks == 0:
        chance = 1 - comb(experts - experts // ranks, choices) / comb(experts, choices)
        return chance, chance
    return _drawn_reach(experts, choices, ranks, skew)


@lru_cache(maxsize=64)
def _drawn_reach(experts: int, choices: int, ranks: int, skew: float) -> tuple[float, float]:
    dims: dict[str, Any] = {"tokens": _SAMPLE, "experts": experts, "choices": choices, "skew": skew}
    sample = Workload("expert_parallel", "sample", "smoke", "float32", dims)
    drawn, _ = draw_routing(sample, Context(torch.device("cpu"), torch.float32, seed=1), salt=2)
    goes = torch.tensor(elsewhere(drawn, experts, ranks)).sum(0) / _SAMPLE
    return float(goes.mean()), float(goes.max())


def link_bytes(workload: Workload, variant: str) -> float:
    """Bytes that the busiest rank is expected to send in a step; :func:`routed_bytes` where choices are known."""
    if variant == "baseline":
        return _gather_bytes(workload)
    if variant not in CHUNKS:
        raise ValueError(f"the bytes of {variant!r} are not counted here")
    mean, most = reach(workload)
    ranks, own = workload.ranks, workload.tokens / workload.ranks * (workload.ranks - 1)
    # The rank that most tokens go to sends to all others but itself.
    sent = workload.tokens / ranks * (mean * ranks - most)
    return _exchange_bytes(workload, sent, most * own, CHUNKS[variant])
