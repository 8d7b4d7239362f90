"""From a workload to the requests that are sent: a trace, its prompts, and what a run of them needs.

Dimensions of a serving workload:

============== =======================================================================================================
trace          ``synthetic`` (log-normal lengths), or a file that ``--trace`` gives
requests       how many; of a file the first so many
request_rate   mean arrivals a second; 0 sends all at time 0 (synthetic) or keeps the trace's own times
burstiness     coefficient of variation of synthetic gaps: 1 is Poisson, above it requests come in bursts
prompt_median, output_median, sigma    of the synthetic lengths
length_scale, time_scale               lengths and times of a file are multiplied by them
max_prompt, max_output                 longer ones are cut
slots, step_tokens, block_size, cache_tokens    the engine's sequences at once, token budget, block, cache
============== =======================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from harness.pair import Context, Work
from harness.serving.synthetic import prompt_ids, synthetic_trace
from harness.serving.trace import Shape, Trace
from harness.serving.traces import load_trace
from harness.workload import Workload
from impls.model.config import ModelConfig
from impls.model.resolve import config_for, model_path, prompts_for, token_flops
from impls.serving.request import Request, Sampling
from impls.serving.scheduler import EngineConfig

SYNTHETIC = "synthetic"
ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
#: Lengths and arrivals belong to the workload, so every seed sends the same load; only the words differ.
LENGTHS_SEED = 0


def trace_for(workload: Workload, trace_path: str | None = None) -> Trace:
    """The trace that a workload names, fitted to its limits.

    Raises:
        UsageError: the file is missing or has no usable row.
        ValueError: the workload names a trace file and none was given.
    """
    rate = float(workload.request_rate)
    if trace_path is not None:
        shape = Shape(
            time_scale=float(workload.dims.get("time_scale", 1.0)),
            length_scale=float(workload.dims.get("length_scale", 1.0)),
            limit=int(workload.requests),
            max_prompt=int(workload.max_prompt),
            max_output=int(workload.max_output),
            request_rate=rate,
        )
        return load_trace(trace_path, shape)
    if workload.trace != SYNTHETIC:
        raise ValueError(f"workload {workload.name!r} replays {workload.trace}: give the file with --trace PATH")
    return synthetic_trace(
        int(workload.requests),
        rate or math.inf,
        LENGTHS_SEED,
        cv=float(workload.dims.get("burstiness", 1.0)),
        prompt_median=float(workload.prompt_median),
        output_median=float(workload.output_median),
        sigma=float(workload.sigma),
        max_prompt=int(workload.max_prompt),
        max_output=int(workload.max_output),
    )


def needs_trace(workload: Workload) -> str | None:
    """Why a workload that names a trace file cannot run without it, for ``Variant(supports=...)``."""
    if workload.trace != SYNTHETIC and "trace" not in workload.digests:
        return f"replays {workload.trace}: give the file with --trace PATH"
    return None


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """The requests, greedy and with no token that ends them early: ``{"requests": [...], "trace": digest}``.

    Prompts are seeded ids, equal where the trace says that prefixes are equal; with real weights they are pieces of
    real text.
    """
    trace = trace_for(workload, ctx.trace_path)
    vocab = config_for(workload, model_path(workload, ctx)).vocab_size
    real = model_path(workload, ctx) is not None and not trace.prefix_block_tokens
    longest = max(r.prompt_tokens for r in trace.requests)
    text = prompts_for(workload, ctx, len(trace.requests), longest).tolist() if real else None
    requests = []
    for index, r in enumerate(trace.requests):
        if text is not None:
            prompt = text[index][: r.prompt_tokens]
        else:
            prompt = prompt_ids(r, index, vocab, ctx.seed, trace.prefix_block_tokens)
        sampling = Sampling(max_tokens=r.output_tokens)
        requests.append(Request(f"r{index:05d}", prompt, sampling, r.arrival))
    return {"requests": tuple(requests), "trace": trace.digest}


def engine_config(workload: Workload, **switches: Any) -> EngineConfig:
    """The engine of a workload; ``switches`` are what a technique turns."""
    block = int(workload.block_size)
    return EngineConfig(
        max_running=int(workload.slots),
        max_step_tokens=int(workload.step_tokens),
        block_size=block,
        num_blocks=int(workload.cache_tokens) // block,
        context=int(workload.max_prompt) + int(workload.max_output),
        **switches,
    )


def work(workload: Workload) -> Work:
    """Tokens out, FLOPs of prompts and answers, and the least bytes: with all slots full in every step of decode.

    A trace file is not at hand here, so a workload that replays one counts requests alone.
    """
    if workload.trace != SYNTHETIC:
        return Work(items=float(workload.requests), unit="requests", reasons={"items": "requests of the trace file"})
    config = config_for(workload)
    lengths = [(r.prompt_tokens, r.output_tokens) for r in trace_for(workload).requests]
    tokens = sum(output for _, output in lengths)
    flops = sum((prompt + output - 1) * token_flops(config, (prompt + output) / 2) for prompt, output in lengths)
    size = ITEMSIZE[workload.dtype]
    steps = math.ceil(tokens / int(workload.slots))
    weights = token_flops(config, 0) / 2 * size
    kept = sum(config.kv_values_per_token * output * (prompt + output / 2) for prompt, output in lengths) * size
    return Work(
        flops=flops,
        bytes=weights * steps + kept,
        launches=steps,
        items=tokens,
        unit="tokens",
        reasons={
            "flops": "two for each weight and token of prompts and answers, attention over the positions seen",
            "bytes": "weights once a step with every slot full, keys and values that each answer's tokens see",
        },
    )


def cache_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Memory of a cache of so many token slots."""
    return config.kv_values_per_token * tokens * itemsize
