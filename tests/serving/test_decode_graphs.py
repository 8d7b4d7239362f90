"""Decode graphs: what is captured and how it is fed, here with a forward pass in the place of each graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from impls.model.config import ModelConfig
from impls.model.weights import load_model
from impls.serving.decode_graphs import DecodeGraphs, buckets
from impls.serving.engine import Engine, Output
from impls.serving.plain_loop import cached_tokens, plain_tokens
from impls.serving.request import Request, Sampling
from impls.serving.runner import ModelRunner
from impls.serving.scheduler import EngineConfig

SMALL = ModelConfig(
    vocab_size=256, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
CONFIG = EngineConfig(max_running=3, max_step_tokens=24, block_size=16, num_blocks=24, context=64)


class Forwards(DecodeGraphs):
    """Runs the captured pass anew at each replay, on the same static inputs and into the same static logits."""

    def _capture(self, size, pool):
        logits = torch.zeros(size, SMALL.vocab_size)
        self.replays = getattr(self, "replays", [])

        class Replay:
            @staticmethod
            def replay():
                self.replays.append(size)
                logits.copy_(self._forward(size))

        self.graphs[size] = (Replay, logits)
        return pool


def test_buckets_hold_every_batch_and_end_at_the_largest():
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    assert buckets(20) == [1, 2, 4, 8, 16, 20]
    assert buckets(64)[-2:] == [56, 64]


@pytest.mark.parametrize("lookahead", [False, True])
def test_decode_steps_are_replayed_in_buckets_and_right(lookahead):
    model = load_model(shape=SMALL, seed=2)
    config = replace(CONFIG, lookahead=lookahead)
    runner = ModelRunner(model, config, kernels=True, graphs=False)
    runner.graphs = Forwards(runner)
    engine = Engine(runner, config)
    lengths = [(20, 3), (5, 5), (3, 2), (9, 3)]
    requests = [
        Request(f"r{i}", [(7 * i + j) % 256 for j in range(p)], Sampling(max_tokens=n))
        for i, (p, n) in enumerate(lengths)
    ]
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}

    def keep(output: Output) -> None:
        if output.token is not None:
            tokens[output.id].append(output.token)

    engine.serve(requests, keep)
    assert tokens == {r.id: plain_tokens(model, r) for r in requests}
    assert {1, 2, 3} >= set(runner.graphs.replays)
    assert len(runner.graphs.replays) >= 3


def test_the_cached_loop_is_the_plain_loop():
    model = load_model(shape=SMALL, seed=2)
    request = Request("a", [5, 6, 7, 8], Sampling(max_tokens=12))
    assert cached_tokens(model, request) == plain_tokens(model, request)
    stop = plain_tokens(model, request)[3]
    stopping = replace(request, sampling=Sampling(max_tokens=12, stop=(stop,)))
    assert cached_tokens(model, stopping) == plain_tokens(model, stopping)


@pytest.mark.gpu
def test_graphs_on_a_gpu_give_the_tokens_of_eager_steps():
    model = load_model(shape="tiny", seed=2, device="cuda")
    requests = [
        Request(f"r{i}", [(7 * i + j) % 512 for j in range(5 + 9 * i)], Sampling(max_tokens=4 + 3 * i))
        for i in range(6)
    ]
    found = []
    for graphs in (False, True):
        config = replace(CONFIG, lookahead=graphs)
        engine = Engine(ModelRunner(model, config, graphs=graphs), config)
        tokens: dict[str, list[int]] = {r.id: [] for r in requests}
        engine.serve(requests, lambda o, t=tokens: t[o.id].append(o.token) if o.token is not None else None)
        found.append(tokens)
    assert found[0] == found[1] == {r.id: plain_tokens(model, r) for r in requests}
