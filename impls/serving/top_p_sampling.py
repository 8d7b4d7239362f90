"""Top-p sampling of a decode step: sort every row of logits, against thresholds found without an order.

From B rows of V logits one token each: the k most likely are kept, of these the fewest that reach p together, and one
of what is left is drawn (Holtzman et al., 2020, "The Curious Case of Neural Text Degeneration", section 3.1).

    plain   softmax, a full sort with indices, a running sum, a mask, the draw: each a pass over the row or several; a
            radix sort of 4-byte keys with 8-byte indices alone reads and writes 12 bytes an entry in every digit's pass
    fused   the row once from memory, then three times from the L2: a threshold needs sums only, not an order. Sums at
            16 pivots leave a few hundred candidates, and the threshold is searched among those

Both draw by the same noise, a hash of the row's key and the token id, so the tokens are equal, not only alike. The
plain way is given the noise ready, as quick as any generator makes it; the kernel makes its own.

What is paid: a list of candidates, at most a quarter of the logits. A row is cut among programs, 32 at a vocabulary of
128,256, so one row alone takes four short launches, about 25 us, against about ten of the plain way; at 64 rows the
arithmetic of the passes, some 215 instructions a logit, binds: 60 us if every lane were always busy, 90 expected.
"""

# Shapes: B rows, V vocabulary.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.pair import Claim, Context, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.serving.sampler import draw_key, exponential_noise

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """logits (B, V) as peaked as a model's, each row's temperature, top-k, top-p and key, and its noise (B, V)."""
    rows = int(workload.rows)
    keys = torch.tensor([draw_key(ctx.seed, place) for place in range(rows)], device=ctx.device)
    return {
        "logits": ctx.randn(rows, int(workload.vocab), scale=float(workload.spread), salt=1),
        "temperatures": torch.full((rows,), float(workload.temperature), device=ctx.device),
        "top_ks": torch.full((rows,), int(workload.top_k), dtype=torch.int64, device=ctx.device),
        "top_ps": torch.full((rows,), float(workload.top_p), device=ctx.device),
        "keys": keys,
        "noise": exponential_noise(keys, int(workload.vocab)),
    }


def sorting(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, keys: Tensor, noise: Tensor
) -> Tensor:
    """The usual way: everything by rank, then back to token ids."""
    scaled = logits.to(temperatures.dtype) / temperatures[:, None]
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    last = (top_ks - 1).clamp(min=0)[:, None]
    beyond_k = (top_ks > 0)[:, None] & (ordered < ordered.gather(1, last.clamp(max=logits.shape[1] - 1)))
    ordered = ordered.masked_fill(beyond_k, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = ((before < top_ps[:, None]).sum(dim=-1, keepdim=True)).clamp(min=1)
    # Ties with the last one kept stay, so that what is drawn does not depend on the order of equals.
    outside = (rank >= kept) & (ordered < ordered.gather(1, kept - 1)) & (top_ps < 1.0)[:, None]
    ordered = ordered.masked_fill(outside, -torch.inf)
    raced = ordered - noise.gather(1, ids).log()
    return ids.gather(1, raced.argmax(dim=-1, keepdim=True)).squeeze(1)


def fused(logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, keys: Tensor, noise: Tensor) -> Tensor:
    """Our kernel."""
    from kernels.sample import sample_rows

    tokens: Tensor = sample_rows(logits, temperatures, top_ks, top_ps, keys)
    return tokens


def work(workload: Workload) -> Work:
    """The logits once."""
    rows, vocab = int(workload.rows), int(workload.vocab)
    return Work(
        bytes=rows * vocab * ITEMSIZE[workload.dtype],
        items=rows,
        unit="tokens",
        reasons={"bytes": "every logit read once; parameters and tokens are a few bytes a row"},
    )


PAIR = Pair(
    name="top_p_sampling",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher", memory="lower"),
    inputs=inputs,
    oracle=sorting,
    variants={
        "baseline": sorting,
        "optimized": Variant(fused, requires=("triton",)),
    },
    work=work,
    tolerance=Tolerance(rule="exact"),
)
