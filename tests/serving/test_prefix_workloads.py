"""The workloads of prefix_caching: what is shared in them, what of it a cache can hit, and what the pair says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.discover import find, load_pair, workloads_of
from harness.pair import Context, Inputs
from harness.serving.metrics import summarize
from harness.serving.traces import load_trace
from harness.serving.workload_trace import trace_for
from impls.model.fetch import default_model_path
from impls.serving.engine import Engine
from impls.serving.recorder import Recorder
from impls.serving.request import Request
from impls.serving.scheduler import EngineConfig
from impls.serving.traffic import system_prompt

VOCAB = 512
TRACE = "mooncake_conversation_trace.jsonl"


def allowed_hits(requests: list[Request], size: int) -> int:
    """Tokens that full blocks of earlier prompts allow to be known, when nothing is ever evicted."""
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for request in requests:
        text = tuple(request.prompt)
        full = [text[: (i + 1) * size] for i in range(len(text) // size)]
        known = 0
        while known < len(full) and full[known] in seen:
            known += 1
        hits += min(known * size, len(text) - 1)
        seen.update(full)
    return hits


def mooncake(shared: Path):
    """The trace at a 128th of its lengths: a block of it is one of the engine's."""
    technique = find("prefix_caching")
    pair = load_pair(technique)
    workload = next(w for w in workloads_of(technique) if w.name == "tiny")
    dims = {"requests": 700, "max_prompt": 250, "max_output": 4, "block_size": 4}
    workload = workload.replace(trace=TRACE, length_scale=1 / 128, time_scale=1e-9, system_prompts=0, **dims)
    path = str(shared / "traces" / TRACE)
    return pair, workload, Context(torch.device("cpu"), torch.float32, seed=3, trace_path=path)


LONG = EngineConfig(
    max_running=1, max_step_tokens=64, block_size=4, num_blocks=25_000, context=254, prefix_caching=True
)  # fmt: skip


@pytest.mark.parametrize("slots", [1, 8])
def test_the_hit_rate_is_what_the_trace_allows_when_memory_suffices(fake, shared, slots):
    pair, workload, ctx = mooncake(shared)
    requests = list(pair.inputs(workload, ctx)["requests"])
    trace = trace_for(workload, ctx.trace_path)
    assert trace.prefix_block_tokens == workload.block_size == 4
    config = replace(LONG, max_running=slots, lookahead=slots > 1)
    engine = Engine(fake.Runner(VOCAB, config.num_blocks, 4), config, recorder=Recorder())
    engine.serve(requests)
    allowed = allowed_hits(requests, 4)
    assert engine.counters["cached_tokens"] == allowed > 0
    rate = summarize(engine.recorder.timeline()).metrics["cache_hit_rate"]["value"]
    assert rate == pytest.approx(allowed / sum(len(r.prompt) for r in requests))
    # The same from the trace alone: ids that an earlier request began with too.
    seen: set[tuple[int, ...]] = set()
    by_ids = 0
    for r in trace.requests:
        full = r.prefix_blocks[: r.prompt_tokens // 4]
        known = max((i for i in range(len(full) + 1) if full[:i] in seen), default=0)
        by_ids += min(known * 4, r.prompt_tokens - 1)
        seen.update(full[:i] for i in range(1, len(full) + 1))
    assert by_ids == allowed


def test_a_cache_that_is_too_small_for_all_that_is_shared_hits_less(fake, shared):
    pair, workload, ctx = mooncake(shared)
    requests = list(pair.inputs(workload, ctx)["requests"])
    found = []
    for blocks in (70, 2000, LONG.num_blocks):
        engine = Engine(fake.Runner(VOCAB, blocks, 4), replace(LONG, num_blocks=blocks))
        engine.serve(requests)
        found.append(engine.counters["cached_tokens"])
    assert found[0] < found[1] < found[2]


def test_equal_hash_ids_give_equal_tokens_and_others_do_not(shared):
    pair, workload, ctx = mooncake(shared)
    requests = pair.inputs(workload, ctx)["requests"]
    rows = load_trace(shared / "traces" / TRACE).requests[:700]
    of_id: dict[int, set[tuple[int, ...]]] = {}
    for request, row in zip(requests, rows, strict=True):
        for place, block in enumerate(row.prefix_blocks):
            text = tuple(request.prompt[place * 4 : (place + 1) * 4])
            if len(text) == 4:
                of_id.setdefault(block, set()).add(text)
    assert all(len(texts) == 1 for texts in of_id.values())
    assert len({text for texts in of_id.values() for text in texts}) == len(of_id) > 1000


def tiny(**dims):
    technique = find("prefix_caching")
    workload = next(w for w in workloads_of(technique) if w.name == "tiny")
    return load_pair(technique), workload.replace(**dims) if dims else workload


def test_the_prediction_is_the_ratio_of_tokens_that_run():
    pair, workload = tiny()
    ctx = Context(torch.device("cpu"), torch.float32, seed=3)
    inputs = Inputs(pair.inputs(workload, ctx), 3)
    counts = []
    for variant in ("baseline", "optimized"):
        case = pair.variant(variant).fn(workload, ctx)
        case.load(inputs)
        case.run()
        counts.append(case.counters())
    run = [c["prefill_tokens"] + c["decode_tokens"] for c in counts]
    assert pair.predict(workload) == pytest.approx(run[0] / run[1])
    assert "cache_hit_rate" not in counts[0]
    requests = list(inputs["requests"])
    rate = allowed_hits(requests, workload.block_size) / sum(len(r.prompt) for r in requests)
    assert counts[1]["cache_hit_rate"] == pytest.approx(rate)
    assert min(c["allowed_speedup"] for c in counts) > 1.0


def test_system_prompts_are_shared_by_those_that_have_them_and_end_within_a_block():
    pair, workload = tiny()
    system, count = system_prompt(workload)
    assert system % workload.block_size
    first, second = (
        pair.inputs(workload, Context(torch.device("cpu"), torch.float32, seed=seed))["requests"] for seed in (1, 2)
    )
    heads = [tuple(r.prompt[:system]) for r in first]
    assert len(set(heads)) == count
    assert len({tuple(r.prompt[: system + 1]) for r in first}) > count
    assert [len(r.prompt) for r in first] == [len(r.prompt) for r in second]
    assert not set(heads) & {tuple(r.prompt[:system]) for r in second}


@pytest.mark.parametrize("model", ["tiny", "smollm2-135m-instruct"])
def test_a_trace_from_a_file_is_sent_without_system_prompts(shared, model):
    if model != "tiny" and default_model_path() is None:
        pytest.skip("real weights are not here: run 'pairbench models fetch'")
    pair, workload = tiny(model=model, requests=4, max_prompt=300)
    path = str(shared / "traces" / "AzureLLMInferenceTrace_conv.csv")
    ctx = Context(torch.device("cpu"), torch.float32, seed=3, trace_path=path)
    sent = pair.inputs(workload, ctx)["requests"]
    assert [len(r.prompt) for r in sent] == [r.prompt_tokens for r in trace_for(workload, path).requests]


def test_a_system_prompt_is_work_once():
    pair, workload = tiny()
    alone = pair.work(workload.replace(system_prompts=0))
    shared = pair.work(workload)
    each = pair.work(workload.replace(system_prompts=10_000))
    assert alone.flops < shared.flops < 0.5 * each.flops
    assert alone.items == shared.items == each.items
