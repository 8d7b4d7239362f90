"""SwiGLU: the gate of the MLP in one pass each way, alone and inside the whole MLP.

    out = silu(gate) · up                                   (Shazeer 2020, equation 6)

Bytes per element of e bytes:

    forward   plain   silu 2e; multiply 3e: 5e
              fused   read gate and up, write out: 3e
              predicted 1.67 times
    backward  plain   two products of 3e; silu's gradient 3e: 9e
              fused   read the gradient, gate and up, write two gradients: 5e; silu(gate) is computed again
              predicted 1.80 times

With ``scope="mlp"`` the same gate stands between the three products of the MLP (6·R·W·I operations forward, twice that
backward), which take most of the time: at R = 16,384, W = 4,096, I = 14,336 in bfloat16 and the ceilings of an H200,
8.5 ms of products beside 0.55 ms (plain) or 0.33 ms (fused): predicted 1.02 times. That is the honest share.

``torch_compile`` makes the same single pass each way, so the same bytes bind it, and it is level with the fused way or
a fraction of a percent ahead: its kernel is made for one contiguous shape and needs no masks and no offsets of 64 bits,
where ours takes any strides and lengths. No profile has told more of so small a difference.
"""

# Shapes: R rows (tokens), W width of the model, I inner width.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload
from impls.fusion._count import COPY, ITEMSIZE, PRODUCTS, over

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """gate and up (R, I); for the whole MLP x (R, W) and its three weights."""
    rows, inner = workload.rows, workload.inner
    if workload.scope == "gate":
        return {"gate": ctx.randn(rows, inner, salt=1), "up": ctx.randn(rows, inner, salt=2)}
    width = workload.width
    return {
        "x": ctx.randn(rows, width, salt=1),
        "w_gate": ctx.randn(inner, width, scale=width**-0.5, salt=2),
        "w_up": ctx.randn(inner, width, scale=width**-0.5, salt=3),
        "w_down": ctx.randn(width, inner, scale=inner**-0.5, salt=4),
    }


def through(gate: Gate) -> Callable[..., torch.Tensor]:
    """The workload's computation around one way of gating."""

    def computation(**tensors: torch.Tensor) -> torch.Tensor:
        if "x" not in tensors:
            return gate(tensors["gate"], tensors["up"])
        x = tensors["x"]
        return gate(x @ tensors["w_gate"].T, x @ tensors["w_up"].T) @ tensors["w_down"].T

    return computation


def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's and Meta's Llama write it."""
    return F.silu(gate) * up


def fused(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """One pass each way, in Triton."""
    from kernels.swiglu import swiglu

    out: torch.Tensor = swiglu(gate, up)
    return out


def liger(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Liger's fused gate; its backward writes the gradients over gate and up."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    out: torch.Tensor = LigerSiLUMulFunction.apply(gate, up)
    return out


def definition(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The definition, in the precision of its inputs."""
    return gate * torch.sigmoid(gate) * up


def work(workload: Workload) -> Work:
    """Each input read once, each output written once; for the MLP the products as well."""
    rows, inner, size = workload.rows, workload.inner, ITEMSIZE[workload.dtype]
    if workload.scope == "gate":
        return Work(
            flops=over(workload, 5, 12) * rows * inner,
            bytes=over(workload, 3, 5) * rows * inner * size,
            launches=int(over(workload, 1, 1)),
            items=rows,
            unit="tokens",
            reasons={
                "flops": "forward five an element (an exponential counted as one), backward twelve",
                "bytes": "forward: gate and up in, out out; backward: a gradient, gate and up in, two gradients out",
            },
        )
    width = workload.width
    weights = 3 * width * inner
    return Work(
        flops=over(workload, 2, 4) * rows * weights,
        bytes=over(workload, weights + 2 * rows * width, 2 * weights + 3 * rows * width + 2 * rows * inner) * size,
        launches=int(over(workload, 4, 7)),
        items=rows,
        unit="tokens",
        reasons={
            "flops": "three products of 2·R·W·I forward, six backward; the gate is not counted",
            "bytes": "forward: x and three weights in, out out; backward: a gradient, x, gate, up and the weights in, "
            "the gradients of x and of the weights out",
        },
    )


def predict(workload: Workload) -> float:
    """Ratio of the bytes counted above; for the MLP of the times, products included."""
    slow, fast = over(workload, 5, 9), over(workload, 3, 5)
    if workload.scope == "gate":
        return slow / fast
    rows, inner, width = workload.rows, workload.inner, workload.width
    products = over(workload, 6, 12) * rows * width * inner / PRODUCTS
    second = rows * inner * ITEMSIZE[workload.dtype] / COPY
    return float((products + slow * second) / (products + fast * second))


PAIR = Pair(
    name="swiglu",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher", memory="lower"),
    inputs=inputs,
    oracle=through(definition),
    variants={
        "baseline": through(plain),
        "optimized": Variant(through(fused), requires=("triton",)),
        "torch_compile": Variant(through(plain), peer="torch", requires=("compiler",), compiled=True),
        "liger": Variant(
            through(liger), peer="library", requires=("cuda", "package:liger_kernel"), changes=("gate", "up")
        ),
    },
    work=work,
    predict=predict,
    differentiable=("gate", "up", "x", "w_gate", "w_up", "w_down"),
)
