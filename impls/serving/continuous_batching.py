"""Continuous batching: batches that start and end together, against requests that join and leave at every step.

S slots, answers of N_1, N_2, … tokens, all requests there at the start. Batched together (rows that finish are dropped,
so no work is wasted on them), a batch lasts as long as its longest answer while its slots fall empty. At the level of
iterations (Yu et al., OSDI 2022, "Orca", section 3) a freed slot takes the next request at once.

    steps   static      Σ over batches of the longest N in it
            continuous  about Σ N / S

A step of decode costs nearly the same for few rows as for many while reading the weights binds, so throughput rises by
the ratio of steps; the more the lengths differ, the more. With equal lengths nothing is gained. What is paid: a prompt
that joins makes that step longer for everyone (see ``chunked_prefill``).

``predict`` is the ratio for steps of equal cost; a record's counter ``allowed_speedup`` is the ratio with prompts and
steps at the cost that was measured, and what was reached is to be read against that.

Both sides are one engine; only ``batching`` differs. ``invariant`` is the optimized one in the batch-invariant mode: it
says what it costs that a request's numbers do not depend on its neighbours to the bit.
"""

from __future__ import annotations

from harness.pair import Claim, Context, Pair, Tolerance, Variant
from harness.serving.workload_trace import SYNTHETIC, trace_for
from harness.workload import Workload
from impls.serving.case import Oracle, ServeCase
from impls.serving.request import Request, Sampling
from impls.serving.schedule_cost import BATCHING, StepCost, allowed_speedup
from impls.serving.served_model import shared
from impls.serving.supports import cannot
from impls.serving.traffic import engine_config, inputs, work


def static(workload: Workload, ctx: Context) -> ServeCase:
    """The next batch starts when the last answer of this one is complete."""
    return ServeCase(workload, ctx, engine_config(workload, batching="static"), BATCHING)


def continuous(workload: Workload, ctx: Context) -> ServeCase:
    """Requests join and leave at every step."""
    return ServeCase(workload, ctx, engine_config(workload, batching="continuous"), BATCHING)


def invariant(workload: Workload, ctx: Context) -> ServeCase:
    """The same, every pass of one shape and one order of summation."""
    return ServeCase(workload, ctx, engine_config(workload, batching="continuous", batch_invariant=True), BATCHING)


def predict(workload: Workload) -> float | None:
    """The ratio of steps, every step costing the same."""
    if workload.trace != SYNTHETIC:
        return None
    lengths = [(r.prompt_tokens, r.output_tokens) for r in trace_for(workload).requests]
    requests = [Request(str(i), [0] * p, Sampling(max_tokens=n)) for i, (p, n) in enumerate(lengths)]
    return allowed_speedup(requests, engine_config(workload), StepCost(fixed=1.0, prefill=0.0, decode=0.0))


PAIR = Pair(
    name="continuous_batching",
    kind="serve",
    layer="system",
    relieves="capacity",
    claim=Claim(throughput="higher", cost="a prompt that joins delays those that decode"),
    inputs=inputs,
    shared=shared,
    oracle=Oracle,
    variants={
        "baseline": Variant(static, supports=cannot),
        "optimized": Variant(continuous, supports=cannot),
        "invariant": Variant(invariant, supports=cannot),
    },
    work=work,
    predict=predict,
    tolerance=Tolerance(rule="tokens"),
)
