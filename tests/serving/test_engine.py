"""The engine against the plain loop: the very tokens, whatever the batch, order, block size, chunking or preemption."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from harness.serving.timeline import parse_timeline
from impls.model.config import ModelConfig
from impls.model.weights import load_model
from impls.serving.engine import Engine, Output
from impls.serving.plain_loop import plain_tokens
from impls.serving.recorder import Recorder
from impls.serving.request import Request, Sampling
from impls.serving.runner import ModelRunner
from impls.serving.scheduler import EngineConfig

CONFIG = EngineConfig(max_running=4, max_step_tokens=32, block_size=4, num_blocks=64, context=96)


def serve(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}

    def keep(output: Output) -> None:
        if output.token is not None:
            tokens[output.id].append(output.token)

    engine.serve(requests, keep)
    return tokens


VARIATIONS = {
    "plain": {},
    "one at a time": {"max_running": 1},
    "blocks of 1": {"block_size": 1, "num_blocks": 256},
    "blocks of 64": {"block_size": 64, "num_blocks": 8},
    "odd chunks": {"max_step_tokens": 7},
    "whole prompts": {"chunked_prefill": False},
    "reserved": {"paging": "reserve", "num_blocks": 50},
    "static": {"batching": "static"},
    "preempted": {"num_blocks": 16},
    "preempted whole": {"num_blocks": 16, "chunked_prefill": False},
    "preempted static": {"num_blocks": 16, "batching": "static"},
    "swapped": {"num_blocks": 16, "preemption": "swap", "host_blocks": 64},
    "swapped, small host": {"num_blocks": 16, "preemption": "swap", "host_blocks": 7},
    "ahead": {"lookahead": True},
    "ahead, preempted": {"lookahead": True, "num_blocks": 16},
    "ahead, swapped": {"lookahead": True, "num_blocks": 16, "preemption": "swap", "host_blocks": 64},
    "ahead, static": {"lookahead": True, "batching": "static"},
    "invariant": {"batch_invariant": True},
    "invariant, preempted": {"batch_invariant": True, "num_blocks": 16},
}


@pytest.mark.parametrize("change", VARIATIONS.values(), ids=VARIATIONS.keys())
def test_greedy_gives_the_tokens_of_the_plain_loop(model, requests, answers, change):
    config = replace(CONFIG, **change)
    engine = Engine(ModelRunner(model, config), config)
    assert serve(engine, requests) == answers
    assert serve(engine, requests[::-1]) == answers
    assert engine.scheduler.blocks.device.free == config.num_blocks
    assert engine.scheduler.blocks.host.free == config.host_blocks
    if config.num_blocks == 16:
        assert engine.counters["preempted"] > 0
    if config.preemption == "swap":
        assert engine.counters["swapped_blocks"] > 0


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, id="plain"),
        pytest.param({"num_blocks": 8}, id="preempted", marks=pytest.mark.slow),
        pytest.param({"block_size": 32, "num_blocks": 16}, id="blocks of 32", marks=pytest.mark.slow),
        pytest.param({"batch_invariant": True}, id="invariant", marks=pytest.mark.slow),
    ],
)
def test_the_kernels_give_the_tokens_of_the_plain_loop(requests, change):
    small = ModelConfig(
        vocab_size=512, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16
    )
    model = load_model(shape=small, seed=5)
    config = replace(CONFIG, **{"block_size": 16, "num_blocks": 32, **change})
    few = [replace(r, sampling=Sampling(max_tokens=min(3, r.sampling.max_tokens))) for r in requests[:4]]
    if config.num_blocks == 8:
        few = [replace(r, prompt=(30 * r.prompt)[:30], sampling=Sampling(max_tokens=6)) for r in few]
    engine = Engine(ModelRunner(model, config, kernels=True, graphs=False), config)
    assert serve(engine, few) == {r.id: plain_tokens(model, r) for r in few}
    if config.num_blocks == 8:
        assert engine.counters["preempted"] > 0


def test_graphs_are_refused_where_there_is_no_gpu(model):
    with pytest.raises(ValueError, match="CUDA graphs need"):
        ModelRunner(model, CONFIG, graphs=True)


@pytest.mark.parametrize("lookahead", [False, True])
def test_stop_tokens_end_an_answer_and_are_its_last_token(model, requests, answers, lookahead):
    answer = answers["r6"]
    stop = answer[4]
    request = replace(requests[6], sampling=Sampling(max_tokens=14, stop=(stop,)))
    config = replace(CONFIG, lookahead=lookahead)
    engine = Engine(ModelRunner(model, config), config)
    ends: list[Output] = []
    engine.serve([request], lambda o: ends.append(o) if o.finished else None)
    assert [(o.token, o.finished) for o in ends] == [(stop, "stop")]
    assert serve(engine, [request])["r6"] == answer[: answer.index(stop) + 1]


def test_a_stream_gives_tokens_one_by_one_and_leaves_the_others_theirs(model, requests, answers):
    engine = Engine(ModelRunner(model, CONFIG), CONFIG)
    engine.submit(requests[0])
    assert list(engine.stream(requests[1])) == answers["r1"]
    other = []
    while not engine.idle:
        other.extend(o.token for o in engine.step() if o.id == "r0")
    assert other == answers["r0"]


def test_a_stream_that_is_closed_cancels_its_request(model, requests):
    engine = Engine(ModelRunner(model, CONFIG), CONFIG)
    stream = engine.stream(requests[4])
    next(stream)
    stream.close()
    assert engine.idle
    assert engine.scheduler.blocks.device.free == CONFIG.num_blocks


BAD = {
    "empty": (replace(Request("x", []), sampling=Sampling()), "the prompt is empty"),
    "too long": (Request("x", [1] * 90, Sampling(max_tokens=7)), "exceed the context of 96"),
    "token": (Request("x", [1, 512], Sampling()), "token 512 at place 1 .* not in the vocabulary of 512"),
    "negative token": (Request("x", [-1], Sampling()), "token -1 at place 0"),
    "fraction": (Request("x", [1.5], Sampling()), "token 1.5 at place 0"),
    "negative length": (Request("x", [1], Sampling(max_tokens=-3)), "max_tokens is -3"),
    "no length": (Request("x", [1], Sampling(max_tokens=0)), "max_tokens is 0"),
    "nan": (Request("x", [1], Sampling(temperature=math.nan)), "temperature is nan"),
    "inf": (Request("x", [1], Sampling(temperature=math.inf)), "temperature is inf"),
    "top_p": (Request("x", [1], Sampling(temperature=1.0, top_p=0.0)), "top_p is 0.0"),
    "nan top_p": (Request("x", [1], Sampling(temperature=1.0, top_p=math.nan)), "top_p is nan"),
    "top_k": (Request("x", [1], Sampling(temperature=1.0, top_k=-1)), "top_k is -1"),
    "seed": (Request("x", [1], Sampling(seed=2**63)), "seed is"),
    "no prompt": (Request("x", None), "the prompt is of type NoneType, not a sequence of token ids"),
    "no order": (Request("x", {1, 2}), "the prompt is of type set"),
    "no sampling": (Request("x", [1], None), "sampling is None"),
    "temperature beyond floats": (Request("x", [1], Sampling(temperature=10**400)), "temperature is 1000"),
    "top_k beyond 64 bits": (Request("x", [1], Sampling(temperature=1.0, top_k=2**63)), "top_k is 9223372036854775808"),
    "stop": (Request("x", [1], Sampling(stop=5)), "stop is 5; it must be a tuple of token ids"),
    "nan arrival": (Request("x", [1], arrival=math.nan), "arrival is nan"),
    "endless arrival": (Request("x", [1], arrival=math.inf), "arrival is inf"),
    "negative arrival": (Request("x", [1], arrival=-1.0), "arrival is -1.0"),
    "arrival": (Request("x", [1], arrival="noon"), "arrival is 'noon'"),
}


@pytest.mark.parametrize(("bad", "reason"), BAD.values(), ids=BAD.keys())
def test_what_makes_no_sense_is_refused_alone_with_its_reason(model, requests, answers, bad, reason):
    engine = Engine(ModelRunner(model, CONFIG), CONFIG, recorder=Recorder())
    ends: dict[str, Output] = {}
    engine.serve([bad, requests[0]], lambda o: ends.update({o.id: o}) if o.finished else None)
    assert ends["x"].finished == "refused"
    assert re.search(reason, ends["x"].reason)
    assert ends["r0"].finished == "length"
    assert [r.status for r in parse_timeline(engine.recorder.timeline()).requests] == ["refused", "finished"]
    with pytest.raises(ValueError, match=reason):
        next(engine.stream(bad))


def test_a_prompt_longer_than_the_cache_is_refused(model):
    config = replace(CONFIG, num_blocks=8)
    engine = Engine(ModelRunner(model, config), config)
    assert engine.submit(Request("fits", [1] * 30, Sampling(max_tokens=3))) is None
    reason = engine.submit(Request("x", [1] * 30, Sampling(max_tokens=4)))
    assert reason == "30 prompt and 4 answer tokens exceed the cache of 32 tokens"
    while not engine.idle:
        engine.step()


def test_an_id_under_way_cannot_be_used_twice(model, requests):
    engine = Engine(ModelRunner(model, CONFIG), CONFIG)
    engine.submit(requests[0])
    with pytest.raises(ValueError, match="under way"):
        engine.submit(requests[0])
    # A trace is looked through before any of it is sent.
    with pytest.raises(ValueError, match="'r1' is there twice"):
        engine.serve([requests[0], requests[1], replace(requests[1], arrival=5.0)])
    assert not engine.idle


@pytest.mark.parametrize("lookahead", [False, True])
def test_logits_that_are_not_numbers_fail_their_request_alone(requests, lookahead):
    # Token 7's embedding is NaN: whoever has it in the prompt gets NaN logits, and nobody else.
    broken = load_model(shape="tiny", seed=1)
    with torch.no_grad():
        broken.embed_tokens.weight[7] = math.nan
    good = replace(requests[1], prompt=[t if t != 7 else 8 for t in requests[1].prompt])
    expected = plain_tokens(broken, good)
    config = replace(CONFIG, lookahead=lookahead)
    engine = Engine(ModelRunner(broken, config), config)
    tokens: list[int] = []
    ends: dict[str, Output] = {}

    def keep(output: Output) -> None:
        if output.finished:
            ends[output.id] = output
        if output.id == good.id and output.token is not None:
            tokens.append(output.token)

    bad = [Request("bad", [5, 7, 9], Sampling(max_tokens=4)), Request("bad1", [7] * 30, Sampling(max_tokens=1))]
    engine.serve([*bad, good], keep)
    assert ends["bad"].finished == ends["bad1"].finished == "failed"
    assert "not finite" in ends["bad"].reason
    assert tokens == expected
    # Whoever gets the broken requests' blocks next finds nothing of them there: short answers fill a part of a block,
    # and are computed beside longer ones.
    short = [Request(f"short{i}", [8 + i, 9, 10][: 1 + i % 3], Sampling(max_tokens=2)) for i in range(12)]
    assert serve(engine, [bad[1]]) == {"bad1": []}
    answers = {request.id: plain_tokens(broken, request) for request in short}
    for request in short:
        engine.submit(request)
    given: dict[str, list[int]] = {request.id: [] for request in short}
    while not engine.idle:
        for output in engine.step():
            assert output.finished != "failed", output
            given[output.id].append(output.token)
    assert given == answers


@pytest.mark.parametrize("change", [{}, {"max_step_tokens": 11}, {"num_blocks": 16}], ids=["plain", "chunks", "small"])
def test_the_invariant_mode_gives_the_same_logits_to_the_bit_beside_any_neighbours(model, requests, change):
    config = replace(CONFIG, batch_invariant=True, **change)

    def logits_of(crowd: list[Request]) -> list[torch.Tensor]:
        runner = ModelRunner(model, config)
        engine = Engine(runner, config)
        kept: list[torch.Tensor] = []
        run = runner._run_invariant

        def spy(chunks):
            logits = run(chunks)
            rows = [c for c in chunks if c.samples]
            kept.extend(logits[i].clone() for i, c in enumerate(rows) if c.sequence.id == "r4")
            return logits

        runner._run_invariant = spy
        engine.serve(crowd)
        return kept

    alone, crowded = logits_of([requests[4]]), logits_of(requests)
    assert len(alone) == len(crowded) == 10
    assert all(torch.equal(a, b) for a, b in zip(alone, crowded, strict=True))


@pytest.mark.parametrize("bad", [{"block_size": 0}, {"max_step_tokens": 3}, {"paging": "stack"}, {"host_blocks": -1}])
def test_a_configuration_that_cannot_work_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        replace(CONFIG, **bad)


def test_a_context_beyond_the_models_is_refused(model):
    with pytest.raises(ValueError, match="exceeds the model's 2048 positions"):
        ModelRunner(model, replace(CONFIG, context=4096, num_blocks=4096))
