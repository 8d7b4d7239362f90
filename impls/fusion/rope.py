"""Rotary position embedding: rotate-half in five eager passes against one pass in place.

    first'  = first · cos − second · sin
    second' = second · cos + first · sin                    (Su et al. 2021, section 3.4.2; halves as in Hugging Face)

Bytes per element of q and k, of e bytes (the tables are shared by all heads: below 3 % at 32 + 8 heads):

    forward   plain   negate one half e; concatenate 2e; two products 2e each; one sum 3e: 10e
              fused   read and write, in place: 2e
              predicted 5.0 times
    backward  plain   two products 2e each; negate e; two slices padded by zeros 2e each; two sums 3e each: 15e
              fused   read and write: 2e
              predicted 7.5 times

The plain way gets cos and sin already gathered by position and doubled to the head's width, as Hugging Face's models
make them once for all layers; the fused way gathers its own rows. q and k lie in memory as the projections leave them,
(B, S, heads, D), and are handed over as Hugging Face does, (B, heads, S, D).

``torch_compile`` makes one pass too, beside its inputs: it moves as many bytes, and holds q and k twice. Forward it can
be a little ahead of the fused way, which has to know a token's position before it can ask for its row of the tables: a
load behind a load, where the compiled one finds its rows gathered. Backward it fuses the padded slices less well.
"""

# Shapes: B batch, S sequence, H query heads, K key heads, D head width, P positions in the tables.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload
from impls.fusion._count import ITEMSIZE, over

BASE = 500_000.0


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """q (B, H, S, D) and k (B, K, S, D) as views, positions (B, S), tables (P, D/2) and what they give (B, S, D)."""
    batch, sequence, width = workload.batch, workload.seq, workload.head_dim
    half = width // 2
    length = 2 * sequence
    angle = torch.outer(torch.arange(length).double(), BASE ** (-torch.arange(half).double() / half))
    positions = torch.randint(length, (batch, sequence), generator=ctx.generator(3))
    tables = {"cos": angle.cos(), "sin": angle.sin()}
    gathered = {f"{name}_of": table[positions].repeat(1, 1, 2) for name, table in tables.items()}
    return {
        "q": ctx.randn(batch, sequence, workload.heads, width, salt=1).transpose(1, 2),
        "k": ctx.randn(batch, sequence, workload.kv_heads, width, salt=2).transpose(1, 2),
        "positions": positions.to(ctx.device),
        **{name: table.to(ctx.device, ctx.dtype) for name, table in (tables | gathered).items()},
    }


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(first, second) to (−second, first)."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def eager(
    q: torch.Tensor, k: torch.Tensor, cos_of: torch.Tensor, sin_of: torch.Tensor, **_: torch.Tensor
) -> dict[str, torch.Tensor]:
    """As Hugging Face's Llama writes it."""
    cos, sin = cos_of.unsqueeze(1), sin_of.unsqueeze(1)
    return {"q": q * cos + rotate_half(q) * sin, "k": k * cos + rotate_half(k) * sin}


def fused(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    **_: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """One pass, in place; beside its inputs where these are leaves that need a gradient."""
    from kernels.rope import rope

    inplace = not (q.is_leaf and q.requires_grad)
    q_out, k_out = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, positions, inplace=inplace)
    return {"q": q_out.transpose(1, 2), "k": k_out.transpose(1, 2)}


def liger(
    q: torch.Tensor, k: torch.Tensor, cos_of: torch.Tensor, sin_of: torch.Tensor, **_: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Liger's rotation, in place."""
    from liger_kernel.ops.rope import LigerRopeFunction

    q_out, k_out = LigerRopeFunction.apply(q, k, cos_of, sin_of)
    return {"q": q_out, "k": k_out}


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    **_: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The definition, half by half, in the precision of its inputs."""
    turn_cos, turn_sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    rotated = {}
    for name, x in (("q", q), ("k", k)):
        first, second = x.chunk(2, dim=-1)
        parts = first * turn_cos - second * turn_sin, second * turn_cos + first * turn_sin
        rotated[name] = torch.cat(parts, dim=-1)
    return rotated


def work(workload: Workload) -> Work:
    """q and k read once and written once each way, and the rows of the tables that the positions name."""
    tokens, size = workload.batch * workload.seq, ITEMSIZE[workload.dtype]
    elements = tokens * (workload.heads + workload.kv_heads) * workload.head_dim
    passes = over(workload, 1, 1)
    return Work(
        flops=3 * passes * elements,
        bytes=passes * (2 * elements + tokens * workload.head_dim) * size,
        launches=int(passes),
        items=tokens,
        unit="tokens",
        reasons={
            "flops": "two products and a sum an element",
            "bytes": "q and k in and out, one row of half a head's width of cos and of sin a token",
        },
    )


def predict(workload: Workload) -> float:
    """Ratio of the bytes counted above."""
    return over(workload, 10, 15) / over(workload, 2, 2)


PAIR = Pair(
    name="rope",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher", memory="lower"),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": eager,
        "optimized": Variant(fused, requires=("triton",), changes=("q", "k")),
        "torch_compile": Variant(eager, peer="torch", requires=("compiler",), compiled=True),
        "liger": Variant(liger, peer="library", requires=("cuda", "package:liger_kernel"), changes=("q", "k")),
    },
    work=work,
    predict=predict,
    differentiable=("q", "k"),
)
