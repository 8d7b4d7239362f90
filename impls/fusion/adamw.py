"""AdamW: a loop of eager updates against one launch over all parameters, with float32 master weights for 16 bits.

    w ← w · (1 − lr · decay);  m ← m + (1 − b₁)(g − m);  v ← b₂ v + (1 − b₂) g²
    w ← w − lr / (1 − b₁ᵗ) · m / (√v / √(1 − b₂ᵗ) + eps)       (Loshchilov and Hutter 2019, algorithm 2)

Bytes a parameter, 16-bit parameter and gradient beside float32 master, m and v:

    plain   gradient's cast 6; decay 8; m 12; v 8 + 12; denominator 8 + 8 + 8; update 16; parameter's cast 6: 92
    fused   read the gradient 2, master, m, v 12; write master, m, v 12 and the parameter 2: 28
    predicted 3.29 times

All in float32: plain 80, fused 4 + 12 in and 12 out: 28, predicted 2.86 times.

``torch_fused`` is torch.optim.AdamW(fused=True). In float32 it is the peer of equal work, 28 bytes. It knows no master
weights, so for 16-bit parameters it runs on the float32 masters between the two casts: 40 bytes, and 4 more held for
the gradient's copy. ``torch_compile`` is torch.optim.AdamW over lists with its step compiled, between the same casts:
compiling the loop of updates itself takes minutes for a hundred tensors.

The parameters are those of a Llama-family model, a list of tensors of very different sizes; they lie in one buffer a
kind so that the harness can load and compare them, and every variant gets them as separate tensors.
"""

# Shapes: P all parameters, each tensor padded to a multiple of 64 elements; T the number of tensors.

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
STEP = 100
ALIGN = 64
PIECE = 1 << 26

Update = Callable[..., dict[str, torch.Tensor]]
Step = Callable[[], Any]


def shapes(workload: Workload) -> list[tuple[int, ...]]:
    """The tensors of a Llama-family model whose embedding is also its head."""
    width, inner, kv = workload.width, workload.inner, workload.kv
    layer: list[tuple[int, ...]] = [(width, width), (kv, width), (kv, width), (width, width)]
    layer += [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(workload.vocabulary, width), *(shape for _ in range(workload.layers) for shape in layer), (width,)]


def split(flat: torch.Tensor, sizes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """The tensors that lie in a buffer one after another, each from a multiple of ALIGN elements."""
    flat = flat.detach()  # its views must not keep the caller's tensor alive
    out, start = [], 0
    for size in sizes:
        count = math.prod(size)
        out.append(flat[start : start + count].view(size))
        start += -(-count // ALIGN) * ALIGN
    return out


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """param and grad (P,) in the workload's dtype, exp_avg, exp_avg_sq and, where param is narrow, master in float32.

    The padding between tensors is zero, and an update leaves zeros where they are.
    """
    sizes = shapes(workload)
    total = sum(-(-math.prod(size) // ALIGN) * ALIGN for size in sizes)
    padding = torch.ones(total, dtype=torch.bool, device=ctx.device)
    for tensor in split(padding, sizes):
        tensor.fill_(False)
    weight = ctx.randn(total, scale=0.02, salt=1).float() * (1 + 2**-12)
    grad = ctx.randn(total, scale=1e-3, salt=2)
    first = ctx.randn(total, scale=1e-3, salt=3).float()
    # Above the square of the first moment, as averages of the same gradients are.
    second = ctx.randn(total, scale=1e-3, salt=4).float().square_().addcmul_(first, first)
    for tensor in (weight, grad, first, second):
        tensor.masked_fill_(padding, 0)
    state = {"grad": grad, "exp_avg": first, "exp_avg_sq": second, "step": STEP}
    state["steps"] = torch.full((len(sizes),), float(STEP - 1), device=ctx.device)
    if ctx.dtype == torch.float32:
        return {"param": weight, **state}
    return {"param": weight.to(ctx.dtype), "master": weight, **state}


def held(
    param: torch.Tensor, master: torch.Tensor | None, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What an update leaves behind, by name."""
    out = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return out if master is None else {**out, "master": master}


def eager(workload: Workload, ctx: Context) -> Update:
    """One tensor at a time, one operation at a time."""
    sizes = shapes(workload)

    def update(
        param: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        step: int,
        steps: torch.Tensor,
        master: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        rate = LR / (1 - BETAS[0] ** step)
        root = math.sqrt(1 - BETAS[1] ** step)
        wide = param if master is None else master
        every = (split(flat, sizes) for flat in (wide, param, grad, exp_avg, exp_avg_sq))
        for weight, narrow, g, m, v in zip(*every, strict=True):
            g = g.float()
            weight.mul_(1 - LR * DECAY)
            m.lerp_(g, 1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            weight.addcdiv_(m, v.sqrt().div_(root).add_(EPS), value=-rate)
            if master is not None:
                narrow.copy_(weight)
        return held(param, master, exp_avg, exp_avg_sq)

    return update


def fused(workload: Workload, ctx: Context) -> Update:
    """One launch over all tensors; its tables are made when the buffers are new."""
    from kernels.adamw import AdamW

    sizes = shapes(workload)
    made: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    def update(
        param: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        step: int,
        steps: torch.Tensor,
        master: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        if id(param) not in made:
            made.clear()
            weakref.finalize(param, made.clear)  # buffers that are let go must not live on in here
            state = {
                "masters": None if master is None else split(master, sizes),
                "exp_avgs": split(exp_avg, sizes),
                "exp_avg_sqs": split(exp_avg_sq, sizes),
            }
            optimizer = AdamW(split(param, sizes), LR, BETAS, EPS, DECAY, **state)
            made[id(param)] = (optimizer, split(grad, sizes))
        optimizer, grads = made[id(param)]
        optimizer.steps = step - 1
        optimizer.step(grads)
        return held(param, master, exp_avg, exp_avg_sq)

    return update


def _by_torch(workload: Workload, of: Callable[[list[torch.Tensor]], tuple[torch.optim.AdamW, Step]]) -> Update:
    """torch's AdamW on the float32 weights; for 16-bit parameters between two casts of whole buffers."""
    sizes = shapes(workload)
    made: dict[int, tuple[Step, torch.Tensor]] = {}

    def update(
        param: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        step: int,
        steps: torch.Tensor,
        master: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        if id(param) not in made:
            made.clear()
            weakref.finalize(param, made.clear)  # buffers that are let go must not live on in here
            weights = split(param if master is None else master, sizes)
            wide = grad if master is None else torch.empty_like(exp_avg)
            optimizer, go = of(weights)
            states = zip(steps, split(exp_avg, sizes), split(exp_avg_sq, sizes), strict=True)
            for weight, g, (count, m, v) in zip(weights, split(wide, sizes), states, strict=True):
                weight.grad = g
                optimizer.state[weight] = {"step": count, "exp_avg": m, "exp_avg_sq": v}
            made[id(param)] = (go, wide)
        go, wide = made[id(param)]
        if master is None:
            go()
        else:
            wide.copy_(grad)
            go()
            param.copy_(master)
        return held(param, master, exp_avg, exp_avg_sq)

    return update


def torch_fused(workload: Workload, ctx: Context) -> Update:
    """torch's fused AdamW."""

    def of(weights: list[torch.Tensor]) -> tuple[torch.optim.AdamW, Step]:
        optimizer = torch.optim.AdamW(weights, LR, BETAS, EPS, DECAY, fused=True)
        return optimizer, optimizer.step

    return _by_torch(workload, of)


def torch_compiled(workload: Workload, ctx: Context) -> Update:
    """torch's AdamW over lists of tensors, its step compiled: Inductor fuses the lists into few kernels."""
    torch._dynamo.reset()

    def of(weights: list[torch.Tensor]) -> tuple[torch.optim.AdamW, Step]:
        on_gpu = ctx.device.type == "cuda"
        optimizer = torch.optim.AdamW(weights, LR, BETAS, EPS, DECAY, foreach=True, capturable=on_gpu)
        return optimizer, torch.compile(optimizer.step)

    return _by_torch(workload, of)


def no_smoke(workload: Workload) -> str | None:
    """Why a workload is not compiled, or None."""
    return "compilation is not part of the smoke tier" if workload.tier == "smoke" else None


def oracle(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    steps: torch.Tensor,
    master: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The definition over whole buffers, in the precision of its inputs; in pieces, so that a billion fit."""
    wide = param if master is None else master
    for weight, narrow, g, m, v in zip(
        *(flat.split(PIECE) for flat in (wide, param, grad, exp_avg, exp_avg_sq)), strict=True
    ):
        m.copy_(BETAS[0] * m + (1 - BETAS[0]) * g)
        v.copy_(BETAS[1] * v + (1 - BETAS[1]) * g * g)
        direction = (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
        weight.copy_(weight * (1 - LR * DECAY) - LR * direction)
        narrow.copy_(weight)
    return held(param, master, exp_avg, exp_avg_sq)


def count(workload: Workload) -> int:
    """Parameters, without padding."""
    return sum(math.prod(size) for size in shapes(workload))


def work(workload: Workload) -> Work:
    """28 bytes a parameter, in float32 and in 16 bits with float32 state alike."""
    parameters = count(workload)
    return Work(
        flops=14 * parameters,
        bytes=28 * parameters,
        launches=1,
        items=parameters,
        unit="parameters",
        reasons={
            "flops": "fourteen a parameter, root and quotient counted as one each",
            "bytes": "gradient and state in, state and parameter out: 28 in float32, and in 16 bits with a master",
        },
    )


def predict(workload: Workload) -> float:
    """Ratio of the bytes counted above."""
    return (80 if workload.dtype == "float32" else 92) / 28


PAIR = Pair(
    name="adamw",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher", memory="lower"),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": Variant(eager, builds=True, changes=("param", "master", "exp_avg", "exp_avg_sq")),
        "optimized": Variant(
            fused, requires=("triton",), builds=True, changes=("param", "master", "exp_avg", "exp_avg_sq")
        ),
        "torch_compile": Variant(
            torch_compiled,
            peer="torch",
            requires=("compiler",),
            supports=no_smoke,
            builds=True,
            changes=("param", "master", "exp_avg", "exp_avg_sq", "steps"),
        ),
        "torch_fused": Variant(
            torch_fused, peer="torch", builds=True, changes=("param", "master", "exp_avg", "exp_avg_sq", "steps")
        ),
    },
    work=work,
    predict=predict,
    differentiable=(),
)
