"""Every token's K results, gathered and added: out[t] = Σ_k p[t, k] · rows[slot[t, k]], or without p.

Bytes for P = T · K pairs, width D and e bytes an element: e P D read, e T D written. Scattering instead (index_add)
reads and writes the sum once a pair, 2 e P D more, and its atomic adds come in another order each run. Here a token's
results are added in float32, choice after choice, and rounded once: the same to the bit from run to run.

Beside it the gradient of p, whose parts the gate's backward leaves by row: gathered and added in the same manner.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._rows import on_device_of

_WARPS = 4
_PAIRS = 256  # of a program of `sum_parts`


@triton.jit(do_not_specialize=["slots_ptr", "router_ptr"])
def combine_kernel(
    rows_ptr, slots_ptr, router_ptr, out_ptr, width,
    CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one token. A slot of -1 adds nothing."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        slot = tl.load(slots_ptr + token * CHOICES + choice)
        row = tl.load(rows_ptr + slot.to(tl.int64) * width + column, mask=inside & (slot >= 0), other=0.0)
        if WEIGHTED:
            p = tl.load(router_ptr + token * CHOICES + choice).to(tl.float32)
            acc += tl.where(slot >= 0, p, 0.0) * row.to(tl.float32)
        else:
            acc += row.to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * width + column, acc.to(out_ptr.dtype.element_ty), mask=inside)


def combine(
    rows_PD: torch.Tensor, slots_P: torch.Tensor, router_TK: torch.Tensor | None, tokens: int, choices: int
) -> torch.Tensor:
    """The sums (T, D) in the dtype of the rows; slots int32 as :func:`kernels.moe_order.expert_order` gives them."""
    width = rows_PD.shape[1]
    out = torch.empty(tokens, width, dtype=rows_PD.dtype, device=rows_PD.device)
    if out.numel():
        # 16 bytes a thread of each of the rows, which are all loaded before the first is used.
        block = min(triton.next_power_of_2(width), 32 * _WARPS * 16 // rows_PD.element_size())
        with on_device_of(rows_PD):
            combine_kernel[(tokens, triton.cdiv(width, block))](
                rows_PD, slots_P, slots_P if router_TK is None else router_TK, out, width,
                CHOICES=choices, WEIGHTED=router_TK is not None, BLOCK=block, num_warps=_WARPS,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["slots_ptr", "pairs", "rows"])
def sum_parts_kernel(parts_ptr, slots_ptr, out_ptr, pairs, rows, blocks, BLOCK: tl.constexpr):
    """BLOCK pairs: the sum of their rows' parts, 0 for a slot of -1."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + pair, mask=pair < pairs, other=-1)
    parts = parts_ptr + slot
    acc = tl.zeros([BLOCK], tl.float32)
    for _ in tl.range(0, blocks):
        acc += tl.load(parts, mask=slot >= 0, other=0.0)
        parts += rows
    tl.store(out_ptr + pair, acc.to(out_ptr.dtype.element_ty), mask=pair < pairs)


def sum_parts(parts_BP: torch.Tensor, slots_P: torch.Tensor, like_TK: torch.Tensor) -> torch.Tensor:
    """out[pair] = Σ_b parts[b, slots[pair]] in the shape and dtype of ``like``; parts float32, contiguous."""
    out = torch.empty_like(like_TK)
    with on_device_of(parts_BP):
        sum_parts_kernel[(triton.cdiv(out.numel(), _PAIRS),)](
            parts_BP, slots_P, out, out.numel(), parts_BP.shape[1], parts_BP.shape[0], BLOCK=_PAIRS, num_warps=_WARPS
        )
    return out
