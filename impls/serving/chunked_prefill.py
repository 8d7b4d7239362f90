"""Chunked prefill: whole prompts in one step, against chunks under a token budget that decodes share.

A prompt of P tokens that joins D sequences in decode. Run whole, its step takes as long as P + D tokens take, and each
of the D waits for it: a stall in their inter-token latency that grows with the longest prompt. Under a budget of T
tokens a step (Agrawal et al., OSDI 2024, "Sarathi-Serve", section 4) every step runs the decodes and T - D tokens of
the prompt, so no step is longer than T tokens take.

    longest gap between tokens   whole about t(P_max),  chunked about t(T)
    time to first token          whole about t(P),      chunked ⌈P / (T - D)⌉ · t(T)

One is paid with the other: TTFT rises because decodes go along with every chunk and because a chunk's attention reads
what came before it again. Read p99 ITL and p99 TTFT together.

Throughput is not promised to move. A step has a price that does not depend on its tokens (the weights are read, the
host works), and chunks pay it once each: with budgets of some thousand tokens that is little, and nothing is lost while
requests come slower than they are served. With small budgets and a queue that never empties, the run takes longer by
the steps that chunks add; a record's counter ``allowed_speedup``, then below 1, says by how much at measured prices.

Both sides are one engine with the same kernels and CUDA graphs; only ``chunked_prefill`` differs. On a GPU steps with
prompts are replayed as steps of decodes are, where a graph has room for them (:mod:`impls.serving.chunk_graphs`): to
launch every kernel by itself can take the host longer than a small chunk takes the device, and more steps would then
cost more than their schedule asks for.
"""

from __future__ import annotations

from harness.pair import Claim, Context, Pair, Tolerance, Variant
from harness.workload import Workload
from impls.serving.case import Oracle, ServeCase
from impls.serving.schedule_cost import CHUNKING
from impls.serving.served_model import shared
from impls.serving.supports import cannot
from impls.serving.traffic import engine_config, inputs, work


def whole(workload: Workload, ctx: Context) -> ServeCase:
    """A prompt runs in one step, however long."""
    return ServeCase(workload, ctx, engine_config(workload, chunked_prefill=False), CHUNKING)


def chunked(workload: Workload, ctx: Context) -> ServeCase:
    """No step runs more tokens than the budget."""
    return ServeCase(workload, ctx, engine_config(workload, chunked_prefill=True), CHUNKING)


PAIR = Pair(
    name="chunked_prefill",
    kind="serve",
    layer="system",
    relieves="compute",
    # What falls is p99 ITL; the time of the whole run, which a claim of latency is about, is what it was or longer.
    claim=Claim(throughput="same", cost="a later first token, and a step's fixed price for every chunk"),
    inputs=inputs,
    shared=shared,
    oracle=Oracle,
    variants={
        "baseline": Variant(whole, supports=cannot),
        "optimized": Variant(chunked, supports=cannot),
    },
    work=work,
    tolerance=Tolerance(rule="tokens"),
)
