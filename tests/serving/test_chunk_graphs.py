"""Graphs of steps with chunks: random steps against the plain way, and engines that serve with them.

Without a GPU a forward pass takes the place of each graph.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from impls.model.config import ModelConfig
from impls.model.weights import load_model
from impls.serving import kernel_attend
from impls.serving.chunk_graphs import CHUNKS, MOST_TOKENS, ChunkGraphs, token_buckets
from impls.serving.decode_graphs import DecodeGraphs
from impls.serving.engine import Engine
from impls.serving.plain_loop import cached_tokens
from impls.serving.request import PENDING, Request, Sampling, Sequence
from impls.serving.runner import ModelRunner
from impls.serving.scheduler import Chunk, EngineConfig

ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SMALL = ModelConfig(
    vocab_size=256, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16
)
WIDE = EngineConfig(max_running=10, max_step_tokens=32, block_size=16, num_blocks=80, context=128)
CONFIG = EngineConfig(max_running=3, max_step_tokens=24, block_size=16, num_blocks=32, context=128)


def test_buckets_hold_the_decodes_of_any_step_and_end_at_the_longest_step():
    assert token_buckets(replace(WIDE, max_step_tokens=512, max_running=8)) == [64, 128, 256, 384, 512]
    assert token_buckets(replace(WIDE, max_step_tokens=300, max_running=128)) == [128, 256, 300]
    assert token_buckets(replace(WIDE, max_step_tokens=24)) == [24]
    assert token_buckets(replace(WIDE, max_step_tokens=4096))[-2:] == [MOST_TOKENS - 128, MOST_TOKENS]
    # Whole prompts are not bound by the budget, which is a bucket all the same: both ways have the same graphs.
    whole = replace(WIDE, max_step_tokens=200, chunked_prefill=False, context=400)
    assert token_buckets(whole) == [64, 128, 200, 256, 384, 410]
    assert token_buckets(replace(whole, context=10_000))[-1] == MOST_TOKENS


class Steps:
    """Random steps on two runners of one model: with graphs, and the plain way; their caches begin alike.

    What nobody has written is NaN.
    """

    def __init__(self, served, device: str, config: EngineConfig, sizes: list[int], seed: int) -> None:
        self.config, self.random = config, random.Random(seed)
        model = load_model(shape=SMALL, seed=3, device=device)
        self.fast = ModelRunner(model, config, kernels=True, graphs=False)
        self.plain = ModelRunner(model, config, kernels=False, graphs=False)
        self.graphs = (served.anew(ChunkGraphs) if device == "cpu" else ChunkGraphs)(self.fast, sizes)
        self.fast.chunk_graphs = self.graphs
        self.made = 0

    def chunks(self, decodes: int, wide: list[int]) -> list[Chunk]:
        """So many decodes, then chunks of these lengths, of new sequences in blocks that lie anywhere."""
        rand, size = self.random, self.config.block_size
        for runner in (self.fast, self.plain):
            for name in list(runner.tables.rows):
                runner.tables.free.append(runner.tables.rows.pop(name))
        free = list(range(self.config.num_blocks))
        rand.shuffle(free)
        self.fast.cache.kv.fill_(torch.nan)
        drawn = torch.randint(-1, 256, (self.config.max_running,))
        rows: dict[Sequence, int] = {}
        chunks = []
        for length in [1] * decodes + wide:
            start = rand.choice([0, 1, size - 1, size, rand.randrange(40)]) if length > 1 else rand.randrange(60)
            later = rand.choice([0, 0, 3]) if length > 1 else 0
            sequence = Sequence(Request(f"s{self.made}", [rand.randrange(256) for _ in range(start + length + later)]))
            self.made += 1
            sequence.blocks = [free.pop() for _ in range(-(-(start + length) // size))]
            if not later and rand.random() < 0.5:
                sequence.tokens[-1] = PENDING
                rows[sequence] = rand.randrange(self.config.max_running)
            for place in range(start):
                cell = self.fast.cache.kv[:, :, sequence.blocks[place // size], :, place % size]
                cell.copy_(torch.randn(cell.shape, generator=torch.Generator().manual_seed(self.made * 100 + place)))
            chunks.append(Chunk(sequence, start, length, samples=not later))
        self.plain.cache.kv.copy_(self.fast.cache.kv)
        for runner in (self.fast, self.plain):
            runner.drawn.copy_(drawn)
            runner.drawn_rows = rows
        return chunks

    @torch.inference_mode()
    def check(self, decodes: int, wide: list[int]) -> None:
        """A step in a graph gives the plain way's logits and cache, and leaves every other slot as it was."""
        chunks = self.chunks(decodes, wide)
        before = self.plain.cache.kv.clone()
        assert self.graphs.holds(chunks)
        logits = self.graphs.replay(chunks)
        want = self.plain._run(chunks)
        assert want.shape[0] == sum(chunk.samples for chunk in chunks)
        near = 1e-4 if logits.device.type == "cpu" else 1e-3
        torch.testing.assert_close(logits, want, rtol=near, atol=near)
        found = self.fast.cache.kv
        torch.testing.assert_close(found, self.plain.cache.kv, rtol=near, atol=near, equal_nan=True)
        for chunk in chunks:
            for place in range(chunk.start, chunk.start + chunk.length):
                size = self.config.block_size
                found[:, :, chunk.sequence.blocks[place // size], :, place % size] = torch.nan
        torch.testing.assert_close(found, before, rtol=0, atol=0, equal_nan=True)


@ON_BOTH
@pytest.mark.parametrize(("block_size", "splits"), [(16, True), (64, False)])
def test_random_steps_give_the_plain_ways_logits_and_write_nothing_else(
    served, monkeypatch, device, block_size, splits
):
    if splits:
        monkeypatch.setattr(kernel_attend, "SPLIT_LENGTH", 16)
        monkeypatch.setattr(kernel_attend, "DECODE_PROGRAMS", 14)
    config = replace(WIDE, block_size=block_size, num_blocks=1280 // block_size)
    steps = Steps(served, device, config, [16, 32], seed=block_size)
    # A full step, then steps that have less of everything in both sizes: nothing of an earlier one may be seen.
    steps.check(2, [3, 5, 7, 2, 4, 2, 3, 4])
    for _ in range(1 if splits else 3):
        steps.check(steps.random.randint(0, 6), [steps.random.randint(2, 8) for _ in range(steps.random.randint(1, 3))])
    steps.check(1, [3])
    steps.check(10, [])
    steps.check(0, [32])
    assert set(steps.graphs.replays) == {16, 32}
    assert steps.graphs.replays.total() == (5 if splits else 7)


def test_decodes_and_chunks_are_found_apart_in_every_number_of_both(served):
    steps = Steps(served, "cpu", replace(WIDE, context=64), [16], seed=1)
    for decodes, wide in ((0, [2]), (0, [5, 3]), (1, []), (1, [2, 2, 2, 2]), (6, [2]), (6, [5, 3]), (8, [8])):
        steps.check(decodes, wide)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_broken_request_breaks_nobody_beside_it_and_nobody_after_it(served):
    model = load_model(shape=SMALL, seed=3)
    with torch.no_grad():
        model.embed_tokens.weight[7] = torch.nan
    runner = ModelRunner(model, replace(CONFIG, num_blocks=12), kernels=True, graphs=False)
    runner.chunk_graphs, runner.graphs = served.anew(ChunkGraphs)(runner), served.anew(DecodeGraphs)(runner)
    engine = Engine(runner, runner.config)
    bad = Request("bad", [5, 7, 9], Sampling(max_tokens=4))
    good = [Request(f"g{i}", [8 + i, 9, 10, 11 + i][: 2 + i], Sampling(max_tokens=3)) for i in range(3)]
    found, ends = served.ends_of(engine, [bad, *good])
    assert "not finite" in ends["bad"]
    assert not served.differences(found, {r.id: cached_tokens(model, r) for r in good}, ends)
    assert runner.chunk_graphs.replays


def test_what_no_graph_has_room_for_is_not_held(served):
    steps = Steps(served, "cpu", replace(WIDE, context=64), [16], seed=1)
    assert steps.graphs.holds(steps.chunks(0, [2] * CHUNKS))
    assert not steps.graphs.holds(steps.chunks(0, [2] * CHUNKS + [2]))
    assert steps.graphs.holds(steps.chunks(1, [15]))
    assert not steps.graphs.holds(steps.chunks(2, [15]))


def eager_steps(runner: ModelRunner) -> list[int]:
    """Tokens of each pass that the runner launches kernel by kernel from now on."""
    seen: list[int] = []
    run = runner._run

    def spy(chunks, rows=0):
        seen.append(sum(chunk.length for chunk in chunks))
        return run(chunks, rows)

    runner._run = spy
    return seen


REQUESTS = [
    Request(f"r{i}", [(7 * i + j) % 256 for j in range(prompt)], Sampling(max_tokens=answer))
    for i, (prompt, answer) in enumerate([(40, 2), (5, 4), (3, 2), (29, 2)])
]


@pytest.mark.parametrize(("lookahead", "whole"), [(False, True), (True, False)])
def test_an_engine_replays_steps_with_chunks_and_launches_longer_ones(served, lookahead, whole):
    model = load_model(shape=SMALL, seed=2)
    config = replace(CONFIG, lookahead=lookahead, chunked_prefill=not whole)
    runner = ModelRunner(model, config, kernels=True, graphs=False)
    runner.chunk_graphs = served.anew(ChunkGraphs)(runner, [8, 32])
    runner.graphs = served.anew(DecodeGraphs)(runner)
    eager = eager_steps(runner)
    found, ends = served.ends_of(Engine(runner, config), REQUESTS)
    assert not served.differences(found, {r.id: cached_tokens(model, r) for r in REQUESTS}, ends)
    assert bool(eager) == whole
    assert all(tokens > 32 for tokens in eager)
    assert set(runner.chunk_graphs.replays) >= {32}


SWITCHES = {
    "chunks": {},
    "chunks, computed again": {"num_blocks": 8},
    "chunks, swapped": {"num_blocks": 8, "preemption": "swap", "host_blocks": 24},
    "whole prompts": {"chunked_prefill": False},
    "known prefixes": {"prefix_caching": True},
    "large blocks": {"block_size": 64, "num_blocks": 8},
}


@pytest.mark.gpu
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("lookahead", [False, True])
def test_graphs_on_a_gpu_give_the_tokens_of_an_engine_without(served, switch, lookahead):
    model = load_model(shape="tiny", seed=2, device="cuda")
    known = [(3 * j + 1) % 512 for j in range(48)]
    prompts = [[*known, *[(7 * i + j) % 512 for j in range(9 * i)]] for i in (0, 1, 0, 2, 3, 4)]
    prompts += [[(11 * i + j) % 512 for j in range(3 + i)] for i in range(3)]
    requests = [Request(f"r{i}", prompt, Sampling(max_tokens=4 + 3 * i)) for i, prompt in enumerate(prompts)]
    config = replace(CONFIG, max_running=4, lookahead=lookahead, **SWITCHES[switch])
    plain = ModelRunner(model, config, graphs=False)
    assert plain.chunk_graphs is None
    want, _ = served.ends_of(Engine(plain, config), requests)
    runner = ModelRunner(model, config)
    eager = eager_steps(runner)
    engine = Engine(runner, config)
    for _ in range(2):  # from an empty cache each time
        found, ends = served.ends_of(engine, requests)
        assert not served.differences(found, want, ends)
    assert bool(engine.counters["preempted"]) == ("computed again" in switch or "swapped" in switch)
    assert runner.chunk_graphs.replays.total() > 0
    assert not eager, "a step with chunks was launched kernel by kernel"
