"""LayerNorm, dropout and residual add: three passes and a stored mask against one pass that makes its mask again.

    out = residual + dropout(layer_norm(x))                 (Ba et al. 2016; Srivastava et al. 2014)

Bytes per element of e bytes, 1 byte for the mask:

    forward   plain   layer_norm 2e; dropout 2e + 1; add 3e: 7e + 1 = 15 B in bfloat16
              fused   read x and residual, write out: 3e = 6 B
              predicted 2.5 times
    backward  plain   dropout 2e + 1; layer_norm's gradient 3e, and its two weights' sums read 2e again: 7e + 1 = 15 B
              fused   read the gradient and x, write the gradient of x: 3e = 6 B; the residual's is the incoming one
              predicted 2.5 times

Both must drop the same elements to be compared, so the inputs hold the mask that the seed stands for, made by Philox in
plain tensor operations (:mod:`impls.fusion._philox`). The plain way reads that mask where torch's own dropout would
draw and write it: the same bytes, and none of Philox's arithmetic, which flatters the plain way if anything. The fused
way gets the seed alone.
"""

# Shapes: R rows (tokens), W width of the model.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload
from impls.fusion._count import ITEMSIZE, over
from impls.fusion._philox import keep_mask

EPS = 1e-5


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """x and residual (R, W), weight around one and bias (W,), and the mask (R, W) of the seed."""
    rows, width = workload.rows, workload.width
    threshold = round(workload.p * 65_536)
    seed = ctx.seed * 1_000_003 + 17
    return {
        "x": ctx.randn(rows, width, salt=1),
        "residual": ctx.randn(rows, width, salt=2),
        "weight": (1 + 0.1 * ctx.randn(width, salt=3).float()).to(ctx.dtype),
        "bias": ctx.randn(width, salt=4),
        "mask": keep_mask(rows, width, threshold, seed, ctx.device),
        "scale": 65_536 / (65_536 - threshold),
        "p": workload.p,
        "seed": seed,
    }


def eager(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    p: float,
    seed: int,
) -> torch.Tensor:
    """Three passes. The second is torch's dropout with its mask given: one kernel that reads e + 1 and writes e."""
    normed = F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    dropped: torch.Tensor = torch.ops.aten.native_dropout_backward(normed, mask, scale)
    return residual + dropped


def fused(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    p: float,
    seed: int,
) -> torch.Tensor:
    """One pass each way, in Triton; the mask is not read."""
    from kernels.layer_norm_dropout_add import layer_norm_dropout_add

    out: torch.Tensor = layer_norm_dropout_add(x, residual, weight, bias, p, seed, EPS)
    return out


def oracle(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    p: float,
    seed: int,
) -> torch.Tensor:
    """The definition, in the precision of its inputs."""
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight + bias
    return residual + normed * mask * scale


def work(workload: Workload) -> Work:
    """Each way reads two tensors and writes one; the mask is no input, since the seed gives it."""
    elements, size = workload.rows * workload.width, ITEMSIZE[workload.dtype]
    return Work(
        flops=over(workload, 9, 14) * elements,
        bytes=over(workload, 3, 3) * elements * size,
        launches=int(over(workload, 1, 2)),
        items=workload.rows,
        unit="tokens",
        reasons={
            "flops": "forward: sum, centre, square, sum, two products, add, mask, add; backward: fourteen an element",
            "bytes": "forward: x and residual in, out out; backward: a gradient and x in, a gradient out",
        },
    )


def predict(workload: Workload) -> float:
    """Ratio of the bytes counted above."""
    size = ITEMSIZE[workload.dtype]
    return over(workload, 7 * size + 1, 7 * size + 1) / over(workload, 3 * size, 3 * size)


PAIR = Pair(
    name="layer_norm_dropout_add",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher", memory="lower"),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": eager,
        "optimized": Variant(fused, requires=("triton",)),
        "torch_compile": Variant(eager, peer="torch", requires=("compiler",), compiled=True),
    },
    work=work,
    predict=predict,
    differentiable=("x", "residual", "weight", "bias"),
)
