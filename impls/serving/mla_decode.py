"""Latent attention in decode: expand the cached latents to keys and values, against absorbing the expansion.

A sequence's cache holds, a position, R latent numbers c and Q rotary ones r, shared by all H heads (DeepSeek-V2, 2024,
section 2.1). Keys and values of head h are linear in the latent, k = c·U_h and v = c·W_h, so they can be made when
they are read; or, since a product may be taken in any order, the query is carried into the latents' space once and
attention runs there (the paper's appendix B):

    q_h · (c·U_h)ᵀ = (q_h·U_hᵀ) · cᵀ           Σ p·(c·W_h) = (Σ p·c)·W_h

For one new token over C positions, a sequence, with D key and D value numbers a head:

    expanded   4·C·H·R·D FLOPs to expand, C·H·(2·D + Q) numbers written and read again
    absorbed   4·H·R·D FLOPs to carry over, C·H·(4·R + 2·Q) in attention over rows of R + Q, C·(R + Q) numbers read

The absorbed form does fewer FLOPs by a factor of about D, and reads fewer numbers by H·(2·D + Q) / (R + Q). It is worse
for prompts, where the expansion is shared by many queries; this pair is about decode.

``absorbed_eager`` is the same form in torch, so that the kernel's own share can be told.
"""

# Shapes: B sequences, C positions, H heads, D key and value width of a head, R latent and Q rotary width.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """q (B, H, D + Q), cache (B, C, R + Q), up_k and up_v (H, R, D) of unit gain, lengths (B)."""
    batch, heads, context = int(workload.batch), int(workload.heads), int(workload.context)
    latent, rope, width = int(workload.latent), int(workload.rope), int(workload.head_dim)
    return {
        "q": ctx.randn(batch, heads, width + rope, salt=1),
        "cache": ctx.randn(batch, context, latent + rope, salt=2),
        "up_k": ctx.randn(heads, latent, width, scale=latent**-0.5, salt=3),
        "up_v": ctx.randn(heads, latent, width, scale=latent**-0.5, salt=4),
        "lengths": torch.full((batch,), context, dtype=torch.int32, device=ctx.device),
    }


def expanded(q: Tensor, cache: Tensor, up_k: Tensor, up_v: Tensor, lengths: Tensor) -> Tensor:
    """Keys and values of every head from the latents, then attention as usual."""
    latent = up_k.shape[1]
    c, r = cache[..., :latent], cache[..., latent:]
    heads = q.shape[1]
    keys = torch.einsum("bcr,hrd->bhcd", c, up_k)
    keys = torch.cat([keys, r[:, None].expand(-1, heads, -1, -1)], dim=-1)
    values = torch.einsum("bcr,hrd->bhcd", c, up_v)
    return F.scaled_dot_product_attention(q[:, :, None], keys, values).squeeze(2).contiguous()


def _carry(q: Tensor, up_k: Tensor) -> Tensor:
    """Queries in the latents' space, (B, H, R + Q)."""
    width = up_k.shape[2]
    return torch.cat([torch.einsum("bhd,hrd->bhr", q[..., :width], up_k), q[..., width:]], dim=-1)


def absorbed_eager(q: Tensor, cache: Tensor, up_k: Tensor, up_v: Tensor, lengths: Tensor) -> Tensor:
    """The absorbed form: the heads are queries of one key head whose values are its latents."""
    carried = _carry(q, up_k)
    scale = q.shape[-1] ** -0.5
    latents = cache[..., : up_k.shape[1]]
    mixed = F.scaled_dot_product_attention(carried[:, None], cache[:, None], latents[:, None], scale=scale)
    return torch.einsum("bhr,hrd->bhd", mixed.squeeze(1), up_v).contiguous()


def absorbed(q: Tensor, cache: Tensor, up_k: Tensor, up_v: Tensor, lengths: Tensor) -> Tensor:
    """The absorbed form over our kernel, which reads a latent once for scores and values."""
    from kernels.mla_decode import mla_decode

    mixed = mla_decode(_carry(q, up_k), cache, lengths, latent=up_k.shape[1], scale=q.shape[-1] ** -0.5)
    return torch.einsum("bhr,hrd->bhd", mixed, up_v).contiguous()


def work(workload: Workload) -> Work:
    """The absorbed form's products and the cache once: the least that any form needs."""
    batch, heads, context = int(workload.batch), int(workload.heads), int(workload.context)
    latent, rope, width = int(workload.latent), int(workload.rope), int(workload.head_dim)
    size = ITEMSIZE[workload.dtype]
    numbers = batch * context * (latent + rope) + 2 * heads * latent * width + batch * heads * (2 * width + rope)
    return Work(
        flops=batch * heads * (4 * latent * width + context * (4 * latent + 2 * rope)),
        bytes=size * numbers,
        launches=3,
        items=batch,
        unit="tokens",
        reasons={
            "flops": "carry over and back, and two products over the latents a position and head",
            "bytes": "the cache and both expansions once, queries in, outputs out",
            "launches": "carry over, attend, carry back",
        },
    )


def predict(workload: Workload) -> float:
    """Both forms by the counts in the module, at an H200's 4.28 TB/s and 680 TFLOP/s."""
    batch, heads, context = int(workload.batch), int(workload.heads), int(workload.context)
    latent, rope, width = int(workload.latent), int(workload.rope), int(workload.head_dim)
    size = ITEMSIZE[workload.dtype]
    positions = batch * context
    moved = positions * (latent + rope + 2 * heads * (2 * width + rope)) * size
    plain = moved / 4.28e12 + 4 * positions * heads * latent * width / 680e12
    fast = max(positions * (latent + rope) * size / 4.28e12, positions * heads * (4 * latent + 2 * rope) / 680e12)
    return plain / fast


PAIR = Pair(
    name="mla_decode",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher", memory="lower"),
    inputs=inputs,
    oracle=expanded,
    variants={
        "baseline": expanded,
        "optimized": Variant(absorbed, requires=("triton",)),
        "absorbed_eager": absorbed_eager,
    },
    work=work,
    predict=predict,
)
