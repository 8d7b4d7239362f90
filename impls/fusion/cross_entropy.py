"""Cross entropy of a large vocabulary: float32 log-probabilities against one read, and the gradient in place.

    loss = mean over counted rows of (1 − s) · (lse − x_t) + s · (lse − mean x)       s the label smoothing

Bytes per logit of e bytes:

    forward   plain   upcast e + 4; log-softmax 8; gather and mean, nothing: e + 12 = 14 B in bfloat16
              fused   read: e = 2 B
              predicted 7.0 times (2.0 in float32, where nothing is upcast)
    backward  plain   the gather's gradient, zeros 4; log-softmax's 12; downcast 4 + e: e + 20 = 22 B in bfloat16
              fused   read and write, in place: 2e = 4 B
              predicted 5.5 times (2.0 in float32)

The plain way also holds the log-probabilities and two gradients in float32: 12 bytes a logit beside the logits. The
fused way holds two float32 a row, and its backward overwrites the logits. ``torch_cross_entropy`` is torch's own on
the logits as they are; Liger's takes the gradient in its forward, so its backward is not timed alone.
"""

# Shapes: N tokens, V vocabulary.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload
from impls.fusion._count import ITEMSIZE, over

IGNORE = -100


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """logits (N, V), and targets (N,) of which one in sixteen is ignored, as padding is."""
    tokens, vocabulary = workload.tokens, workload.vocabulary
    target = torch.randint(vocabulary, (tokens,), generator=ctx.generator(2))
    target[torch.rand(tokens, generator=ctx.generator(3)) < 1 / 16] = IGNORE
    target[0] = 0  # at least one row counts, however few there are
    return {
        "logits": ctx.randn(tokens, vocabulary, scale=2.0, salt=1),
        "target": target.to(ctx.device),
        "smoothing": workload.smoothing,
    }


def eager(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Log-probabilities in float32, then a gather."""
    logp = F.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    counted = target != IGNORE
    loss = -logp.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * logp.mean(-1)
    return (loss * counted).sum() / counted.sum()


def torch_cross_entropy(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> torch.Tensor:
    """torch's own, on the logits as they are; the mean in float32, since 16 bits add up a batch too coarsely."""
    losses = F.cross_entropy(logits, target, ignore_index=IGNORE, label_smoothing=smoothing, reduction="none")
    return losses.float().sum() / (target != IGNORE).sum()


def only_unsmoothed(workload: Workload) -> str | None:
    """torch smooths in the dtype of the logits: in 16 bits its sum over the vocabulary is off by several roundings."""
    if workload.smoothing and ITEMSIZE[workload.dtype] < 4:
        return "torch's label smoothing sums the vocabulary in 16 bits, further off than rounding allows"
    return None


def fused(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> torch.Tensor:
    """One read for the loss; the backward writes the gradient over the logits."""
    from kernels.cross_entropy import cross_entropy

    loss: torch.Tensor = cross_entropy(logits, target, IGNORE, smoothing, "mean", inplace=True)
    return loss


def liger(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Liger's: the forward writes the gradient over the logits."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    loss: torch.Tensor = LigerCrossEntropyFunction.apply(logits, target, None, IGNORE, 0.0, smoothing, "mean")[0]
    return loss.float()


def with_its_forward(workload: Workload) -> str | None:
    """Liger's backward only scales what its forward left: alone it is no work, and not the work of the others."""
    return "Liger takes the gradient in its forward; compare both" if workload.direction == "backward" else None


def oracle(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> torch.Tensor:
    """torch's own, in the precision of its inputs."""
    return F.cross_entropy(logits, target, ignore_index=IGNORE, label_smoothing=smoothing)


def work(workload: Workload) -> Work:
    """Forward reads the logits; backward reads them and writes their gradient."""
    logits, size = workload.tokens * workload.vocabulary, ITEMSIZE[workload.dtype]
    return Work(
        flops=over(workload, 4, 4) * logits,
        bytes=over(workload, 1, 2) * logits * size,
        launches=int(over(workload, 2, 1)),
        items=workload.tokens,
        unit="tokens",
        reasons={
            "flops": "forward: compare, subtract, exp, add; backward: subtract, exp, subtract, multiply",
            "bytes": "forward: logits in; backward: logits in, gradient out",
        },
    )


def predict(workload: Workload) -> float:
    """Ratio of the bytes counted above."""
    size = ITEMSIZE[workload.dtype]
    cast = 0 if size >= 4 else size + 4
    wide = max(size, 4)
    return over(workload, cast + 2 * wide, cast + 4 * wide) / over(workload, size, 2 * size)


PAIR = Pair(
    name="cross_entropy",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher", memory="lower"),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": eager,
        "optimized": Variant(fused, requires=("triton",), changes=("logits",)),
        "torch_compile": Variant(eager, peer="torch", requires=("compiler",), compiled=True),
        "torch_cross_entropy": Variant(torch_cross_entropy, peer="torch", supports=only_unsmoothed),
        "liger": Variant(
            liger,
            peer="library",
            requires=("cuda", "package:liger_kernel"),
            supports=with_its_forward,
            changes=("logits",),
        ),
    },
    work=work,
    predict=predict,
    differentiable=("logits",),
)
