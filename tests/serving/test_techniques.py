"""The serving techniques: each pair is one switch of one engine, right on both sides, and worth what it claims."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from harness.check import judge_scored
from harness.discover import find, load_pair, workloads_of
from harness.errors import UsageError
from harness.pair import Context, Inputs
from harness.serving.metrics import summarize
from harness.serving.workload_trace import trace_for
from impls.model.fetch import default_model_path
from impls.model.resolve import config_for
from impls.serving.engine import Engine
from impls.serving.recorder import Recorder
from impls.serving.request import Request, Sampling
from impls.serving.schedule_cost import BATCHING, CHUNKING, PAGING, StepCost, allowed_speedup, simulate
from impls.serving.scheduler import EngineConfig

SERVE = ("paged_kv", "continuous_batching", "chunked_prefill", "kv_offload", "prefix_caching")
SWITCH = {
    "paged_kv": {"paging"},
    "continuous_batching": {"batching"},
    "chunked_prefill": {"chunked_prefill"},
    "kv_offload": {"preemption", "host_blocks"},
    "prefix_caching": {"prefix_caching"},
}
TRACE = "AzureLLMInferenceTrace_conv.csv"


def smoke(name, **dims):
    technique = find(name)
    workload = next(w for w in workloads_of(technique) if w.tier == "smoke")
    return load_pair(technique), workload.replace(**dims) if dims else workload


def context(workload, **more):
    return Context(torch.device("cpu"), getattr(torch, workload.dtype), seed=3, **more)


def served(pair, workload, variant, ctx, inputs):
    case = pair.variant(variant).fn(workload, ctx)
    case.load(inputs)
    case.run()
    return case


@pytest.mark.parametrize("name", SERVE)
def test_both_sides_give_the_oracles_tokens_and_differ_in_one_switch(name):
    pair, workload = smoke(name, requests=10)
    ctx = context(workload)
    inputs = Inputs(pair.inputs(workload, ctx), 3)
    oracle = pair.oracle(workload, ctx)
    oracle.load(inputs)
    oracle.run()
    configs = []
    for variant in ("baseline", "optimized"):
        case = served(pair, workload, variant, ctx, inputs)
        assert case.result() == oracle.result()
        case.load(inputs)
        case.run()
        assert case.result() == oracle.result(), "a second run differs from the first"
        summary = summarize(case.timeline())
        assert summary.metrics["failed_requests"]["value"] == 0
        assert summary.serve["requests"]["finished"] == 10
        configs.append(dataclasses.asdict(case.config))
        # What the schedules allow is said of this switch. Swapped blocks have a price that steps do not tell.
        assert ("allowed_speedup" in case.counters()) == (case.switch is not None) == (name != "kv_offload")
        if case.switch is not None:
            assert case.switch[len(configs) - 1] == {key: configs[-1][key] for key in SWITCH[name]}
        case.close()
    changed = {key for key in configs[0] if configs[0][key] != configs[1][key]}
    assert changed <= SWITCH[name]
    assert changed & SWITCH[name]


@pytest.mark.parametrize("name", [*SERVE, "disaggregated_serving", "speculative_decoding"])
def test_the_weights_that_a_case_reads_are_those_that_its_pair_calls_shared(name):
    pair, workload = smoke(name)
    ctx = context(workload)
    (model,) = pair.shared(workload, ctx)
    if name != "disaggregated_serving":  # its cases need a group of ranks
        case = pair.variant("optimized").fn(workload, ctx)
        assert (case.runner if name in SERVE else case).model is model


def test_lower_precision_is_judged_by_the_logits_that_rounding_explains():
    pair, workload = smoke("continuous_batching", requests=6, dtype="bfloat16")
    ctx = context(workload)
    inputs = Inputs(pair.inputs(workload, ctx), 3)
    oracle = pair.oracle(workload, ctx)
    oracle.load(inputs)
    oracle.run()
    result = served(pair, workload, "optimized", ctx, inputs).result()
    assert judge_scored(oracle.score(result)).passed
    wrong = {key: [(token + 1) % 512 for token in tokens] for key, tokens in result.items()}
    assert not judge_scored(oracle.score(wrong)).passed
    short = {**result, "r00000": result["r00000"][:-1]}
    assert not judge_scored(oracle.score(short)).passed


def test_blocks_waste_less_of_the_cache_and_run_more_at_once():
    pair, workload = smoke("paged_kv", requests=12)
    ctx = context(workload)
    inputs = Inputs(pair.inputs(workload, ctx), 3)
    figures = [summarize(served(pair, workload, v, ctx, inputs).timeline()).metrics for v in ("baseline", "optimized")]
    waste, running = ([f[key]["value"] for f in figures] for key in ("cache_waste", "running_requests"))
    assert waste[1] < 0.25 < 0.5 < waste[0]
    assert running[1] > 1.3 * running[0]


def test_a_workload_that_cannot_be_served_says_why():
    pair, workload = smoke("continuous_batching", requests=8, cache_tokens=32)
    ctx = context(workload)
    inputs = Inputs(pair.inputs(workload, ctx), 3)
    with pytest.raises(RuntimeError, match=r"\d of 8 requests were not served: r\d+ refused: .* the cache of 32"):
        served(pair, workload, "optimized", ctx, inputs)
    _, workload = smoke("continuous_batching", slots=65)
    with pytest.raises(UsageError, match="give --set step_tokens=65 or more"):
        pair.variant("optimized").fn(workload, ctx)
    _, workload = smoke("continuous_batching", requests=0)
    with pytest.raises(UsageError, match="requests must be at least 1"):
        pair.inputs(workload, ctx)


@pytest.mark.parametrize("sizes", [{"slots": 0}, {"block_size": 0}, {"cache_tokens": 15}], ids=str)
def test_sizes_that_no_engine_can_have_are_bad_use_and_named(sizes):
    _, workload = smoke("continuous_batching")
    pair, workload = smoke("continuous_batching", step_tokens=workload.slots, **sizes)
    with pytest.raises(UsageError, match=f"one slot and one block.*{next(iter(sizes))}={next(iter(sizes.values()))}"):
        pair.inputs(workload, context(workload))


@pytest.mark.parametrize("name", ["continuous_batching", "kv_cache"])
def test_the_work_of_a_run_is_the_products_that_it_takes(name):
    # Logits are asked for at a prompt's last token and behind it: an output head for each token would be 9 % more.
    pair, workload = smoke(name, **({"requests": 6} if name == "continuous_batching" else {}))
    ctx = context(workload)
    inputs = Inputs(pair.inputs(workload, ctx), 3)
    case = pair.variant("optimized").fn(workload, ctx)
    case.load(inputs)
    with FlopCounterMode(display=False) as counter:
        case.run()
    if name == "continuous_batching":
        lengths = [len(r.prompt) + r.sampling.max_tokens for r in inputs["requests"]]
    else:
        lengths = [workload.prompt + workload.new] * workload.batch
    config = config_for(workload)
    seen = sum(length * (length - 1) / 2 for length in lengths)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * seen
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert pair.work(workload).flops - attention == pytest.approx(products, rel=0.003)


def test_swapping_computes_nothing_again():
    pair, workload = smoke("kv_offload", requests=16)
    ctx = context(workload)
    inputs = Inputs(pair.inputs(workload, ctx), 3)
    again, swapped = (served(pair, workload, v, ctx, inputs).counters() for v in ("baseline", "optimized"))
    assert again["recomputed_tokens"] > 0
    assert swapped["recomputed_tokens"] == 0
    assert swapped["swapped_blocks"] > 0
    assert swapped["prefill_tokens"] < again["prefill_tokens"]


def test_fresh_inputs_are_other_words_under_the_same_load():
    pair, workload = smoke("paged_kv", requests=5)
    first, second = (pair.inputs(workload, dataclasses.replace(context(workload), seed=s))["requests"] for s in (1, 2))
    assert [(len(a.prompt), a.sampling, a.arrival) for a in first] == [
        (len(b.prompt), b.sampling, b.arrival) for b in second
    ]
    assert all(list(a.prompt) != list(b.prompt) for a, b in zip(first, second, strict=True))


LENGTHS = [(30, 4), (5, 40), (12, 9), (8, 3), (60, 22), (3, 3), (17, 31), (9, 6), (40, 12), (2, 2)]
REQUESTS = [Request(f"q{i}", [1] * p, Sampling(max_tokens=n)) for i, (p, n) in enumerate(LENGTHS)]
CONFIG = EngineConfig(max_running=3, max_step_tokens=24, block_size=4, num_blocks=90, context=128)


@pytest.mark.parametrize("gap", [0.0, 3.0, 60.0], ids=["all at once", "in a queue", "one at a time"])
@pytest.mark.parametrize("side", [*BATCHING, *PAGING, *CHUNKING, {"num_blocks": 22}], ids=str)
def test_the_simulated_cost_is_what_an_engine_takes_at_that_price(fake, side, gap):
    cost = StepCost(fixed=1.0, prefill=0.03, decode=0.1)
    config = dataclasses.replace(CONFIG, **side)
    requests = [dataclasses.replace(request, arrival=gap * i) for i, request in enumerate(REQUESTS)]
    clock = fake.Clock()
    decodes = lambda step: sum(c.length == 1 for c in step.chunks)  # noqa: E731
    price = lambda step: cost.of(step.tokens - decodes(step), decodes(step))  # noqa: E731
    runner = fake.Runner(97, config.num_blocks, config.block_size, clock=clock, cost=price)
    recorder = Recorder()
    engine = Engine(runner, config, clock=clock, sleep=clock.sleep, recorder=recorder)
    engine.serve(requests)
    assert engine.now == pytest.approx(simulate(requests, config, cost))
    found = StepCost.fit(recorder.steps)
    assert found is not None
    assert (found.fixed, found.prefill, found.decode) == pytest.approx((1.0, 0.03, 0.1))


def test_equal_lengths_allow_no_gain_and_unequal_ones_do():
    cost = StepCost(fixed=1.0, prefill=0.0, decode=0.0)
    equal = [Request(f"q{i}", [1, 2], Sampling(max_tokens=8)) for i in range(12)]
    assert allowed_speedup(equal, CONFIG, cost) == pytest.approx(1.0)
    assert allowed_speedup(REQUESTS, CONFIG, cost) > 1.3
    # Requests that come one at a time have nothing to share a batch with, however they are batched.
    rare = [dataclasses.replace(request, arrival=100.0 * i) for i, request in enumerate(REQUESTS)]
    assert allowed_speedup(rare, CONFIG, cost) == pytest.approx(1.0)


def test_prices_come_out_of_steps_and_none_out_of_too_few():
    assert StepCost.fit([(1, 1, 0.1)] * 7) is None
    steps = [(p, d, 0.5 + 0.01 * p) for p in (0, 5, 9) for d in (1, 2, 3)]
    found = StepCost.fit(steps)
    assert found is not None
    assert (found.fixed, found.prefill) == pytest.approx((0.5, 0.01))
    assert found.decode == pytest.approx(0.0, abs=1e-9)


def test_requests_are_sent_by_the_clock_however_busy_the_engine_is(fake):
    # Each step takes 10 s and the requests come one a second: the third waits for two steps, and that is its TTFT.
    clock = fake.Clock()
    runner = fake.Runner(97, 90, 4, clock=clock, cost=lambda step: 10.0)
    recorder = Recorder()
    engine = Engine(
        runner, dataclasses.replace(CONFIG, max_running=1), clock=clock, sleep=clock.sleep, recorder=recorder
    )
    engine.serve([Request(f"q{i}", [1, 2], Sampling(max_tokens=1), arrival=5.0 + i) for i in range(3)])
    timeline = recorder.timeline()
    assert [r["arrival"] for r in timeline["requests"].values()] == [5.0, 6.0, 7.0]
    assert [r["first_token"] for r in timeline["requests"].values()] == [15.0, 25.0, 35.0]
    assert summarize(timeline).metrics["ttft_p50"]["value"] == pytest.approx(19.0)


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_request_runs_and_holds_its_blocks_in_its_first_step_and_in_its_last(fake, lookahead):
    # Answers of one token: two run in each of three steps of 10 s, and who ends in a step was there until its end.
    clock, recorder = fake.Clock(), Recorder()
    runner = fake.Runner(97, 90, 4, clock=clock, cost=lambda step: 10.0)
    config = dataclasses.replace(CONFIG, max_running=2, lookahead=lookahead)
    engine = Engine(runner, config, clock=clock, sleep=clock.sleep, recorder=recorder)
    engine.serve([Request(f"q{i}", [1, 2], Sampling(max_tokens=1)) for i in range(6)])
    timeline = recorder.timeline()
    share = pytest.approx(2 / CONFIG.num_blocks)
    assert timeline["running"] == [[0.0, 2.0], [30.0, 0.0]]
    assert timeline["cache_use"] == [[0.0, share], [30.0, 0.0]]
    assert summarize(timeline).metrics["running_requests"]["value"] == pytest.approx(2.0)


def test_nothing_runs_once_all_was_cancelled(fake):
    clock, recorder = fake.Clock(), Recorder()
    runner = fake.Runner(97, 90, 4, clock=clock, cost=lambda step: 10.0)
    engine = Engine(runner, CONFIG, clock=clock, sleep=clock.sleep, recorder=recorder)
    engine.submit(Request("q", [1, 2], Sampling(max_tokens=5)))
    engine.step()
    engine.cancel("q")
    assert recorder.timeline()["running"] == [[0.0, 1.0], [10.0, 0.0]]
    assert recorder.timeline()["cache_use"][-1] == [10.0, 0.0]


@pytest.mark.slow
def test_continuous_batching_reaches_most_of_what_the_schedules_allow():
    pair, workload = smoke("continuous_batching")
    ctx = context(workload)
    inputs = Inputs(pair.inputs(workload, ctx), 3)
    cases = {variant: served(pair, workload, variant, ctx, inputs) for variant in ("baseline", "optimized")}
    spans, steps = dict.fromkeys(cases, math.inf), {}
    for _ in range(3):
        for variant, case in cases.items():
            # Seconds of this process alone: neighbours take the machine for some steps and not for others.
            case.engine.clock = time.process_time
            case.run()
            span = summarize(case.timeline()).serve["span"]
            if span < spans[variant]:
                spans[variant], steps[variant] = span, case.recorder.steps
    # One price for both schedules, from the steps of both: small batches and large ones.
    cost = StepCost.fit(steps["baseline"] + steps["optimized"])
    assert cost is not None
    allowed = allowed_speedup(inputs["requests"], cases["optimized"].config, cost)
    assert allowed > 1.1
    assert spans["baseline"] / spans["optimized"] >= 0.8 * allowed


@pytest.mark.slow
def test_real_weights_serve_the_azure_trace_within_a_minute(shared: Path):
    if default_model_path() is None:
        pytest.skip("real weights are not here: run 'pairbench models fetch'")
    technique = find("chunked_prefill")
    pair = load_pair(technique)
    workload = next(w for w in workloads_of(technique) if w.name == "real_azure")
    ctx = context(workload, trace_path=str(shared / "traces" / TRACE))
    assert workload.requests == len(trace_for(workload, ctx.trace_path).requests) == 64
    assert workload.slots == 8
    case = served(pair, workload, "optimized", ctx, Inputs(pair.inputs(workload, ctx), 3))
    summary = summarize(case.timeline())
    assert summary.serve["requests"]["finished"] == 64
    assert summary.serve["span"] < 60
