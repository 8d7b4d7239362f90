"""Bias + GELU: two passes over the activations against one, in the tanh form and the erf form.

    out = gelu(x + bias)                                    (Hendrycks and Gimpel 2016, section 2)

Bytes per element of e bytes (the bias is one row):

    forward   plain   add 2e; gelu 2e: 4e
              fused   read x, write out: 2e
              predicted 2.0 times
    backward  plain   gelu's gradient 3e; the bias's sum over rows e: 4e
              fused   read the gradient and x, write the gradient: 3e; the sum is taken on the way
              predicted 1.33 times

``torch_compile`` makes the same single pass forward. In 16 bits it is behind, where an element's arithmetic shows
beside its few bytes; in float32 memory alone binds both, and it can be a fraction of a percent ahead: its kernel is
made for one contiguous shape and needs no masks and no offsets of 64 bits.
"""

# Shapes: R rows (tokens), I inner width.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload
from impls.fusion._count import ITEMSIZE, over

APPROXIMATE = {"tanh": "tanh", "erf": "none"}


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """x (R, I) and bias (I,)."""
    return {
        "x": ctx.randn(workload.rows, workload.inner, salt=1),
        "bias": ctx.randn(workload.inner, salt=2),
        "form": workload.form,
    }


def eager(x: torch.Tensor, bias: torch.Tensor, form: str) -> torch.Tensor:
    """An add, then torch's GELU."""
    return F.gelu(x + bias, approximate=APPROXIMATE[form])


def fused(x: torch.Tensor, bias: torch.Tensor, form: str) -> torch.Tensor:
    """One pass each way, in Triton."""
    from kernels.bias_gelu import bias_gelu

    out: torch.Tensor = bias_gelu(x, bias, form)
    return out


def oracle(x: torch.Tensor, bias: torch.Tensor, form: str) -> torch.Tensor:
    """Both definitions, in the precision of their inputs."""
    u = x + bias
    if form == "erf":
        return 0.5 * u * (1 + torch.erf(u * 0.5**0.5))
    return 0.5 * u * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (u + 0.044715 * u**3)))


def work(workload: Workload) -> Work:
    """Forward reads one tensor and writes one; backward reads two and writes one."""
    elements, size = workload.rows * workload.inner, ITEMSIZE[workload.dtype]
    return Work(
        flops=over(workload, 10, 20) * elements,
        bytes=over(workload, 2, 3) * elements * size,
        launches=int(over(workload, 1, 2)),
        items=workload.rows,
        unit="tokens",
        reasons={
            "flops": "about ten an element forward and twenty backward, an exponential counted as one",
            "bytes": "forward: x in, out out; backward: a gradient and x in, a gradient out",
        },
    )


def predict(workload: Workload) -> float:
    """Ratio of the bytes counted above."""
    return over(workload, 4, 4) / over(workload, 2, 3)


PAIR = Pair(
    name="bias_gelu",
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
    differentiable=("x", "bias"),
)
