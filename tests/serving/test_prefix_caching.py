"""Prefix caching in the engine: the same tokens, fewer of them run, under eviction, cancellation and preemption."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from harness.serving.metrics import summarize
from impls.model.config import ModelConfig
from impls.model.weights import load_model
from impls.serving.engine import Engine
from impls.serving.plain_loop import plain_tokens
from impls.serving.recorder import Recorder
from impls.serving.request import Request, Sampling
from impls.serving.runner import ModelRunner
from impls.serving.schedule_cost import StepCost, simulate
from impls.serving.scheduler import EngineConfig

VOCAB = 512
SMALL = ModelConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
CONFIG = EngineConfig(max_running=4, max_step_tokens=32, block_size=4, num_blocks=96, context=96, prefix_caching=True)


def family(count: int, seed: int, longest: int = 40) -> list[Request]:
    """Requests whose prompts are beginnings of a few texts with some words of their own; some are the same prompt."""
    rng = random.Random(seed)
    texts = [[rng.randrange(VOCAB) for _ in range(longest)] for _ in range(3)]
    requests = []
    for i in range(count):
        begins = rng.choice(texts)[: rng.choice((4, 8, 17, 24, longest))]
        own = [rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 3, 9)))]
        requests.append(Request(f"q{i}", begins + own, Sampling(max_tokens=rng.randint(1, 14))))
    return requests


@pytest.fixture(scope="module")
def model():
    return load_model(shape=SMALL, seed=4)


@pytest.fixture(scope="module")
def requests():
    return family(10, seed=5)


@pytest.fixture(scope="module")
def answers(model, requests):
    return {request.id: plain_tokens(model, request) for request in requests}


def served(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    """The tokens of each request; what is read before it is written is not a number, and fails its reader."""
    engine.runner.cache.kv.fill_(math.nan)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    engine.serve(requests, lambda o: tokens[o.id].append(o.token) if o.token is not None else None)
    return tokens


VARIATIONS = {
    "plain": {},
    "one at a time": {"max_running": 1},
    "blocks of 1": {"block_size": 1, "num_blocks": 384},
    "odd chunks": {"max_step_tokens": 7},
    "whole prompts": {"chunked_prefill": False},
    "static": {"batching": "static"},
    "evicting": {"max_running": 1, "num_blocks": 16},
    "preempted": {"num_blocks": 16},
    "swapped": {"num_blocks": 16, "preemption": "swap", "host_blocks": 64},
    "ahead": {"lookahead": True},
    "ahead, preempted": {"lookahead": True, "num_blocks": 16},
    "ahead, swapped": {"lookahead": True, "num_blocks": 16, "preemption": "swap", "host_blocks": 64},
    "invariant": {"batch_invariant": True},
    "invariant, preempted": {"batch_invariant": True, "num_blocks": 16},
}


@pytest.mark.parametrize("change", VARIATIONS.values(), ids=VARIATIONS.keys())
def test_shared_blocks_give_the_tokens_of_the_plain_loop(model, requests, answers, change):
    config = replace(CONFIG, **change)
    engine = Engine(ModelRunner(model, config), config)
    for order in (requests, requests[::-1]):
        assert served(engine, order) == answers
        assert engine.counters["cached_tokens"] > 0
        assert engine.scheduler.blocks.device.free == config.num_blocks
        assert engine.scheduler.blocks.host.free == config.host_blocks
        if config.num_blocks == 16:
            assert engine.scheduler.blocks.sharing.evicted > 0
            assert engine.counters["preempted"] > 0 or config.max_running == 1


@pytest.mark.slow
@pytest.mark.parametrize("change", [{}, {"batch_invariant": True}], ids=["plain", "invariant"])
def test_the_kernels_give_the_tokens_of_the_plain_loop(model, change):
    config = replace(CONFIG, block_size=16, num_blocks=24, **change)
    text = [(7 * i) % VOCAB for i in range(33)]
    prompts = [text, [*text[:32], 5, 6], text[:32], [*text[:17], 8], text[:32]]
    requests = [Request(f"q{i}", prompt, Sampling(max_tokens=2)) for i, prompt in enumerate(prompts)]
    engine = Engine(ModelRunner(model, config, kernels=True, graphs=False), config)
    assert served(engine, requests) == {r.id: plain_tokens(model, r) for r in requests}
    assert engine.counters["cached_tokens"] >= 32 + 16 + 16 + 31


@pytest.mark.parametrize("change", [{}, {"batch_invariant": True}], ids=["plain", "invariant"])
def test_a_prompt_is_read_in_the_very_step_that_computes_it(model, change):
    # More rows than a pass of the invariant mode has, and a reader of one row, which would come first if rows were
    # sorted as decodes are.
    text = [(11 * i + 3) % VOCAB for i in range(90)]
    prompts = [text, [*text[:88], 9], [*text[:40], 1, 2]]
    requests = [Request(f"q{i}", prompt, Sampling(max_tokens=3)) for i, prompt in enumerate(prompts)]
    config = replace(CONFIG, max_step_tokens=128, **change)
    engine = Engine(ModelRunner(model, config), config)
    assert served(engine, requests) == {r.id: plain_tokens(model, r) for r in requests}
    assert engine.counters["cached_tokens"] == 88 + 40
    assert engine.counters["steps"] == 3


def test_the_same_prompt_again_runs_one_token_of_it(model):
    prompt = list(range(100, 132))
    requests = [Request(name, prompt, Sampling(max_tokens=5)) for name in "abc"]
    config = replace(CONFIG, max_running=1)
    engine = Engine(ModelRunner(model, config), config)
    assert set(map(tuple, served(engine, requests).values())) == {tuple(plain_tokens(model, requests[0]))}
    assert engine.counters["cached_tokens"] == 2 * 31
    assert engine.counters["prefill_tokens"] == 32 + 1 + 1


def test_a_conversation_finds_its_own_answers(model):
    config = replace(CONFIG, max_running=1)
    engine = Engine(ModelRunner(model, config), config)
    first = Request("a", list(range(10)), Sampling(max_tokens=11))
    answer = list(engine.stream(first))
    assert answer == plain_tokens(model, first)
    # Of 21 tokens the last was never run, so that 5 blocks of 4 are known.
    follow = Request("b", [*first.prompt, *answer, 7, 8, 9], Sampling(max_tokens=4))
    assert list(engine.stream(follow)) == plain_tokens(model, follow)
    assert engine.counters["cached_tokens"] == 20


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("answer", [1, 2, 4])
def test_a_failed_request_leaves_nothing_that_others_would_find(answer, lookahead):
    broken = load_model(shape=SMALL, seed=4)
    with torch.no_grad():
        broken.embed_tokens.weight[7] = math.nan
    config = replace(CONFIG, lookahead=lookahead)
    engine = Engine(ModelRunner(broken, config), config)
    # An answer that is complete by its length has given its blocks away before its tokens are known to be none.
    engine.submit(Request("bad", [7] * 20, Sampling(max_tokens=answer)))
    ends = []
    while not engine.idle:
        ends.extend(o.finished for o in engine.step() if o.finished)
    assert ends == ["failed"]
    assert len(engine.scheduler.blocks.sharing.index) == 0
    assert engine.scheduler.blocks.sharing.idle == []
    assert engine.scheduler.blocks.device.free == config.num_blocks


def test_reserved_runs_share_nothing():
    with pytest.raises(ValueError, match="prefix_caching shares blocks"):
        replace(CONFIG, paging="reserve")


def truthful(fake):
    """A runner that holds the index to its word after every step: the cache has what each known block should."""

    class Truthful(fake.Runner):
        engine: Engine

        def execute(self, step):
            tokens = super().execute(step)
            sharing = self.engine.scheduler.blocks.sharing
            for block, node in sharing.index._of_block.items():
                assert tuple(self.cache[block]) == node.tokens, f"block {block} does not hold what the index says"
            for chunk in step.chunks:
                sequence, length = chunk.sequence, chunk.start + chunk.length
                held = [self.cache[b] for b in sequence.blocks]
                text = [token for block in held for token in block][:length]
                known = [t for t, want in zip(text, sequence.tokens, strict=False) if want != -1]
                assert known == [t for t in sequence.tokens[:length] if t != -1], f"{sequence.id} reads another's text"
            return tokens

    return Truthful


def accounted(engine: Engine) -> None:
    """Every block is free, idle, or held by as many sequences as list it; what is half written is one's own."""
    blocks = engine.scheduler.blocks
    pool, size = blocks.sharing, blocks.block_size
    holders = Counter(block for sequence in engine.scheduler.running for block in sequence.blocks)
    assert pool.free + len(holders) == pool.count, "a block is lost or held twice"
    assert all(pool._holders[block] == holders[block] for block in range(pool.count))
    assert not set(pool.idle) & set(holders)
    for sequence in engine.scheduler.running:
        if sequence.computed % size:
            half = sequence.blocks[sequence.computed // size]
            assert holders[half] == 1, "a block is shared while it is written"
            assert half not in pool.index


LOAD = {
    "recompute": {},
    "ahead": {"lookahead": True},
    "swap": {"preemption": "swap", "host_blocks": 20},
    "swap ahead": {"preemption": "swap", "host_blocks": 20, "lookahead": True},
    "whole": {"chunked_prefill": False},
    "static": {"batching": "static"},
}


@pytest.mark.parametrize("hashing", ["chained", "colliding"])
@pytest.mark.parametrize("switches", LOAD.values(), ids=LOAD.keys())
def test_two_hundred_requests_with_cancellations_in_a_cache_for_three(fake, switches, hashing):
    config = replace(CONFIG, max_running=6, num_blocks=32, **switches)
    runner = truthful(fake)(VOCAB, config.num_blocks, config.block_size, config.host_blocks)
    engine = runner.engine = Engine(runner, config)
    if hashing == "colliding":
        engine.scheduler.blocks.sharing.index.hash_block = lambda before, tokens: (before + tokens[0]) % 5
    requests = family(200, seed=11)
    rng = random.Random(12)
    cancels = {r.id: rng.randint(0, r.sampling.max_tokens) for r in requests if rng.random() < 0.25}
    coming, got, ends = requests[::-1], {r.id: [] for r in requests}, {}
    while coming or not engine.idle:
        for _ in range(min(len(coming), rng.choice((0, 0, 1, 2, 6)))):
            request = coming.pop()
            engine.submit(request)
            if cancels.get(request.id) == 0:
                engine.cancel(request.id)
        for output in engine.step():
            if output.token is not None:
                got[output.id].append(output.token)
                if cancels.get(output.id) == len(got[output.id]) and not output.finished:
                    engine.cancel(output.id)
            if output.finished:
                ends[output.id] = output.finished
        accounted(engine)
    for request in requests:
        length = request.sampling.max_tokens
        cut = min(cancels.get(request.id, length), length)
        assert got[request.id] == fake.answer_of(request.prompt, cut, VOCAB)
        assert ends[request.id] == ("length" if cut == length else "cancelled")
    pool = engine.scheduler.blocks.sharing
    assert engine.counters["preempted"] > 0
    assert engine.counters["cached_tokens"] > 0.2 * engine.counters["prompt_tokens"]
    assert pool.free == config.num_blocks
    assert engine.scheduler.blocks.host.free == config.host_blocks
    assert len(pool.index) == len(pool.idle)
    pool.take(config.num_blocks)
    assert pool.index.nodes == 0, "text is kept that no block holds"


def test_who_was_preempted_finds_what_it_had(fake):
    counts = []
    for caching in (False, True):
        config = replace(CONFIG, num_blocks=14, prefix_caching=caching)
        engine = Engine(fake.Runner(VOCAB, config.num_blocks, config.block_size), config)
        engine.serve([Request(f"q{i}", [50 * i + j for j in range(12)], Sampling(max_tokens=24)) for i in range(3)])
        assert engine.counters["preempted"] > 0
        counts.append(engine.counters["recomputed_tokens"])
    assert 0 < counts[1] < counts[0]


PRICE = StepCost(fixed=1.0, prefill=0.05, decode=0.1)


def timed(fake, requests, config):
    clock = fake.Clock()
    decodes = lambda step: sum(c.length == 1 for c in step.chunks)  # noqa: E731
    price = lambda step: PRICE.of(step.tokens - decodes(step), decodes(step))  # noqa: E731
    runner = fake.Runner(VOCAB, config.num_blocks, config.block_size, clock=clock, cost=price)
    engine = Engine(runner, config, clock=clock, sleep=clock.sleep, recorder=Recorder())
    engine.serve(requests)
    return engine, {name: m["value"] for name, m in summarize(engine.recorder.timeline()).metrics.items()}


def test_first_tokens_come_earlier_at_the_same_pace_and_more_of_them(fake):
    rng = random.Random(1)
    system = [rng.randrange(VOCAB) for _ in range(78)]
    requests = [
        Request(f"q{i}", system + [rng.randrange(VOCAB) for _ in range(10)], Sampling(max_tokens=6)) for i in range(12)
    ]
    plain, cached = (
        timed(fake, requests, replace(CONFIG, max_running=1, prefix_caching=on))[1] for on in (False, True)
    )
    assert cached["ttft_p50"] < 0.7 * plain["ttft_p50"]
    assert cached["output_rate"] > 1.2 * plain["output_rate"]
    assert cached["itl_p50"] == pytest.approx(plain["itl_p50"])
    assert cached["itl_p99"] == pytest.approx(plain["itl_p99"])
    assert plain["cache_hit_rate"] == 0
    assert cached["cache_hit_rate"] == pytest.approx(11 * 76 / (12 * 88))


@pytest.mark.parametrize("caching", [False, True])
def test_the_simulated_cost_is_what_an_engine_takes_at_that_price(fake, caching):
    config = replace(CONFIG, prefix_caching=caching, num_blocks=40)
    requests = [replace(r, prompt=[*r.prompt, 500 + i % 12, i]) for i, r in enumerate(family(30, seed=2))]
    engine, _ = timed(fake, requests, config)
    assert engine.now == pytest.approx(simulate(requests, config, PRICE))
