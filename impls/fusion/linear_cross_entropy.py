"""Linear cross entropy: the full logits against chunks of them, which are never all there.

    loss = cross_entropy(hidden · weightᵀ, target)          (Hsu et al. 2024, section 3.2; Wijmans et al. 2024)

A memory technique. Beside the two gradients, for N = 8,192 tokens, width 4,096, V = 128,256 in bfloat16:

    plain   logits 2 NV, their float32 copy and log-softmax 8 NV, their gradient in float32 and bfloat16: over 10 GiB
    fused   the logits of one chunk: 0.49 GiB

Time: the same three products (6·N·W·V operations, 25.8 TFLOP, 38 ms at an H200's 680 TFLOP/s), beside

    plain   36 bytes a logit over the passes of the plain cross entropy: 8.8 ms
    fused   2e to 3e a logit in one kernel, counted as 2.5e, and the weight's gradient read and written once more for
            each chunk after the first: 2.7 ms
    predicted 1.15 times forward and backward

``direction="forward"`` is the loss alone (evaluation); the gradients are made in the forward, so a backward alone is no
workload here.
"""

# Shapes: N tokens, W width of the model, V vocabulary.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload
from impls.fusion._count import COPY, ITEMSIZE, PRODUCTS

IGNORE = -100
CHUNK_BYTES = 2**29


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """hidden (N, W), weight (V, W), and targets (N,) of which one in sixteen is ignored, as padding is."""
    tokens, width, vocabulary = workload.tokens, workload.width, workload.vocabulary
    target = torch.randint(vocabulary, (tokens,), generator=ctx.generator(3))
    target[torch.rand(tokens, generator=ctx.generator(4)) < 1 / 16] = IGNORE
    target[0] = 0  # at least one token counts, however few there are
    return {
        "hidden": ctx.randn(tokens, width, salt=1),
        "weight": ctx.randn(vocabulary, width, scale=width**-0.5, salt=2),
        "target": target.to(ctx.device),
    }


def eager(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """All logits, then cross entropy in float32."""
    return F.cross_entropy((hidden @ weight.T).float(), target, ignore_index=IGNORE)


def torch_linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """torch's own, in chunks of its own choice."""
    options = torch.nn.LinearCrossEntropyOptions()
    loss: torch.Tensor = F.linear_cross_entropy(hidden, weight, target, ignore_index=IGNORE, options=options)
    return loss.float()


def fused(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Products by cuBLAS, a chunk's logits turned into their gradient in place by one Triton kernel."""
    from kernels.linear_cross_entropy import linear_cross_entropy

    loss: torch.Tensor = linear_cross_entropy(hidden, weight, target, IGNORE, logits_bytes=CHUNK_BYTES)
    return loss


def liger(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Liger's fused linear cross entropy."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    loss: torch.Tensor = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target, None, None, IGNORE)[0]
    return loss.float()


def oracle(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """All logits, in the precision of the inputs."""
    return F.cross_entropy(hidden @ weight.T, target, ignore_index=IGNORE)


def work(workload: Workload) -> Work:
    """The products; hidden and weight read once, and both gradients written once. Logits are no input and no output."""
    tokens, width, vocabulary = workload.tokens, workload.width, workload.vocabulary
    both = workload.direction == "both"
    return Work(
        flops=(6 if both else 2) * tokens * width * vocabulary,
        bytes=(2 if both else 1) * (tokens + vocabulary) * width * ITEMSIZE[workload.dtype],
        launches=4 if both else 2,
        items=tokens,
        unit="tokens",
        reasons={
            "flops": "2·N·W·V for the logits; twice that for the two gradients",
            "bytes": "hidden and weight in, their gradients out",
        },
    )


def predict(workload: Workload) -> float:
    """Ratio of times: products at an H200's rate, bytes at its copy."""
    tokens, width, vocabulary = workload.tokens, workload.width, workload.vocabulary
    size = ITEMSIZE[workload.dtype]
    logits, both = tokens * vocabulary, workload.direction == "both"
    products = (6 if both else 2) * tokens * width * vocabulary / PRODUCTS
    cast = 0 if size >= 4 else size + 4
    plain = (2 * cast + 24 if both else cast + 8) * logits
    chunks = -(-logits * size // CHUNK_BYTES)
    again = 2 * (chunks - 1) * vocabulary * width * size
    fast = 2.5 * size * logits + again if both else size * logits
    return float((products + plain / COPY) / (products + fast / COPY))


PAIR = Pair(
    name="linear_cross_entropy",
    layer="kernel",
    relieves="capacity",
    claim=Claim(latency="same", memory="lower", cost="a chunk's part of the weight's gradient is rounded"),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": eager,
        "optimized": Variant(fused, requires=("triton",)),
        "torch_compile": Variant(eager, peer="torch", requires=("compiler",), compiled=True),
        "torch_linear_cross_entropy": Variant(
            torch_linear_cross_entropy, peer="torch", requires=("cuda", "torch>=2.13")
        ),
        "liger": Variant(liger, peer="library", requires=("cuda", "package:liger_kernel")),
    },
    work=work,
    predict=predict,
    differentiable=("hidden", "weight"),
)
