"""Softmax: maximum, exponential, sum and quotient as passes of their own, against one read of the row.

    y = exp(x − max x) / Σ exp(x − max x)                   (Milakov and Gimelshein 2018, algorithm 3)

Bytes per element of e bytes:

    forward   plain   maximum e; subtract 2e; exponential 2e; sum e; divide 2e: 8e
              fused   rows to 32,768: read x, write y: 2e; longer rows read x twice: 3e, less what the L2 holds
              predicted 4.0 times, for longer rows 2.67
    backward  plain   quotient 2e; 2e + 2e + 3e + 2e + e for the sum's gradient; expanding and adding it 3e;
                      exponential 3e: 18e
              fused   rows to 32,768 (16,384 in float32): read the gradient and y, write the gradient: 3e; longer rows
                      5e, less what the L2 holds
              predicted 6.0 times, for longer rows 3.6

``torch_softmax`` is torch's own kernel, which already makes one pass over a row that fits its shared memory.
"""

# Shapes: R rows, C columns.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload
from impls.fusion._count import ITEMSIZE, over


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """x (R, C)."""
    return {"x": ctx.randn(workload.rows, workload.columns, scale=3.0, salt=1)}


def eager(x: torch.Tensor) -> torch.Tensor:
    """A pass for each step; the maximum is a constant, since its gradient cancels."""
    power = (x - x.detach().amax(dim=-1, keepdim=True)).exp()
    return power / power.sum(dim=-1, keepdim=True)


def torch_softmax(x: torch.Tensor) -> torch.Tensor:
    """torch's own kernel."""
    return torch.softmax(x, dim=-1)


def fused(x: torch.Tensor) -> torch.Tensor:
    """One read of a row that fits, in Triton."""
    from kernels.softmax import softmax

    y: torch.Tensor = softmax(x)
    return y


def liger(x: torch.Tensor) -> torch.Tensor:
    """Liger's softmax."""
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    y: torch.Tensor = LigerSoftmaxFunction.apply(x)
    return y


def oracle(x: torch.Tensor) -> torch.Tensor:
    """By way of the logarithm, in the precision of its inputs."""
    return (x - torch.logsumexp(x, dim=-1, keepdim=True)).exp()


def work(workload: Workload) -> Work:
    """Forward reads one tensor and writes one; backward reads two and writes one."""
    elements, size = workload.rows * workload.columns, ITEMSIZE[workload.dtype]
    return Work(
        flops=over(workload, 5, 4) * elements,
        bytes=over(workload, 2, 3) * elements * size,
        launches=int(over(workload, 1, 1)),
        items=workload.rows,
        unit="rows",
        reasons={
            "flops": "forward: compare, subtract, exponential, add, multiply; backward: two products, sum, difference",
            "bytes": "forward: x in, y out; backward: a gradient and y in, a gradient out, however long the rows",
        },
    )


def predict(workload: Workload) -> float:
    """Ratio of the bytes counted above; a second read of a long row counted in full."""
    columns = workload.columns
    forward = 2 if columns <= 32_768 else 3
    backward = 3 if columns <= (32_768 if ITEMSIZE[workload.dtype] == 2 else 16_384) else 5
    return over(workload, 8, 18) / over(workload, forward, backward)


PAIR = Pair(
    name="softmax",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher", memory="lower"),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": eager,
        "optimized": Variant(fused, requires=("triton",)),
        "torch_compile": Variant(eager, peer="torch", requires=("compiler",), compiled=True),
        "torch_softmax": Variant(torch_softmax, peer="torch"),
        "liger": Variant(liger, peer="library", requires=("cuda", "package:liger_kernel")),
    },
    work=work,
    predict=predict,
    differentiable=("x",),
)
