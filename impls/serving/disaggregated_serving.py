"""Disaggregated serving: engines side by side that each do everything, against ranks for prompts and for answers.

A prompt is bound by arithmetic, a step of decode by memory, and in one engine each is in the other's way: a chunk of a
prompt makes that step longer for all that decode, and decodes take a part of every chunk's budget. Apart (Zhong et al.,
OSDI 2024, "DistServe", sections 2 and 3; Patel et al., ISCA 2024, "Splitwise", section 4; Qin et al., FAST 2025,
"Mooncake", section 3) a prefill rank runs prompts alone and gives the first token, the blocks of the prompt travel, and
a decode rank runs steps of one token a sequence and nothing else.

Both sides have R ranks, the same trace, weights, kernels and engine, a cache of ``cache_tokens`` on every rank, and as
many slots in all. ``baseline`` is what those GPUs give today: R engines with chunked prefill, behind a router that
gives each request to the engine with the fewest tokens so far (answers counted, which no router can know).
``optimized`` has ``prefill_ranks`` of the R for prompts. Figures are over all ranks together.

    gap between tokens       side by side  t(T) in every step with a chunk, T the budget      apart  t(D) always
    first to second token    side by side  one step      apart  wait for room + transfer + up to two steps
    transfer, P tokens       apart  2·L·K·E·e·B·⌈P / B⌉ bytes over the link: L layers, K key-value heads of E numbers of
                                    e bytes, whole blocks of B tokens
    cache for answers        side by side  R ranks'      apart  the decode ranks' alone

Relieved: no prompt interrupts decode, so the tail of ITL comes down to a step's own time, and chunks need no longer be
small for its sake (``prefill_step_tokens``). Paid: the bytes over the link, once a request (131 kB a token for a model
of Llama-3-8B's shape in bfloat16: 0.3 ms for 1,000 tokens at the 395 GB/s of NVLink between two H200, where the prompt
takes 26 ms; 5 ms at 25 GB/s); the prefill ranks' cache, which only holds what waits for room; and ranks that idle
wherever prompts and answers do not come in the proportion that the ranks were divided in. A decode rank without room
holds the prefill rank back, and TTFT grows. Throughput is not promised: the same FLOPs and bytes are spread over the
same GPUs, and less evenly.

Blocks leave when their prompt is complete, in pieces of some layers. To send each layer while the next is computed
("Splitwise", section 4) would hide what the table calls transfer: a hundredth of the prompt's own time over NVLink.

``predict`` is the ratio of the two run times with all requests there at once: both schedules are run at a price of 1 a
step and 1 / n a token, n tokens being what a step runs in the time that reading the weights takes; apart the slower
role decides, as if neither had to wait for the other. So it is the most that can be gained, by the wider batches of a
decode rank; it is below 1 where the ranks are divided badly. The counter ``allowed_speedup`` is the same at the prices
that were fitted to the measured steps, with requests coming when they came.

What the technique is for is to be read in ``itl_p99``, ``tpot_p99`` and goodput under the SLO that one has. Counters:
``transferred_bytes`` as counted and by the formula, ``transfer_wait`` (first token to admission), ``transfer`` (what of
it the blocks took), ``second_token``, ``busy_share_rank`` and tokens a second over all ranks and over the decode ranks
alone, which flatters.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Any, Final

from harness.pair import Claim, Context, Pair, Tolerance, Variant, Work
from harness.serving.workload_trace import SYNTHETIC
from harness.workload import Workload
from impls.serving import traffic
from impls.serving.case import Oracle
from impls.serving.ranked_case import InRoles, SideBySide, share_out
from impls.serving.request import Request, Sampling
from impls.serving.schedule_cost import StepCost, simulate
from impls.serving.scheduler import EngineConfig
from impls.serving.served_model import shared
from impls.serving.supports import cannot
from impls.serving.traffic import engine_config, inputs, requests_trace

#: Tokens that a step runs in the time that it takes to read the weights: an H200's 620 TFLOP/s over 4.28 TB/s, and a
#: core or two of a CPU.
BALANCE: Final = {"bfloat16": 145.0, "float16": 145.0, "float32": 8.0, "float64": 8.0}


def prefill_config(workload: Workload, **switches: Any) -> EngineConfig:
    """The engine of a prefill rank: the workload's, with a budget of its own if ``prefill_step_tokens`` gives one."""
    budget = int(workload.dims.get("prefill_step_tokens", workload.step_tokens))
    return replace(engine_config(workload, **switches), max_step_tokens=budget)


def decode_config(workload: Workload, **switches: Any) -> EngineConfig:
    """The engine of a decode rank: it has its share of the slots of all ranks, and the cache of one."""
    return replace(engine_config(workload, **switches), max_running=decode_slots(workload))


def decode_slots(workload: Workload) -> int:
    """Sequences at once on a decode rank, so that all ranks together have as many either way."""
    return int(workload.slots) * workload.ranks // (workload.ranks - int(workload.prefill_ranks))


def unfit(workload: Workload) -> str | None:
    """Why this cannot run: what it needs is not here, or no rank would be left for a role."""
    if not 0 < int(workload.prefill_ranks) < workload.ranks:
        return f"of {workload.ranks} ranks, {workload.prefill_ranks} for prompts leave a role without any"
    return cannot(workload)


def side_by_side(workload: Workload, ctx: Context) -> SideBySide:
    """Every rank an engine of its own, prompts in chunks between the decodes."""
    return SideBySide(workload, ctx, engine_config(workload), partial(allowed_speedup, workload))


def apart(workload: Workload, ctx: Context) -> InRoles:
    """Some ranks for prompts, the others for answers."""
    roles = (prefill_config(workload), decode_config(workload))
    return InRoles(workload, ctx, roles, int(workload.prefill_ranks), partial(allowed_speedup, workload))


def work(workload: Workload) -> Work:
    """As for one engine, with the widest batch that either way has: a decode rank's. Nothing has to cross the link."""
    return traffic.work(workload.replace(slots=decode_slots(workload)))


def allowed_speedup(workload: Workload, requests: Items[Request], price: StepCost) -> float:
    """Run time side by side over that apart if schedules alone decided, requests coming at their arrivals.

    Apart, the slower role decides, and takes no time for what the other one does.
    """
    ranks, first = workload.ranks, int(workload.prefill_ranks)

    def slowest(part: Items[Request], shares: int, config: EngineConfig, price: StepCost) -> float:
        where = share_out([len(r.prompt) + r.sampling.max_tokens for r in part], shares)
        each = [[r for r, share in zip(part, where, strict=True) if share == one] for one in range(shares)]
        return max(simulate(mine, config, price) for mine in each)

    together = slowest(requests, ranks, engine_config(workload), price)
    prompts = [replace(r, sampling=Sampling(max_tokens=1)) for r in requests]
    apart = slowest(prompts, first, prefill_config(workload), price)
    answers = [replace(r, sampling=Sampling(max_tokens=n)) for r in requests if (n := r.sampling.max_tokens - 1)]
    # Prompts take their place in the decode side's cache and none of its time.
    free = replace(decode_config(workload), max_step_tokens=1 << 40)
    apart = max(apart, slowest(answers, ranks - first, free, replace(price, prefill=0.0)))
    return together / apart if apart > 0 else 1.0


def predict(workload: Workload) -> float | None:
    """The same at the docstring's price, every request there at once."""
    if workload.trace != SYNTHETIC:
        return None
    lengths = [(r.prompt_tokens, r.output_tokens) for r in requests_trace(workload).requests]
    requests = [Request(str(i), [1] * p, Sampling(max_tokens=n)) for i, (p, n) in enumerate(lengths)]
    token = 1.0 / BALANCE[workload.dtype]
    return allowed_speedup(workload, requests, StepCost(fixed=1.0, prefill=token, decode=token))


PAIR = Pair(
    name="disaggregated_serving",
    kind="serve",
    layer="system",
    relieves="compute",
    claim=Claim(
        communication="higher",
        cost="keys and values over the link, and a role that idles where the mix does not fit; gained is ITL's tail",
    ),
    inputs=inputs,
    shared=shared,
    oracle=Oracle,
    variants={
        "baseline": Variant(side_by_side, requires=("ranks>=2",), supports=unfit),
        "optimized": Variant(apart, requires=("ranks>=2",), supports=unfit),
    },
    work=work,
    predict=predict,
    tolerance=Tolerance(rule="tokens"),
)
