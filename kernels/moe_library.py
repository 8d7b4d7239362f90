"""The products of routed experts by torch's own: over all groups in one, or expert after expert.

Rows lie expert after expert (:mod:`kernels.moe_order`), every one of them in memory: what a kernel of ours would find
through the order is spread first (:mod:`kernels.moe_gate`). One expert after the other needs the host to know how many
rows each has: it waits for the order, once a step, and a CUDA graph cannot record that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.moe_gate import clear_empty
from kernels.moe_order import Order


def spans(order: Order) -> list[tuple[int, int]]:
    """Every expert's first row and the row after its last; the host waits for them unless it has."""
    if order.spans is not None:
        return order.spans
    ends: list[int] = order.ends_E.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def product(a_PK: torch.Tensor, weight: torch.Tensor, order: Order, across: bool, each: bool) -> torch.Tensor:
    """a (P, K) times the weights (E, N, K) of each row's expert, or (E, K, N) with ``across``: (P, N).

    ``each``: by a product an expert, else by one for all.
    """
    weight = weight if across else weight.transpose(1, 2)
    if not each:
        out: torch.Tensor = F.grouped_mm(a_PK, weight, offs=order.ends_E)
        return out
    out = a_PK.new_empty(a_PK.shape[0], weight.shape[2])
    for (first, end), own in zip(spans(order), weight.unbind(), strict=True):
        if end > first:
            torch.mm(a_PK[first:end], own, out=out[first:end])
    return out


def weights_product(a_RM: torch.Tensor, b_RN: torch.Tensor, order: Order, each: bool) -> torch.Tensor:
    """Σ over an expert's rows of a[r, m] · b[r, n]: (E, M, N), zeros for an expert that has none."""
    if not each:
        return clear_empty(F.grouped_mm(a_RM.T, b_RN, offs=order.ends_E), order)
    out = a_RM.new_empty(order.ends_E.shape[0], a_RM.shape[1], b_RN.shape[1])
    for (first, end), own in zip(spans(order), out.unbind(), strict=True):
        torch.mm(a_RM[first:end].T, b_RN[first:end], out=own)
    return out
