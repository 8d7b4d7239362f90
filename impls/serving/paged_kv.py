"""Paged cache: a contiguous reservation of the longest length for each request, against blocks as they are needed.

A request of P prompt and N answer tokens in a cache that allows C tokens a request. The plain way keeps the cache in
one contiguous run a request, so it must reserve C slots when the request starts, though P + N are used in the end and
P at first. Paged (Kwon et al., SOSP 2023, "PagedAttention", sections 3.1 and 4), the cache is blocks of B slots that a
block table lists; only the rest of the last block, B/2 slots on average, is reserved and not used.

    slots reserved for a request    plain C,  paged P + n + B/2 after n tokens
    requests at once in M slots     plain M / C,  paged about M / (P + N)

At fixed memory more requests run at once, so each step's weights are read for more tokens: throughput rises with the
ratio of the two until arithmetic or the slots of the engine bind. What is paid: the kernel looks each block up, and a
request may be preempted when all grow at once. One request alone gains nothing.

Both sides are one engine and the same kernels; only ``paging`` differs.
"""

from __future__ import annotations

from harness.pair import Claim, Context, Pair, Tolerance, Variant
from harness.workload import Workload
from impls.serving.case import Oracle, ServeCase
from impls.serving.schedule_cost import PAGING
from impls.serving.served_model import shared
from impls.serving.supports import cannot
from impls.serving.traffic import engine_config, inputs, work


def reserve(workload: Workload, ctx: Context) -> ServeCase:
    """A contiguous run of the longest length for every request."""
    return ServeCase(workload, ctx, engine_config(workload, paging="reserve"), PAGING)


def blocks(workload: Workload, ctx: Context) -> ServeCase:
    """Blocks as tokens come."""
    return ServeCase(workload, ctx, engine_config(workload, paging="blocks"), PAGING)


PAIR = Pair(
    name="paged_kv",
    kind="serve",
    layer="system",
    relieves="capacity",
    claim=Claim(throughput="higher", memory="same", cost="a table look-up a block, preemptions when all grow at once"),
    inputs=inputs,
    shared=shared,
    oracle=Oracle,
    variants={
        "baseline": Variant(reserve, supports=cannot),
        "optimized": Variant(blocks, supports=cannot),
    },
    work=work,
    tolerance=Tolerance(rule="tokens"),
)
