"""Attention: the formula with its S×S scores in memory, against one pass that never holds them.

    out = softmax(Q Kᵀ / √D, masked) V         (Vaswani et al. 2017, section 3.2.1; FlashAttention, Dao et al. 2022;
                                                FlashAttention-2, Dao 2023)

Per pair of a query and a key, in bfloat16 (the plain way works on every pair, whatever the mask):

    forward   plain   product writes 2; scale reads 2, writes 2; softmax to float32 reads 2, writes 4; downcast reads
                      4, writes 2; product reads 2: 20 B, and 4 more under a mask
              fused   none: Q, K, V in and out once each, so the matrix products bind it
    backward  plain   the same chain in reverse, about 32 B a pair
              fused   five products, scores computed again

FLOPs are counted from the pairs that the mask leaves, exactly: 4·D a pair and head forward (two products), and
backward twice that (the recomputed product is not model work). TFLOP/s in docs/attention.md use 2.5 for backward.

``sdpa_flash`` and ``sdpa_cudnn`` are torch's own kernels through ``scaled_dot_product_attention``; ``flex`` is
``flex_attention`` compiled. Each is one line of torch.
"""

# Shapes: B batch, S sequence, H query heads, G key heads, D head dimension; q [B, S, H, D], k and v [B, S, G, D].

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload
from impls.attention.plain_attention import Bounds, blocked_attention, plain_attention, visible
from impls.attention.visible_pairs import visible_pairs

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
PLAIN_BYTES_A_PAIR = {"forward": 12, "backward": 20, "both": 20}  # held at the peak, scores and softmax together


def bounds_of(workload: Workload) -> Bounds:
    """The mask of a workload: causal or not, with a sliding window of `window` keys (0 for none)."""
    return (workload.window - 1 if workload.window else None), (0 if workload.causal else None)


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """q (B, S, H, D), k and v (B, S, G, D) and the mask's bounds; B is `tokens` over `seq`."""
    batch, seq, dim = workload.tokens // workload.seq, workload.seq, workload.head_dim
    return {
        "q": ctx.randn(batch, seq, workload.heads, dim, salt=1),
        "k": ctx.randn(batch, seq, workload.kv_heads, dim, salt=2),
        "v": ctx.randn(batch, seq, workload.kv_heads, dim, salt=3),
        "bounds": bounds_of(workload),
    }


def plain(workload: Workload, ctx: Context) -> Callable[..., torch.Tensor]:
    """The formula, its mask made once, as a model keeps it."""
    mask = visible(workload.seq, workload.seq, bounds_of(workload), ctx.device)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        return plain_attention(q, k, v, mask)

    return run


def fused(workload: Workload, ctx: Context) -> Callable[..., torch.Tensor]:
    """Our kernels; `choice` says which tiles the device was given."""
    from kernels.flash_attention import flash_attention, flash_attention_kernel
    from kernels.flash_attention_problem import check_problem

    picked: dict[str, str] = {}

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        if not picked:
            picked["kernel"] = flash_attention_kernel(check_problem(q, k, v, window=bounds), q, k, v).describe()
        out: torch.Tensor = flash_attention(q, k, v, window=bounds)
        return out

    run.choice = lambda: dict(picked)  # type: ignore[attr-defined]
    return run


def hopper(workload: Workload, ctx: Context) -> Callable[..., torch.Tensor]:
    """Our kernels with specialised warps, forward and backward."""
    from kernels.flash_attention import flash_attention, flash_attention_kernel
    from kernels.flash_attention_hopper_launch import hopper_tile
    from kernels.flash_attention_problem import check_problem

    picked: dict[str, str] = {}

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        problem = check_problem(q, k, v, window=bounds)
        config = replace(flash_attention_kernel(problem, q, k, v), hopper=hopper_tile(problem), hopper_backward=True)
        picked["kernel"] = config.describe()
        out: torch.Tensor = flash_attention(q, k, v, window=bounds, config=config)
        return out

    run.choice = lambda: dict(picked)  # type: ignore[attr-defined]
    return run


def _sdpa(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=bounds[1] == 0, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def sdpa_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    """torch's FlashAttention-2."""
    return _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, bounds)


def sdpa_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    """cuDNN's fused attention."""
    return _sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, bounds)


def flex(workload: Workload, ctx: Context) -> Callable[..., torch.Tensor]:
    """flex_attention, compiled, with the mask as a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    left, right = bounds_of(workload)

    def seen(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        near = j <= i + right if right is not None else j >= 0
        return near if left is None else near & (j >= i - left)

    masked = left is not None or right is not None
    block_mask = create_block_mask(seen, None, None, workload.seq, workload.seq, ctx.device) if masked else None
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out: torch.Tensor = compiled(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    return run


def work(workload: Workload) -> Work:
    """Two products over the visible pairs forward, four backward; each tensor through memory once."""
    left, right = bounds_of(workload)
    batch, seq, dim, size = workload.tokens // workload.seq, workload.seq, workload.head_dim, ITEMSIZE[workload.dtype]
    pairs = visible_pairs(seq, seq, left=left, right=right) * batch * workload.heads
    products = {"forward": 2, "backward": 4, "both": 6}[workload.direction]
    # Forward: Q, K, V in, out out. Backward: those four and the gradient in, three gradients out.
    queries = {"forward": 2, "backward": 4, "both": 6}[workload.direction]
    keys = {"forward": 2, "backward": 4, "both": 6}[workload.direction]
    return Work(
        flops=2 * products * pairs * dim,
        bytes=workload.tokens * dim * size * (queries * workload.heads + keys * workload.kv_heads),
        launches={"forward": 1, "backward": 1, "both": 2}[workload.direction],
        items=workload.tokens,
        unit="tokens",
        reasons={
            "flops": "4·D a visible pair and head forward, 8·D backward; pairs counted exactly",
            "bytes": "q, k, v, out once forward; those and out's gradient in, three gradients out backward",
        },
    )


def predict(workload: Workload) -> float:
    """Plain bytes a pair against the fused products, by an H200's ceilings: 4.28 TB/s copied, 680 TFLOP/s.

    The fused side is taken at 0.7 of the product's ceiling, with 7/5 as many products as work counts backward
    (the scores once more, and dP).
    """
    batch, seq, dim = workload.tokens // workload.seq, workload.seq, workload.head_dim
    left, right = bounds_of(workload)
    every = seq * seq * batch * workload.heads
    seen = visible_pairs(seq, seq, left=left, right=right) * batch * workload.heads
    masked = left is not None or right is not None
    plain_bytes = {"forward": 20 + 4 * masked, "backward": 32, "both": 52 + 4 * masked}[workload.direction]
    products = {"forward": 2, "backward": 4, "both": 6}[workload.direction]
    done = {"forward": 2, "backward": 5, "both": 7}[workload.direction]
    plain = plain_bytes * every / 4.28e12 + 2 * products * every * dim / 680e12
    return float(plain / (2 * done * seen * dim / (0.7 * 680e12)))


def plain_fits(workload: Workload) -> str | None:
    """Why the plain way cannot run here, or None: its scores grow with S² and are counted before they are made."""
    if not torch.cuda.is_available():
        return None
    pairs = workload.tokens * workload.seq * workload.heads
    need = pairs * PLAIN_BYTES_A_PAIR[workload.direction]
    have = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if need < 0.9 * have:
        return None
    return f"holds every score: about {need / 2**30:.0f} GiB for S={workload.seq}, the device has {have / 2**30:.0f}"


def hopper_takes(workload: Workload) -> str | None:
    """Why the Hopper kernel cannot run a workload, or None."""
    if workload.window:
        return "the Hopper kernel is causal or full, without a window"
    if workload.head_dim not in (64, 128):
        return f"the Hopper kernel takes head dimensions 64 and 128, not {workload.head_dim}"
    return None


def no_window(workload: Workload) -> str | None:
    """scaled_dot_product_attention's fused kernels know no sliding window."""
    return "its fused kernels know no sliding window" if workload.window else None


PAIR = Pair(
    name="flash_attention",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher", memory="lower"),
    inputs=inputs,
    oracle=blocked_attention,
    variants={
        "baseline": Variant(plain, supports=plain_fits, builds=True),
        "optimized": Variant(fused, requires=("triton",), builds=True),
        "hopper": Variant(hopper, requires=("triton", "capability:9.0"), supports=hopper_takes, builds=True),
        "sdpa_flash": Variant(sdpa_flash, peer="torch", requires=("cuda",), supports=no_window),
        "sdpa_cudnn": Variant(sdpa_cudnn, peer="torch", requires=("cuda", "capability>=8.0"), supports=no_window),
        "flex": Variant(flex, peer="torch", requires=("cuda", "compiler"), builds=True),
    },
    work=work,
    predict=predict,
    differentiable=("q", "k", "v"),
)
