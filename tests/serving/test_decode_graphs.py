"""Decode graphs: what is captured and how it is fed, here with a forward pass in the place of each graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from impls.model.config import ModelConfig
from impls.model.weights import load_model
from impls.serving.decode_graphs import DecodeGraphs, buckets
from impls.serving.engine import Engine
from impls.serving.plain_loop import cached_tokens, plain_tokens
from impls.serving.request import Request, Sampling
from impls.serving.runner import ModelRunner
from impls.serving.scheduler import EngineConfig

SMALL = ModelConfig(
    vocab_size=256, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
CONFIG = EngineConfig(max_running=3, max_step_tokens=24, block_size=16, num_blocks=24, context=64)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_buckets_hold_every_batch_and_end_at_the_largest():
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    assert buckets(20) == [1, 2, 4, 8, 16, 20]
    assert buckets(64)[-2:] == [56, 64]


@pytest.mark.parametrize("lookahead", [False, True])
def test_decode_steps_are_replayed_in_buckets_and_right(served, lookahead):
    model = load_model(shape=SMALL, seed=2, device=DEVICE)
    config = replace(CONFIG, lookahead=lookahead)
    runner = ModelRunner(model, config, kernels=True, graphs=False)
    replays: list[int] = []

    class Counted(served.anew(DecodeGraphs)):
        def at_least(self, size):
            replays.append(super().at_least(size))
            return replays[-1]

    runner.graphs = Counted(runner)
    engine = Engine(runner, config)
    lengths = [(20, 3), (5, 5), (3, 2), (9, 3)]
    requests = [
        Request(f"r{i}", [(7 * i + j) % 256 for j in range(p)], Sampling(max_tokens=n))
        for i, (p, n) in enumerate(lengths)
    ]
    found, ends = served.ends_of(engine, requests)
    assert not served.differences(found, {r.id: plain_tokens(model, r) for r in requests}, ends)
    assert {1, 2, 3} >= set(replays)
    assert len(replays) >= 3


def test_the_cached_loop_is_the_plain_loop():
    model = load_model(shape=SMALL, seed=2)
    request = Request("a", [5, 6, 7, 8], Sampling(max_tokens=12))
    assert cached_tokens(model, request) == plain_tokens(model, request)
    stop = plain_tokens(model, request)[3]
    stopping = replace(request, sampling=Sampling(max_tokens=12, stop=(stop,)))
    assert cached_tokens(model, stopping) == plain_tokens(model, stopping)


@pytest.mark.gpu
def test_graphs_on_a_gpu_give_the_tokens_of_eager_steps(served):
    model = load_model(shape="tiny", seed=2, device="cuda")
    requests = [
        Request(f"r{i}", [(7 * i + j) % 512 for j in range(5 + 9 * i)], Sampling(max_tokens=4 + 3 * i))
        for i in range(6)
    ]
    want = {request.id: plain_tokens(model, request) for request in requests}
    problems = []
    for graphs in (False, True):
        for lookahead in (False, True):
            config = replace(CONFIG, context=128, lookahead=lookahead)
            runner = ModelRunner(model, config, graphs=graphs)
            found, ends = served.ends_of(Engine(runner, config), requests)
            lines = served.differences(found, want, ends)
            problems += [f"graphs={graphs} lookahead={lookahead}: {line}" for line in lines]
    assert not problems, "\n".join(problems)


SWITCHES = {
    "swapped": {"num_blocks": 8, "preemption": "swap", "host_blocks": 24},
    "computed again": {"num_blocks": 8},
    "reserved": {"paging": "reserve", "num_blocks": 16},
    "whole prompts": {"chunked_prefill": False},
    "known prefixes": {"prefix_caching": True},
}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_switch_gives_the_plain_loops_tokens(served, switch, lookahead, device):
    """On a GPU with kernels, graphs, and copies to pinned memory and back that nobody waits for."""
    model = load_model(shape="tiny", seed=2, device=device)
    known = [(3 * j + 1) % 512 for j in range(48)]  # whole blocks, so that one request copies its last block
    prompts = [[*known, *[(7 * i + j) % 512 for j in range(9 * i)]] for i in (0, 1, 0, 2, 3, 4)]
    requests = [Request(f"r{i}", prompt, Sampling(max_tokens=6 + 5 * i)) for i, prompt in enumerate(prompts)]
    config = replace(CONFIG, context=128, lookahead=lookahead, **SWITCHES[switch])
    runner = ModelRunner(model, config)
    engine = Engine(runner, config)
    for _ in range(2):  # from an empty cache each time
        found, ends = served.ends_of(engine, requests)
        assert not served.differences(found, {r.id: cached_tokens(model, r) for r in requests}, ends)
    counters = engine.counters
    assert bool(counters["swapped_blocks"]) == (switch == "swapped")
    assert bool(counters["preempted"]) == (switch in ("swapped", "computed again"))
    assert bool(counters["cached_tokens"]) == (switch == "known prefixes")
