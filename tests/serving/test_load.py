"""Under load: cancellations and impossible requests in a small cache, and not a block, a request or a byte astray."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from impls.serving.engine import Engine, Output
from impls.serving.recorder import Recorder
from impls.serving.request import Request, Sampling
from impls.serving.scheduler import EngineConfig

VOCAB = 1009


def traffic(count: int, seed: int) -> tuple[list[Request], dict[str, int]]:
    """Requests, one in ten of them too long, and for one in five the number of tokens after which it is cancelled."""
    rng = random.Random(seed)
    requests, cancels = [], {}
    for i in range(count):
        prompt = rng.randint(150, 400) if rng.random() < 0.1 else min(90, int(rng.lognormvariate(2.5, 0.9)) + 1)
        answer = min(40, int(rng.lognormvariate(1.8, 0.8)) + 1)
        requests.append(Request(f"q{i}", [rng.randrange(VOCAB) for _ in range(prompt)], Sampling(max_tokens=answer)))
        if rng.random() < 0.2:
            cancels[f"q{i}"] = rng.randint(0, answer)
    return requests, cancels


def drive(
    engine: Engine, requests: list[Request], cancels: dict[str, int], seed: int
) -> dict[str, tuple[list[int], str]]:
    """Feeds requests in random bursts while the engine steps; what each got, and how it ended."""
    rng = random.Random(seed)
    coming = requests[::-1]
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    while coming or not engine.idle:
        for _ in range(rng.choice((0, 0, 1, 2, 6))):
            if not coming:
                break
            request = coming.pop()
            tokens[request.id] = []
            engine.submit(request)
            if cancels.get(request.id) == 0:
                engine.cancel(request.id)
        for output in engine.step():
            assert output.id not in ends, f"{output.id} was answered after its end"
            if output.token is not None:
                tokens[output.id].append(output.token)
                if cancels.get(output.id) == len(tokens[output.id]) and not output.finished:
                    assert engine.cancel(output.id)
            if output.finished:
                ends[output.id] = output.finished
        pool = engine.scheduler.blocks.device
        held = sum(len(s.blocks) for s in engine.scheduler.running)
        assert pool.free + held == pool.count, "a block is lost or held twice"
    return {key: (tokens[key], ends[key]) for key in tokens}


def check(
    fake, requests: list[Request], cancels: dict[str, int], got: dict[str, tuple[list[int], str]], limit: int
) -> None:
    assert set(got) == {request.id for request in requests}
    for request in requests:
        tokens, end = got[request.id]
        length = request.sampling.max_tokens
        if len(request.prompt) + length > limit:
            assert (tokens, end) == ([], "refused")
        elif cancels.get(request.id, length) < length:
            assert end == "cancelled"
            assert tokens == fake.answer_of(request.prompt, cancels[request.id], VOCAB)
        else:
            assert end == "length"
            assert tokens == fake.answer_of(request.prompt, length, VOCAB)


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"lookahead": True},
        {"preemption": "swap", "host_blocks": 24},
        {"preemption": "swap", "host_blocks": 24, "lookahead": True},
        {"chunked_prefill": False},
        {"batching": "static"},
    ],
    ids=["recompute", "ahead", "swap", "swap ahead", "whole", "static"],
)
def test_five_hundred_requests_in_a_cache_for_three(fake, switches):
    config = EngineConfig(max_running=6, max_step_tokens=32, block_size=4, num_blocks=40, context=130, **switches)
    requests, cancels = traffic(500, seed=1)
    recorder = Recorder()
    runner = fake.Runner(VOCAB, config.num_blocks, config.block_size, config.host_blocks)
    engine = Engine(runner, config, recorder=recorder)
    got = drive(engine, requests, cancels, seed=2)
    check(fake, requests, cancels, got, config.context)
    assert engine.counters["preempted"] > 0
    assert engine.scheduler.blocks.device.free == config.num_blocks
    assert engine.scheduler.blocks.host.free == config.host_blocks
    assert recorder.slots[0] > recorder.slots[1] > 0
    if config.chunked_prefill:
        assert max(tokens for tokens, _ in runner.steps) <= config.max_step_tokens


def test_only_tokens_that_had_been_computed_are_computed_again(fake):
    config = EngineConfig(max_running=2, max_step_tokens=3, block_size=4, num_blocks=10, context=40)
    engine = Engine(fake.Runner(VOCAB, config.num_blocks, config.block_size), config)
    engine.submit(Request("old", list(range(8)), Sampling(max_tokens=32)))
    while engine.counters["decode_tokens"] < 1:
        engine.step()
    # Two tokens of this prompt run beside each token of the other's answer, until there is no block for both.
    engine.submit(Request("new", list(range(24)), Sampling(max_tokens=2)))
    computed = 0
    while not engine.idle:
        engine.step()
        if not engine.counters["preempted"]:
            computed = max([computed, *(s.computed for s in engine.scheduler.running if s.id == "new")])
    assert 0 < computed < 24
    assert engine.counters["preempted"] == 1
    assert engine.counters["recomputed_tokens"] == computed
    assert engine.counters["prefill_tokens"] == 8 + 24 + computed


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind(fake):
    sizes = {"max_running": 16, "max_step_tokens": 64, "block_size": 8, "num_blocks": 60, "context": 130}
    config = EngineConfig(**sizes, preemption="swap", host_blocks=20, lookahead=True)
    runner = fake.Runner(VOCAB, config.num_blocks, config.block_size, config.host_blocks)
    engine = Engine(runner, config)
    held = []
    tracemalloc.start()
    try:
        for part in range(10):
            requests, cancels = traffic(1000, seed=part)
            got = drive(engine, requests, cancels, seed=part + 100)
            check(fake, requests, cancels, got, config.context)
            runner.steps.clear()
            del requests, cancels, got
            gc.collect()  # the interpreter keeps freed objects for reuse, some 100 kB of them, until a full collection
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert engine.scheduler.blocks.device.free == config.num_blocks
    assert engine.scheduler.blocks.host.free == config.host_blocks
    assert held[-1] - held[1] < 64_000, f"memory grew from {held[1]} to {held[-1]} bytes"


def test_a_step_under_way_is_waited_for_before_an_engine_begins_anew(fake):
    waited: list[list[int]] = []

    class Runner(fake.Runner):
        def launch(self, step):
            collect = super().launch(step)
            return lambda: waited.append(collect()) or waited[-1]

    config = EngineConfig(max_running=2, max_step_tokens=8, block_size=4, num_blocks=8, context=32, lookahead=True)
    engine = Engine(Runner(VOCAB, 8, 4), config)
    engine.submit(Request("a", [1, 2], Sampling(max_tokens=3)))
    assert engine.step() == []
    assert waited == []
    engine.reset()
    assert len(waited) == 1
    assert engine.idle
    engine.submit(Request("a", [1, 2], Sampling(max_tokens=1)))
    outputs = [output for _ in range(2) for output in engine.step()]
    assert [o.token for o in outputs] == fake.answer_of([1, 2], 1, VOCAB)


def test_cancelling_what_is_over_or_unknown_does_nothing(fake):
    config = EngineConfig(max_running=2, max_step_tokens=8, block_size=4, num_blocks=8, context=32)
    engine = Engine(fake.Runner(VOCAB, 8, 4), config)
    assert engine.cancel("nobody") is False
    engine.submit(Request("a", [1, 2], Sampling(max_tokens=1)))
    outputs: list[Output] = []
    while not engine.idle:
        outputs.extend(engine.step())
    assert [o.finished for o in outputs] == ["length"]
    assert engine.cancel("a") is False
    assert engine.step() == []
