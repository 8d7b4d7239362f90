"""Residual add + RMSNorm: several passes over the activations against one.

    summed = x + residual
    out    = summed / sqrt(mean(summed²) + eps) · weight            (Zhang and Sennrich 2019, section 3)

Bytes per element of e bytes (weight and rstd are below 2 % at a width of 4096):

    forward   plain, bf16   add 3e; upcast e+4; square 8; mean 4; scale 8; downcast 4+e; weight 2e: 7e + 28 = 42 B
              fused         read x and residual, write summed and out: 4e = 8 B
              predicted     5.25 times in bfloat16
    backward  plain, bf16   the chain above in reverse, eleven passes over float32 or e: about 34 + 6e = 46 B
              fused         read grad_out, grad_summed and summed, write the gradient: 4e = 8 B
              predicted     5.75 times in bfloat16

The plain way upcasts as Llama's own code does: the mean of squares in bfloat16 would not be right.
``torch_rms_norm`` is torch's fused norm after an eager add; ``torch_compile`` is the plain way compiled.
"""

# Shapes: R rows (tokens), W width of the model.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload

EPS = 1e-6
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """x and residual (R, W), weight (W,) around one."""
    rows, width = workload.rows, workload.width
    return {
        "x": ctx.randn(rows, width, salt=1),
        "residual": ctx.randn(rows, width, salt=2),
        "weight": (1 + 0.1 * ctx.randn(width, salt=3).float()).to(ctx.dtype),
        "eps": EPS,
    }


def eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> dict[str, torch.Tensor]:
    """The plain way, as Hugging Face's and Meta's Llama write it."""
    summed = x + residual
    wide = summed.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return {"out": normed.to(x.dtype) * weight, "summed": summed}


def torch_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> dict[str, torch.Tensor]:
    """torch's fused norm, after an eager add."""
    summed = x + residual
    return {"out": F.rms_norm(summed, (summed.shape[-1],), weight, eps), "summed": summed}


def fused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> dict[str, torch.Tensor]:
    """One pass each way, in Triton."""
    from kernels.add_rms_norm import add_rms_norm

    out, summed = add_rms_norm(x, residual, weight, eps)
    return {"out": out, "summed": summed}


def liger(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> dict[str, torch.Tensor]:
    """Liger's fused add and norm, in its Llama casting mode."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    out, summed = LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, 0.0, "llama", False)
    return {"out": out, "summed": summed}


def oracle(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> dict[str, torch.Tensor]:
    """The definition, in the precision of its inputs."""
    summed = x + residual
    return {"out": summed / (summed.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight, "summed": summed}


def work(workload: Workload) -> Work:
    """Forward reads two tensors and writes two; backward reads three and writes one, and the weight each way."""
    rows, width, size = workload.rows, workload.width, ITEMSIZE[workload.dtype]
    passes = {"forward": 1, "backward": 1, "both": 2}[workload.direction]
    flops = {"forward": 5, "backward": 9, "both": 14}[workload.direction]
    weight = {"forward": 1, "backward": 2, "both": 3}[workload.direction]
    return Work(
        flops=flops * rows * width,
        bytes=(4 * passes * rows + weight) * width * size,
        launches=passes,
        items=rows,
        unit="tokens",
        reasons={
            "flops": "forward: add, square, sum, two products; backward: nine an element",
            "bytes": "forward: x, residual in, summed, out out; backward: two gradients and summed in, one out",
        },
    )


def predict(workload: Workload) -> float:
    """Ratio of the bytes counted above."""
    size = ITEMSIZE[workload.dtype]
    upcast = 0 if workload.dtype in ("float32", "float64") else 1
    forward_plain = 7 * size + 28 if upcast else 14 * size
    backward_plain = 34 + 6 * size if upcast else 14 * size
    plain = {"forward": forward_plain, "backward": backward_plain, "both": forward_plain + backward_plain}
    fused_bytes = {"forward": 4 * size, "backward": 4 * size, "both": 8 * size}
    return plain[workload.direction] / fused_bytes[workload.direction]


PAIR = Pair(
    name="add_rms_norm",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher", memory="lower"),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": eager,
        "optimized": Variant(fused, requires=("triton",)),
        "torch_compile": Variant(eager, peer="torch", requires=("compiler",), compiled=True),
        "torch_rms_norm": Variant(torch_rms_norm, peer="torch"),
        "liger": Variant(liger, peer="library", requires=("cuda", "package:liger_kernel")),
    },
    work=work,
    predict=predict,
    differentiable=("x", "residual", "weight"),
)
