"""Routed experts: a loop over experts, each with its small products, against one grid of products for all of them.

    out[t] = Σ_k p[t, k] · down_e · (silu(gate_e · x[t]) · (up_e · x[t]))    e = experts[t, k]
                                            (Shazeer et al. 2017, section 2; Jiang et al. 2024, "Mixtral of Experts")

For T tokens of K experts each, P = T·K pairs, width D and inner width F. The products are the same: 6·P·D·F operations
forward, twice that backward. What differs, per pair of e bytes a number, and per expert that has a token:

    forward   plain   gather 2D; silu 2F, times up 3F; times p 2D; index_add 3D: (7D + 5F)·e
                      10 launches an expert, one of which waits until the host knows its tokens
              fused   combine D, and D/K a token's sum: (D + D/K)·e; the gate is the first product's end
                      5 launches in all
              passes  a token's rows laid out D + D/K; gate 3F; combine D + D/K: (2D + 2D/K + 3F)·e; 9 launches
    backward  plain   gather 2D; p's product and gradient 6D; gate 9F, both halves together 4F; index_add 3D:
                      (11D + 13F)·e, and 6·E·D·F·e to bring the weights' gradients together; 22 launches an expert
              fused   combine D + D/K; the gate is a product's end; 6 launches
              passes  the gradient and x laid out 2D + 2D/K; gate 6F; combine D + D/K: (3D + 3D/K + 6F)·e; 13 launches

Experts of many rows go by `passes`, as those of 4,096 tokens below: a product that reads whole tiles of laid-out rows
is the faster by more than the passes beside it take (:mod:`kernels.moe_plan`). At 680 TFLOP/s, 4.28 TB/s and 9.5 µs a
launch (an H200), where launches and device overlap:

    Mixtral 8×7B (8 of 14336, top 2), 4,096 tokens forward and backward    1.15 times: bytes, a few beside the products
    Qwen3-30B-A3B (128 of 768, top 8), 4,096 tokens forward and backward   23.6 times: launches, which nothing covers
    decode of 64 tokens                                                    1.15 and 43 times: the same, over the weights

So it relieves launches wherever experts are many and small, and little where they are few and large. Tokens are neither
dropped nor padded, and no skew changes that: ``skew`` draws experts by Zipf's law. What is paid: every pair's results
are in memory at once, where the loop keeps one expert's.

``torch_grouped_mm`` is torch's product over groups between a sort, a gather and a sum (as Hugging Face's experts); the
host learns no more from it than from ours. ``torch_compile`` is that, compiled.
"""

# Shapes: T tokens, K choices, P = T·K pairs, E experts, D width, F inner width, H = 2F gate above up.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload
from impls.fusion._count import COPY, ITEMSIZE, PRODUCTS, over
from impls.moe.routing import draw_routing, touched

#: Seconds of the host for an eager operation, seen on an H200's machine.
LAUNCH = 9.5e-6


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """x (T, D), experts and router (T, K), gate_up (E, 2F, D), down (E, D, F)."""
    tokens, width, inner, count = workload.tokens, workload.width, workload.inner, workload.experts
    experts, router = draw_routing(workload, ctx, salt=2)
    return {
        "x": ctx.randn(tokens, width, salt=1),
        "experts": experts,
        "router": router,
        "gate_up": ctx.randn(count, 2 * inner, width, scale=width**-0.5, salt=3),
        "down": ctx.randn(count, width, inner, scale=inner**-0.5, salt=4),
    }


def plain(x: Tensor, experts: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The loop that Hugging Face's models had: an expert's tokens, its network, and back to where they came from."""
    out = torch.zeros_like(x)
    for expert, (into, back) in enumerate(zip(gate_up.unbind(), down.unbind(), strict=True)):
        token, choice = torch.where(experts == expert)
        if not len(token):
            continue
        gate, up = F.linear(x.index_select(0, token), into).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, back) * router[token, choice].unsqueeze(-1)
        out = out.index_add_(0, token, rows)
    return out


def grouped_mm(x: Tensor, experts: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sorted once, two products of torch's over groups, and every token's results gathered and added."""
    tokens, choices = experts.shape
    own, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(own, torch.arange(len(gate_up), device=x.device), right=True, out_int32=True)
    gate, up = F.grouped_mm(x.index_select(0, order // choices), gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    rows = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    slots = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return (rows.index_select(0, slots).view(tokens, choices, -1) * router.unsqueeze(-1)).sum(1)


def fused(x: Tensor, experts: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Our kernels."""
    from kernels.moe_experts import moe_experts

    out: Tensor = moe_experts(x, experts, router, gate_up, down)
    return out


def oracle(x: Tensor, experts: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The definition, token by token of an expert, in the precision of the inputs; as a loop, since E products of all
    tokens would take E/K times as long."""
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        weight = (router * (experts == expert)).sum(1)
        token = (experts == expert).any(1).nonzero().squeeze(1)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=-1)
        rows = (gate * torch.sigmoid(gate) * up) @ down[expert].T
        out = out.index_add(0, token, rows * weight[token, None])
    return out


def not_for_grouped_mm(workload: Workload) -> str | None:
    """Why torch's grouped product cannot take the workload on a GPU, or None."""
    if workload.dtype != "bfloat16":
        return f"torch's grouped product takes bfloat16 on a GPU, not {workload.dtype}"
    if workload.width % 8 or workload.inner % 8:
        return (
            f"torch's grouped product needs rows of whole 16 bytes, not {workload.width} and {workload.inner} numbers"
        )
    return None if hasattr(F, "grouped_mm") else "this build of torch has no grouped_mm"


def _pairs(workload: Workload) -> int:
    return int(workload.tokens) * int(workload.choices)


def _touched(workload: Workload) -> float:
    return touched(int(workload.tokens), int(workload.experts), int(workload.choices), float(workload.skew))


def work(workload: Workload) -> Work:
    """The products; the weights of the experts that are expected to have tokens, and each token in and out."""
    size, tokens, width = ITEMSIZE[workload.dtype], int(workload.tokens), int(workload.width)
    expert = 3 * width * int(workload.inner)
    read = _touched(workload) * expert
    route = _pairs(workload) * (8 + size)
    forward = (read + 2 * tokens * width) * size + route
    backward = (read + workload.experts * expert + 3 * tokens * width) * size + route + _pairs(workload) * size
    return Work(
        flops=over(workload, 2, 4) * _pairs(workload) * expert,
        bytes=over(workload, forward, backward),
        launches=int(over(workload, 3, 3)),
        items=tokens,
        unit="tokens",
        reasons={
            "flops": "three products of 2·D·F a pair forward, six backward; gate and router are not counted",
            "bytes": "forward: weights of the experts expected to have a token, tokens in and out, the routing; "
            "backward: the same weights, x and a gradient in, the gradients of x, of the router and of all weights out",
            "launches": "forward: the order, then one product on the other; backward: gate, x and weights",
        },
    )


def predict(workload: Workload) -> float:
    """Ratio of times: the larger of what the host takes to launch and the device to compute, as counted above."""
    from kernels.moe_plan import have_many_rows

    size, pairs, width, inner = ITEMSIZE[workload.dtype], _pairs(workload), int(workload.width), int(workload.inner)
    experts, choices = _touched(workload), int(workload.choices)
    needed = work(workload)
    products = max(needed.flops / PRODUCTS, needed.bytes / COPY)
    gathered = 6 * int(workload.experts) * width * inner
    slow = over(workload, (7 * width + 5 * inner) * pairs, (11 * width + 13 * inner) * pairs + gathered)
    token = width + width / choices  # read or written for each of its rows
    fast, launches = over(workload, token, token) * pairs, over(workload, 5, 6)
    if have_many_rows(pairs, int(workload.experts)) and not_for_grouped_mm(workload) is None:
        fast, launches = over(workload, 2 * token + 3 * inner, 3 * token + 6 * inner) * pairs, over(workload, 9, 13)
    slow_host, fast_host = LAUNCH * experts * over(workload, 10, 22), LAUNCH * launches
    return max(slow_host, products + slow * size / COPY) / max(fast_host, products + fast * size / COPY)


PAIR = Pair(
    name="moe_grouped_experts",
    layer="kernel",
    relieves="launch",
    claim=Claim(latency="lower", throughput="higher", cost="all pairs' results are in memory at once"),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": plain,
        "optimized": Variant(fused, requires=("triton",)),
        "torch_grouped_mm": Variant(grouped_mm, peer="torch", requires=("cuda",), supports=not_for_grouped_mm),
        "torch_compile": Variant(
            grouped_mm, peer="torch", requires=("cuda", "compiler"), supports=not_for_grouped_mm, compiled=True
        ),
    },
    work=work,
    predict=predict,
    differentiable=("x", "router", "gate_up", "down"),
)
