"""Prefix caching: every prompt computed in full, against blocks of a text that is in the cache used again.

Requests of one application begin alike (a system prompt, examples, the conversation so far), and keys and values of a
token depend on nothing but the text up to it. The plain way runs all P tokens of every prompt. With prefix caching the
full blocks of B tokens keep their text's name after their request is over (hashes chained over the block before: vLLM,
built on Kwon et al., SOSP 2023, "PagedAttention", section 4.4; a tree of prefixes: Zheng et al., NeurIPS 2024,
"SGLang", section 3, RadixAttention), and a prompt starts at the first token that no such block holds. Blocks that
nobody holds are evicted least recently used first, when the memory is needed.

    of a prompt whose first K tokens are known    plain       cached
    tokens run                                    P           P - B·⌊K / B⌋, at least 1
    reads of keys and values                      the same: attention still sees all P
    blocks held by R requests with that prefix    R·P / B     K / B + R·(P - K) / B

Per prompt token there are 2·W FLOPs (W weights) to save, so at hit rate h a prefill that arithmetic binds takes 1 - h
of its time, and a first token comes that much earlier, the queue before it shorter by as much again. A step of decode
is what it was: ITL moves only as far as chunks of prompts shared its steps. Nothing known, nothing gained; what is paid
then is a hash and a look-up a block, and the text of each cached block in host memory.

``predict`` runs both schedules with every token at one price and the fixed cost of a step nil, (P + N) / (P·(1 - h) +
N) for answers of N tokens: the most that can be gained. The record's counter ``allowed_speedup`` does the same at the
prices that were fitted to the measured steps; ``cache_hit_rate`` is h. Every run begins with an empty cache.

Both sides are one engine and the same kernels; only ``prefix_caching`` differs.
"""

from __future__ import annotations

from harness.pair import Claim, Context, Pair, Tolerance, Variant
from harness.serving.synthetic import prompt_ids
from harness.serving.workload_trace import SYNTHETIC
from harness.workload import Workload
from impls.serving.case import Oracle, ServeCase
from impls.serving.request import Request, Sampling
from impls.serving.schedule_cost import PREFIX_CACHING, StepCost, allowed_speedup
from impls.serving.served_model import shared
from impls.serving.supports import cannot
from impls.serving.traffic import engine_config, inputs, requests_trace, work

#: Ids that stand for words where a schedule is run without a model: enough that texts differ.
WORDS = 1 << 15


def plain(workload: Workload, ctx: Context) -> ServeCase:
    """Every prompt is run in full."""
    return ServeCase(workload, ctx, engine_config(workload, prefix_caching=False), PREFIX_CACHING)


def cached(workload: Workload, ctx: Context) -> ServeCase:
    """Prompts start behind what the cache holds of them."""
    return ServeCase(workload, ctx, engine_config(workload, prefix_caching=True), PREFIX_CACHING)


def predict(workload: Workload) -> float | None:
    """Tokens that the plain schedule runs over those of the cached one."""
    if workload.trace != SYNTHETIC:
        return None
    trace = requests_trace(workload)
    requests = [
        Request(
            str(index),
            prompt_ids(r, index, WORDS, 0, trace.prefix_block_tokens),
            Sampling(max_tokens=r.output_tokens),
        )
        for index, r in enumerate(trace.requests)
    ]
    price = StepCost(fixed=0.0, prefill=1.0, decode=1.0)
    return allowed_speedup(requests, engine_config(workload), price, PREFIX_CACHING)


PAIR = Pair(
    name="prefix_caching",
    kind="serve",
    layer="system",
    relieves="compute",
    claim=Claim(
        latency="lower",
        throughput="higher",
        cost="a hash and a look-up a block; first tokens come earlier, the pace of later ones stays",
    ),
    inputs=inputs,
    shared=shared,
    oracle=Oracle,
    variants={
        "baseline": Variant(plain, supports=cannot),
        "optimized": Variant(cached, supports=cannot),
    },
    work=work,
    predict=predict,
    tolerance=Tolerance(rule="tokens"),
)
