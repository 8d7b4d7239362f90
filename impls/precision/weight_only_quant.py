"""Weight-only quantization: a decode step's linear layer over weights of 8 or 4 bits, against bfloat16 weights.

    out[m, n] = Σ_k x[m, k] · w[n, k]          w[n, k] = scale[k // G, n] · q[n, k]

q are whole numbers, rounded to nearest: int8 with one scale an output channel, int4 with one scale for a group of
G = 128 inputs, the form without offsets of GPTQ (Frantar et al., 2023), AWQ (Lin et al., 2024, section 3) and Marlin
(Frantar et al., 2024). Their better ways of choosing q change its values and not what the kernel does.

Bytes for M tokens, K inputs, N outputs, two bytes a token's number and a scale:

    plain      2·N·K + 2·M·(K + N)                          the weights are resident in bfloat16
    optimized  N·K·bits/8 + 2·N·K/G + 2·M·(K + N)           widened in registers
    predicted  2.0 times in int8, 3.9 in int4 while memory binds

FLOPs are 2·M·N·K either way, since the product itself is bfloat16. At 680 TFLOP/s and 4.28 TB/s, arithmetic binds a
layer of 4096 to 14336 from 44 tokens on with int4 weights, 84 with int8 and 168 with bfloat16: the gain shrinks between
its own bound and the last, where nothing is left. The prediction is the ratio of the larger terms.

What is compared. The baseline multiplies the same numbers, dequantized to bfloat16 beforehand: the one product that a
user without quantization waits for. ``dequantize`` and ``torch_compile`` widen the stored weights on each call.
``compiled_int8`` is the compiler's best at one token and a channel's scale: a sum of products reads the int8 numbers
once and widens them in registers, while a compiled product writes the widened weights to memory first.
The oracle is the float64 product of the exact scale · q, so every variant is held to rounding. What quantization itself
costs is no tolerance here: the norm of the output's difference from that of the weights before quantization, relative,
is in the record of ``optimized`` as ``quantization_error``, beside the bytes that both forms of the weights take. The
cost to a model's perplexity is bounded in tests/precision/test_real_weights.py: next to none in int8; in int4, chosen
by rounding alone as here, so much that a calibrated q is needed.

Inputs are resident before a call, so peak memory shows scratch alone; the saved capacity is those two byte counts.
"""

# Shapes: M tokens, K inputs, N outputs, G groups of inputs.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
#: Ceilings seen on an H200 (700 W), for the prediction: bytes a second of a copy, dense bfloat16 products.
COPY = 4.28e12
PRODUCTS = 680e12
INNER_TILES = 8  # of torch's int4 format: tiles of 16 inputs that lie together


def group_of(workload: Workload) -> int | None:
    """Inputs a scale; None for one scale an output channel (a dimension of 0)."""
    return int(workload.group) or None


def in_tiles(workload: Workload) -> bool:
    """Whether the weights are stored in the order of the registers, which is the faster form for few tokens."""
    from kernels.weight_only_tiles import FEW_TOKENS

    return ITEMSIZE[workload.dtype] == 2 and int(workload.tokens) <= FEW_TOKENS


def quantize(weight_NK: Tensor, bits: int, group: int | None) -> tuple[Tensor, Tensor]:
    """q (N, K) int8 and scales (groups, N) in the weight's dtype: each number to the nearest of a grid through zero.

    A group's largest magnitude takes one end of the grid, -8 or 7 (-128 or 127), whichever leaves the smaller sum of
    squares, so a scale may be negative. Numbers beyond the other end go there. A group of zeros has scale 0 and zeros.
    """
    outputs, inputs = weight_NK.shape
    size = group or max(1, inputs)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    padded = torch.nn.functional.pad(weight_NK.float(), (0, -inputs % size)).view(outputs, -1, size)
    largest = padded.gather(2, padded.abs().argmax(2, keepdim=True))

    def with_end(end: int) -> tuple[Tensor, Tensor, Tensor]:
        scales = (largest / end).to(weight_NK.dtype)
        step = torch.where(scales == 0, 1, scales).float()
        q = (padded / step).round().clamp(low, high)
        return q.to(torch.int8), scales, ((q * step - padded) / step).square().sum(2, keepdim=True) * end**-2

    q, scales, error = with_end(high)
    other_q, other_scales, other_error = with_end(low)
    better = other_error < error
    q, scales = torch.where(better, other_q, q), torch.where(better, other_scales, scales)
    return q.view(outputs, -1)[:, :inputs].contiguous(), scales.squeeze(2).T.contiguous()


def widen(q_NK: Tensor, scales_GN: Tensor, group: int | None) -> Tensor:
    """scale · q (N, K) in the scales' dtype."""
    inputs = q_NK.shape[1]
    spread = scales_GN.T.repeat_interleave(group or max(1, inputs), dim=1)[:, :inputs]
    return q_NK.to(scales_GN.dtype) * spread


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """x (M, K); the weights in our packed form with their scales (G, N), and dequantized (N, K); peers' own forms."""
    from kernels.weight_only_matmul import pack
    from kernels.weight_only_tiles import pack_tiles

    bits, group = int(workload.bits), group_of(workload)
    q, scales = quantize(_weight(workload, ctx), bits, group)
    drawn: dict[str, Any] = {
        "x": _tokens(workload, ctx),
        "weight": widen(q, scales, group),
        "packed": (pack_tiles if in_tiles(workload) else pack)(q, bits, group),
        "scales": scales,
        "bits": bits,
        "group": group,
    }
    if ctx.device.type == "cuda" and (int8_unsupported(workload) is None or not_one_token(workload) is None):
        drawn["plain_int8"] = q
    if ctx.device.type == "cuda" and int4_unsupported(workload) is None:
        nibbles = (q + 8).to(torch.uint8)
        drawn["tiled_int4"] = torch.ops.aten._convert_weight_to_int4pack(
            nibbles[:, ::2] << 4 | nibbles[:, 1::2], INNER_TILES
        )
        drawn["scales_and_zeros"] = torch.stack([scales, torch.zeros_like(scales)], dim=2)
    return drawn


def _weight(workload: Workload, ctx: Context) -> Tensor:
    outputs, width = int(workload.outputs), int(workload.inputs)
    return ctx.randn(outputs, width, scale=width**-0.5, salt=1)


def _tokens(workload: Workload, ctx: Context) -> Tensor:
    return ctx.randn(int(workload.tokens), int(workload.inputs), salt=2)


def resident(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
    """The product with weights that are kept in the dtype of the tokens."""
    return x @ weight.T


def dequantized(x: Tensor, packed: Tensor, scales: Tensor, bits: int, group: int | None, **_: Any) -> Tensor:
    """All weights widened to memory, then the product."""
    from kernels.weight_only_matmul import unpack
    from kernels.weight_only_tiles import unpack_tiles

    if packed.ndim == 3:
        q = unpack_tiles(packed, scales.shape[1], x.shape[1], bits)
    else:
        q = unpack(packed, x.shape[1], bits, group)
    return x @ widen(q, scales, group).T


def fused(workload: Workload, ctx: Context) -> Callable[..., Tensor]:
    """Widened on the way to the product, in Triton; the record has its launch and what quantization did.

    A few tokens take weights in another order than many (:mod:`kernels.weight_only_tiles`). Each form has the same
    bytes; who serves both from one copy takes the few tokens' and widens it for the rest (``dequantize``).
    """
    from kernels import weight_only_matmul as over_rows
    from kernels import weight_only_tiles as over_tiles
    from kernels._rows import multiprocessors

    product = over_tiles.weight_only_tiles if in_tiles(workload) else over_rows.weight_only_matmul

    def run(x: Tensor, packed: Tensor, scales: Tensor, bits: int, group: int | None, **_: Any) -> Tensor:
        out: Tensor = product(x, packed, scales, bits=bits, group=group)
        return out

    def choice() -> dict[str, float]:
        tokens, outputs, width = int(workload.tokens), int(workload.outputs), int(workload.inputs)
        size, slots = ITEMSIZE[workload.dtype], multiprocessors(ctx.device)
        if in_tiles(workload):
            blocks = over_tiles.blocks_of(width, group_of(workload))
            launch = over_tiles.launch_shape(tokens, outputs, blocks, slots)._asdict()
        else:
            launch = over_rows.launch_shape(tokens, outputs, width, int(workload.bits), size, slots)._asdict()
        return {
            **{name: number for name, number in launch.items() if number is not None},
            "weight_bytes": stored_bytes(workload),
            "plain_weight_bytes": size * outputs * width,
            "quantization_error": quantization_error(workload, ctx),
        }

    run.choice = choice  # type: ignore[attr-defined]
    return run


def quantization_error(workload: Workload, ctx: Context) -> float:
    """‖x·wᵀ - x·ŵᵀ‖ / ‖x·wᵀ‖ (Frobenius) of the drawn weights w and of those that their quantized form ŵ stands for.

    In float64, some outputs at a time. Zero where the output is.
    """
    x, weight, group = _tokens(workload, ctx).double(), _weight(workload, ctx), group_of(workload)
    lost = whole = 0.0
    for part in weight.split(1024):
        q, scales = quantize(part, int(workload.bits), group)
        out = x @ part.double().T
        lost += float((out - x @ widen(q, scales.double(), group).T).square().sum())
        whole += float(out.square().sum())
    return float((lost / whole) ** 0.5) if whole else 0.0


def int8_mm(x: Tensor, plain_int8: Tensor, scales: Tensor, **_: Any) -> Tensor:
    """torch's product with int8 weights of one scale a channel."""
    return torch._weight_int8pack_mm(x, plain_int8, scales[0])


def int8_sum(x: Tensor, plain_int8: Tensor, scales: Tensor, **_: Any) -> Tensor:
    """The product of one token as a sum, which a compiler fuses with the widening."""
    return ((x.float() * plain_int8).sum(1) * scales[0].float()).to(x.dtype).unsqueeze(0)


def int4_mm(x: Tensor, tiled_int4: Tensor, scales_and_zeros: Tensor, group: int, **_: Any) -> Tensor:
    """torch's product with int4 weights in the tiles of its tensor-core kernel."""
    out: Tensor = torch.ops.aten._weight_int4pack_mm(x, tiled_int4, group, scales_and_zeros)
    return out


def int8_unsupported(workload: Workload) -> str | None:
    """Why torch's int8 product cannot take the workload on a GPU, or None."""
    if workload.bits != 8 or workload.group or workload.dtype != "bfloat16":
        return "takes int8 weights with one scale a channel and bfloat16 tokens"
    return _lacks("_weight_int8pack_mm")


def not_one_token(workload: Workload) -> str | None:
    """Why :func:`int8_sum` cannot take the workload, or None."""
    if workload.bits == 8 and not workload.group and workload.tokens == 1:
        return None
    return "takes one token and int8 weights with one scale a channel"


def int4_unsupported(workload: Workload) -> str | None:
    """Why torch's int4 product cannot take the workload on a GPU, or None."""
    if workload.bits != 4 or workload.group not in (32, 64, 128, 256) or workload.dtype != "bfloat16":
        return "takes int4 weights in groups of 32 to 256 and bfloat16 tokens"
    if int(workload.inputs) % (16 * INNER_TILES) or int(workload.inputs) % int(workload.group) or workload.outputs % 8:
        return f"takes inputs in multiples of {16 * INNER_TILES} and of the group, outputs in multiples of 8"
    return _lacks("_convert_weight_to_int4pack") or _lacks("_weight_int4pack_mm")


def _lacks(operator: str) -> str | None:
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "CUDA"):
        return None
    return f"this build of torch has no aten::{operator} for CUDA"


def oracle(x: Tensor, packed: Tensor, scales: Tensor, bits: int, group: int | None, **_: Any) -> Tensor:
    """The product with scale · q, in the precision of the arguments."""
    return dequantized(x, packed, scales, bits, group)


def stored_bytes(workload: Workload) -> int:
    """Bytes of the quantized weights and their scales."""
    outputs, width = int(workload.outputs), int(workload.inputs)
    groups = -(-width // (group_of(workload) or max(1, width)))
    return outputs * width * int(workload.bits) // 8 + outputs * groups * ITEMSIZE[workload.dtype]


def _activation_bytes(workload: Workload) -> int:
    return int(workload.tokens) * (int(workload.inputs) + int(workload.outputs)) * ITEMSIZE[workload.dtype]


def _flops(workload: Workload) -> float:
    return 2.0 * int(workload.tokens) * int(workload.inputs) * int(workload.outputs)


def work(workload: Workload) -> Work:
    """One product over the quantized weights."""
    return Work(
        flops=_flops(workload),
        bytes=stored_bytes(workload) + _activation_bytes(workload),
        items=int(workload.tokens),
        unit="tokens",
        reasons={
            "flops": "2·M·N·K; widening a weight is not counted",
            "bytes": "quantized weights and scales once, tokens in, outputs out",
        },
    )


def predict(workload: Workload) -> float:
    """Ratio of the larger of both terms, memory and arithmetic, with either form of the weights."""
    products = _flops(workload) / PRODUCTS
    plain = int(workload.inputs) * int(workload.outputs) * ITEMSIZE[workload.dtype]
    slow, fast = (size + _activation_bytes(workload) for size in (plain, stored_bytes(workload)))
    return max(slow / COPY, products) / max(fast / COPY, products)


PAIR = Pair(
    name="weight_only_quant",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher", cost="weights are rounded; the output's error is recorded"),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": resident,
        "optimized": Variant(fused, requires=("triton",), builds=True),
        "dequantize": dequantized,
        "torch_compile": Variant(dequantized, peer="torch", requires=("compiler",), compiled=True),
        "compiled_int8": Variant(
            int8_sum, peer="torch", requires=("cuda", "compiler"), supports=not_one_token, compiled=True
        ),
        "torch_int8": Variant(int8_mm, peer="torch", requires=("cuda",), supports=int8_unsupported),
        "torch_int4": Variant(int4_mm, peer="torch", requires=("cuda",), supports=int4_unsupported),
    },
    work=work,
    predict=predict,
    differentiable=(),
)
