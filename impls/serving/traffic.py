"""From a workload to the requests that are sent: a trace, its prompts, and what a run of them needs.

The trace's dimensions are those of :mod:`harness.serving.workload_trace`; ``slots``, ``step_tokens``, ``block_size``
and ``cache_tokens`` are the engine's sequences at once, its token budget, its blocks and its cache. With
``system_prompts`` every synthetic prompt begins with one of so many texts of ``system_tokens`` tokens, as the prompts
of an application do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from harness.errors import UsageError
from harness.pair import Context, Work
from harness.serving.synthetic import prompt_ids
from harness.serving.trace import Trace
from harness.serving.workload_trace import LENGTHS_SEED, SYNTHETIC, trace_for
from harness.workload import Workload
from impls.model.config import ModelConfig
from impls.model.resolve import config_for, head_flops, model_path, prompts_for, token_flops
from impls.serving.request import Request, Sampling
from impls.serving.scheduler import EngineConfig

ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """The requests, greedy and with no token that ends them early, and what became of the trace on its way in.

    Prompts are seeded ids, equal where the trace says that prefixes are equal; with real weights they are pieces of
    real text.

    Raises:
        UsageError: a trace or sizes that make no run.
    """
    require_sizes(workload)
    trace = requests_trace(workload, ctx.trace_path)
    vocab = config_for(workload, model_path(workload, ctx)).vocab_size
    system, systems = system_prompt(workload, ctx.trace_path)
    real = model_path(workload, ctx) is not None and (systems or not trace.prefix_block_tokens)
    longest = max(r.prompt_tokens for r in trace.requests)
    text = prompts_for(workload, ctx, systems + len(trace.requests), longest).tolist() if real else None
    requests = []
    for index, r in enumerate(trace.requests):
        if text is not None:
            head = text[r.prefix_blocks[0]][:system] if systems else []
            prompt = (head + text[systems + index])[: r.prompt_tokens]
        else:
            prompt = prompt_ids(r, index, vocab, ctx.seed, trace.prefix_block_tokens)
        sampling = Sampling(max_tokens=r.output_tokens)
        requests.append(Request(f"r{index:05d}", prompt, sampling, r.arrival))
    return {
        "requests": tuple(requests),
        "trace": {"trace_rows_refused": len(trace.refused), "trace_requests_clipped": trace.clipped},
    }


def system_prompt(workload: Workload, trace_path: str | None = None) -> tuple[int, int]:
    """Tokens of a system prompt, and how many different ones there are; (0, 0) without, as for a trace from a file."""
    count = int(workload.dims.get("system_prompts", 0)) if trace_path is None else 0
    return (int(workload.dims["system_tokens"]), count) if count else (0, 0)


def requests_trace(workload: Workload, trace_path: str | None = None) -> Trace:
    """The trace of a workload, each synthetic request with one of the system prompts before its own words.

    Which one belongs to the load, as the lengths do: it is the same for every seed.
    """
    trace = trace_for(workload, trace_path)
    system, systems = system_prompt(workload, trace_path)
    if not systems:
        return trace
    drawn = np.random.default_rng(LENGTHS_SEED).integers(systems, size=len(trace.requests)).tolist()
    requests = tuple(
        replace(r, prompt_tokens=system + r.prompt_tokens, prefix_blocks=(which,))
        for r, which in zip(trace.requests, drawn, strict=True)
    )
    return replace(trace, requests=requests, prefix_block_tokens=system)


def engine_config(workload: Workload, **switches: Any) -> EngineConfig:
    """The engine of a workload; ``switches`` are what a technique turns.

    Raises:
        UsageError: no slot, no block, or fewer tokens a step than sequences that decode in it.
    """
    require_sizes(workload)
    block, slots, budget = int(workload.block_size), int(workload.slots), int(workload.step_tokens)
    if budget < slots:
        raise UsageError(
            f"{workload.name}: {slots} requests that run at once take a token each of every step, and a step has "
            f"{budget}: give --set step_tokens={slots} or more"
        )
    system, _ = system_prompt(workload)
    return EngineConfig(
        max_running=slots,
        max_step_tokens=budget,
        block_size=block,
        num_blocks=int(workload.cache_tokens) // block,
        context=system + int(workload.max_prompt) + int(workload.max_output),
        **switches,
    )


def require_sizes(workload: Workload) -> None:
    """Nothing where an engine can have the workload's sizes.

    Raises:
        UsageError: no slot, or not one block.
    """
    block, slots, cache = int(workload.block_size), int(workload.slots), int(workload.cache_tokens)
    if slots < 1 or block < 1 or cache < block:
        raise UsageError(
            f"{workload.name}: an engine has at least one slot and one block; got slots={slots}, block_size={block} "
            f"and cache_tokens={cache}"
        )


def work(workload: Workload) -> Work:
    """Tokens out, FLOPs of prompts and answers, and the least bytes: with all slots full in every step of decode.

    A system prompt has to be computed once, however many requests begin with it. A trace file is not at hand here, so a
    workload that replays one counts requests alone, and has no floor.
    """
    if workload.trace != SYNTHETIC:
        reasons = {"items": "requests of the trace file that were served"}
        return Work(items=float(workload.requests), unit="requests", launches=0, reasons=reasons)
    config = config_for(workload)
    requests = requests_trace(workload).requests
    lengths = [(r.prompt_tokens, r.output_tokens) for r in requests]
    tokens = sum(output for _, output in lengths)
    system, _ = system_prompt(workload)
    seen: set[tuple[int, ...]] = set()
    flops = 0.0
    for r in requests:
        known = system if r.prefix_blocks in seen else 0
        seen.add(r.prefix_blocks)
        whole = r.prompt_tokens + r.output_tokens
        flops += (whole - known - 1) * token_flops(config, (known + whole) / 2)
        flops -= (r.prompt_tokens - known - 1) * head_flops(config)
    size = ITEMSIZE[workload.dtype]
    steps = math.ceil(tokens / int(workload.slots))
    weights = token_flops(config, 0) / 2 * size
    seen_tokens = sum((output - 1) * (prompt + output / 2) for prompt, output in lengths)
    kept = config.kv_values_per_token * seen_tokens * size
    return Work(
        flops=flops,
        bytes=weights * steps + kept,
        launches=steps,
        items=tokens,
        unit="tokens",
        reasons={
            "flops": "two for each weight and token of prompts and answers (the output head's from each prompt's last "
            "token on), attention over the positions seen",
            "bytes": "weights once a step with every slot full, keys and values that each step of decode sees",
        },
    )


def cache_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Memory of a cache of so many token slots."""
    return config.kv_values_per_token * tokens * itemsize
