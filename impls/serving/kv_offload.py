"""KV offload: what a preempted request had in the cache is computed again, against swapped to the host and back.

When blocks run out the request that was admitted last gives its blocks up. With L tokens computed it can run those L
through the model again when it comes back, or its blocks can wait in pinned host memory ("PagedAttention", section
4.5).

    to come back   recompute  2·W·L FLOPs, W the weights      swap  2·L·v·e bytes over the host link, v values a token

On an H200 with a model of Llama-3-8B's shape in bfloat16 (131 kB a token): at 55 GB/s each way 4.8 µs a token for
both ways, at 600 TFLOP/s of arithmetic 25 µs: swapping has five times less to do, where the link is as good as that.
With a slow link or a small model it is the other way round. What is paid: host memory.

Both sides are one engine; only ``preemption`` differs. The workloads keep the cache small, so that there is something
to preempt; the metric ``preemptions`` says how often it happened.
"""

from __future__ import annotations

from dataclasses import replace

from harness.pair import Claim, Context, Pair, Tolerance, Variant
from harness.workload import Workload
from impls.serving.case import Oracle, ServeCase
from impls.serving.served_model import shared
from impls.serving.supports import cannot
from impls.serving.traffic import engine_config, inputs, work


def recompute(workload: Workload, ctx: Context) -> ServeCase:
    """Preempted requests run through the model again."""
    return ServeCase(workload, ctx, engine_config(workload, preemption="recompute"))


def swap(workload: Workload, ctx: Context) -> ServeCase:
    """Preempted requests wait on the host; ``host_tokens`` slots there."""
    config = engine_config(workload, preemption="swap")
    return ServeCase(workload, ctx, replace(config, host_blocks=int(workload.host_tokens) // config.block_size))


PAIR = Pair(
    name="kv_offload",
    kind="serve",
    layer="system",
    relieves="compute",
    claim=Claim(throughput="higher", memory="same", cost="pinned host memory and the host link"),
    inputs=inputs,
    shared=shared,
    oracle=Oracle,
    variants={
        "baseline": Variant(recompute, supports=cannot),
        "optimized": Variant(swap, supports=cannot),
    },
    work=work,
    tolerance=Tolerance(rule="tokens"),
)
