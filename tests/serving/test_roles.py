"""Prefill and decode workers over a link in memory: the plain loop's tokens, whoever is slow, however small a cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from impls.serving.engine import NOT_A_TOKEN, Engine, Output
from impls.serving.kv_link import MemoryLink, Pieces, transfer_bytes
from impls.serving.recorder import Recorder
from impls.serving.request import Request, Sampling
from impls.serving.role_engines import DecodeEngine, PrefillEngine
from impls.serving.role_workers import DecodeWorker, PrefillWorker, drive
from impls.serving.runner import ModelRunner
from impls.serving.scheduler import EngineConfig

CONFIG = EngineConfig(max_running=4, max_step_tokens=32, block_size=4, num_blocks=64, context=96)
VOCAB = 1009


@dataclass
class Pair:
    """One prefill and one decode worker in this process, and what came out of them."""

    prefill: PrefillWorker
    decode: DecodeWorker
    link: MemoryLink
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, Output] = field(default_factory=dict)
    sides: dict[str, list[str]] = field(default_factory=dict)

    def begin(self, requests: list[Request]) -> None:
        numbered = dict(enumerate(requests))
        self.prefill.begin(numbered)
        self.decode.begin(numbered)
        self.tokens = {request.id: [] for request in requests}
        self.ends, self.sides = {}, {request.id: [] for request in requests}

    def turn(self, worker: PrefillWorker | DecodeWorker) -> list[Output]:
        outputs = worker.turn()
        for output in outputs:
            assert output.id not in self.ends, f"{output.id} was answered after its end"
            if output.token is not None:
                self.tokens[output.id].append(output.token)
                self.sides[output.id].append("prefill" if worker is self.prefill else "decode")
            if output.finished:
                self.ends[output.id] = output
        for one in (self.prefill, self.decode):
            scheduler = one.engine.roles
            held = sum(len(s.blocks) for s in (*scheduler.running, *scheduler.held.values()))
            assert scheduler.blocks.device.free + held == scheduler.blocks.device.count, "a block is lost"
        return outputs

    def serve(self, requests: list[Request], turns: tuple[int, int] = (1, 1)) -> dict[str, list[int]]:
        """Serves them all, each side so many turns a round; a round in which nothing moves for long is a deadlock."""
        self.begin(requests)
        return self.go_on(turns)

    def go_on(self, turns: tuple[int, int] = (1, 1)) -> dict[str, list[int]]:
        still = 0
        while not (self.prefill.done and self.decode.done):
            moved = False
            for worker, count in zip((self.prefill, self.decode), turns, strict=True):
                for _ in range(count):
                    self.turn(worker)
                    moved |= worker.moved
            still = 0 if moved else still + 1
            assert still < 100, "nothing moves any more"
        self.check_empty()
        return self.tokens

    def check_empty(self) -> None:
        for worker in (self.prefill, self.decode):
            assert worker.engine.idle
            assert not worker.engine.roles.held
            assert worker.engine.scheduler.blocks.device.free == worker.engine.config.num_blocks
            assert worker.engine.scheduler.blocks.host.free == worker.engine.config.host_blocks
        assert not self.prefill.offered
        assert not self.decode.arriving


def model_move(prefill: ModelRunner, decode: ModelRunner) -> Callable[[list[int], list[int]], int]:
    """Copies blocks from cache to cache by pieces of one layer, as a wire would."""

    def move(sources: list[int], targets: list[int]) -> int:
        out, into = Pieces(prefill.cache.kv, most=1), Pieces(decode.cache.kv, most=1)
        moved = 0
        for layers in out.ranges(len(sources)):
            buffer = torch.zeros(out.layer_bytes(len(sources)), dtype=torch.uint8)
            out.gather(out.view(buffer, layers, len(sources)), layers, torch.tensor(sources))
            into.scatter(into.view(buffer, layers, len(targets)), layers, torch.tensor(targets))
            moved += buffer.nbytes
        return moved

    return move


def paired(prefill_runner, decode_runner, configs, move, lag=lambda: 0, **more) -> Pair:
    link = MemoryLink(move, lag)
    first, second = configs
    engine = PrefillEngine(
        prefill_runner, first, decode_cache_tokens=second.num_blocks * second.block_size, recorder=Recorder(), **more
    )
    decode = DecodeEngine(decode_runner, second, recorder=Recorder(), **more)
    return Pair(PrefillWorker(engine, [link.sender]), DecodeWorker(decode, [link.receiver]), link)


def on_model(model, prefill=None, decode=None, lag=lambda: 0) -> Pair:
    """Two engines over one model; ``prefill`` and ``decode`` change their configurations."""
    configs = replace(CONFIG, **(prefill or {})), replace(CONFIG, **(decode or {}))
    runners = [ModelRunner(model, config, graphs=False) for config in configs]
    return paired(*runners, configs, model_move(*runners), lag)


#: Changes of the prefill side's and of the decode side's configuration.
ON_THE_MODEL = {
    "plain": ({}, {}),
    "ahead, both small": ({"lookahead": True, "num_blocks": 11}, {"lookahead": True, "num_blocks": 12}),
    "decode swaps": ({"max_step_tokens": 7}, {"num_blocks": 12, "preemption": "swap", "host_blocks": 64}),
    "known prefixes": ({"prefix_caching": True}, {"prefix_caching": True, "num_blocks": 12}),
}


@pytest.mark.parametrize(("prefill", "decode"), ON_THE_MODEL.values(), ids=ON_THE_MODEL.keys())
def test_greedy_gives_the_tokens_of_the_plain_loop(model, requests, answers, prefill, decode):
    pair = on_model(model, prefill, decode)
    # Short prompts first, and a prefill side that is ahead: what decodes beside each other outgrows a small cache.
    assert pair.serve(sorted(requests, key=lambda r: len(r.prompt)), turns=(5, 1)) == answers
    assert pair.sides["r5"] == ["prefill"], "an answer of one token has nothing to hand over"
    for request in requests:
        if request.id != "r5":
            assert pair.sides[request.id] == ["prefill"] + ["decode"] * (request.sampling.max_tokens - 1)
    handed = [request for request in requests if request.id != "r5"]
    assert pair.link.bytes == sum(transfer_bytes(model.config, len(r.prompt), 4, 4) for r in handed)
    counters = pair.decode.engine.counters
    if "num_blocks" in decode and "num_blocks" not in prefill:
        assert counters["preempted"] > 0
    if decode.get("preemption") == "swap":
        assert counters["swapped_blocks"] > 0
        assert counters["prefill_tokens"] == 0
    elif not decode:
        assert counters["prefill_tokens"] == 0, "the decode side ran a prompt"
        assert pair.prefill.engine.counters["decode_tokens"] <= 1, "the prefill side decoded (a prompt of one token)"


def fake_move(first, second) -> Callable[[list[int], list[int]], int]:
    def move(sources: list[int], targets: list[int]) -> int:
        assert len(sources) == len(targets) == len({*targets})
        for source, target in zip(sources, targets, strict=True):
            second.cache[target] = list(first.cache[source])
        return len(sources)

    return move


def faked(fake, prefill=None, decode=None, lag=lambda: 0, **more) -> Pair:
    """Two engines whose model is a hash of what their caches hold."""
    configs = replace(CONFIG, **(prefill or {})), replace(CONFIG, **(decode or {}))
    runners = [fake.Runner(VOCAB, c.num_blocks, c.block_size, c.host_blocks) for c in configs]
    return paired(*runners, configs, fake_move(*runners), lag, **more)


def traffic(count: int, seed: int, longest: int = 40) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            f"q{i}",
            [rng.randrange(VOCAB) for _ in range(min(longest, int(rng.lognormvariate(2.3, 0.9)) + 1))],
            Sampling(max_tokens=min(9, int(rng.lognormvariate(1.6, 0.8)) + 1)),
        )
        for i in range(count)
    ]


ON_THE_FAKE = {
    "plain": ({}, {}),
    "one at a time": ({"max_running": 1}, {"max_running": 1}),
    "blocks of 1": ({"block_size": 1, "num_blocks": 256}, {"block_size": 1, "num_blocks": 256}),
    "blocks of 64": ({"block_size": 64, "num_blocks": 8}, {"block_size": 64, "num_blocks": 8}),
    "odd chunks": ({"max_step_tokens": 7}, {}),
    "whole prompts": ({"chunked_prefill": False}, {}),
    "small prefill cache": ({"num_blocks": 11}, {}),
    "small decode cache": ({}, {"num_blocks": 12}),
    "both small": ({"num_blocks": 11}, {"num_blocks": 12}),
    "both small, ahead": ({"num_blocks": 11, "lookahead": True}, {"num_blocks": 12, "lookahead": True}),
    "decode swaps": ({}, {"num_blocks": 12, "preemption": "swap", "host_blocks": 9}),
    "decode swaps ahead": ({}, {"num_blocks": 12, "preemption": "swap", "host_blocks": 9, "lookahead": True}),
    "reserved": ({}, {"paging": "reserve", "num_blocks": 50}),
    "static": ({"batching": "static"}, {"batching": "static"}),
    "known prefixes": ({"prefix_caching": True}, {"prefix_caching": True, "num_blocks": 12}),
}


@pytest.mark.parametrize("turns", [(1, 1), (5, 1), (1, 5)], ids=["alike", "prefill is fast", "decode is fast"])
@pytest.mark.parametrize(("prefill", "decode"), ON_THE_FAKE.values(), ids=ON_THE_FAKE.keys())
def test_the_tokens_are_right_whoever_is_slow(fake, prefill, decode, turns):
    requests = traffic(60, seed=4)
    rng = random.Random(5)
    pair = faked(fake, prefill, decode, lag=lambda: rng.choice((0, 0, 1, 7)))
    for order in (requests, requests[::-1]):
        want = {r.id: fake.answer_of(r.prompt, r.sampling.max_tokens, VOCAB) for r in order}
        assert pair.serve(order, turns) == want
        assert {output.finished for output in pair.ends.values()} == {"length"}
    if decode.get("num_blocks") == 12 and "num_blocks" not in prefill:
        assert pair.decode.engine.counters["preempted"] > 0


def test_sampled_answers_are_those_of_one_engine(model, requests):
    sampled = [
        replace(r, sampling=replace(r.sampling, temperature=0.8, top_p=0.95, seed=i)) for i, r in enumerate(requests)
    ]
    one = Engine(ModelRunner(model, CONFIG), CONFIG)
    alone: dict[str, list[int]] = {r.id: [] for r in sampled}
    one.serve(sampled, lambda o: alone[o.id].append(o.token) if o.token is not None else None)
    assert on_model(model).serve(sampled) == alone


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_stop_token_ends_an_answer_on_either_side(fake, lookahead):
    prompts = [[i, 7, 9 + i] for i in range(6)]
    answers = [fake.answer_of(prompt, 9, VOCAB) for prompt in prompts]
    places = [0, 1, 0, 4, 8, 0]
    requests = [
        Request(f"q{i}", prompt, Sampling(max_tokens=9, stop=(answers[i][places[i]],)))
        for i, prompt in enumerate(prompts)
    ]
    pair = faked(fake, {"lookahead": lookahead}, {"lookahead": lookahead})
    tokens = pair.serve(requests)
    for i, request in enumerate(requests):
        place = answers[i].index(answers[i][places[i]])
        assert tokens[request.id] == answers[i][: place + 1]
        assert pair.ends[request.id].finished == "stop"
        assert pair.sides[request.id] == ["prefill"] + ["decode"] * place
    handed = sum(answers[i].index(answers[i][places[i]]) > 0 for i in range(6))
    assert pair.link.bytes == handed, "a block of an answer that its first token completes has travelled"


@pytest.mark.parametrize("lookahead", [False, True])
def test_what_no_side_can_finish_is_refused_and_what_has_no_numbers_fails_alone(fake, lookahead):
    pair = faked(fake, {"num_blocks": 8, "lookahead": lookahead}, {"num_blocks": 12, "lookahead": lookahead})
    run = pair.prefill.engine.runner.execute

    def broken(step):
        drawing = [chunk.sequence for chunk in step.chunks if chunk.samples]
        return [NOT_A_TOKEN if s.id == "bad" else t for s, t in zip(drawing, run(step), strict=True)]

    pair.prefill.engine.runner.execute = broken
    requests = [
        Request("long prompt", [1] * 33, Sampling(max_tokens=2)),
        Request("long answer", [1] * 20, Sampling(max_tokens=30)),
        Request("longer than the context", [1] * 90, Sampling(max_tokens=30)),
        Request("empty", []),
        Request("no token", [1, VOCAB]),
        Request("bad", [4, 5, 6], Sampling(max_tokens=5)),
        Request("fits", [1] * 32, Sampling(max_tokens=17)),
    ]
    tokens = pair.serve(requests)
    reasons = {key: output.reason for key, output in pair.ends.items() if output.finished == "refused"}
    assert reasons == {
        "long prompt": "33 prompt tokens exceed the prefill side's cache of 32 tokens",
        "long answer": "20 prompt and 30 answer tokens exceed the cache of 48 tokens",
        "longer than the context": "90 prompt and 30 answer tokens exceed the context of 96",
        "empty": "the prompt is empty",
        "no token": f"token {VOCAB} at place 1 of the prompt is not in the vocabulary of {VOCAB}",
    }
    assert (tokens["bad"], pair.ends["bad"].finished) == ([], "failed")
    assert tokens["fits"] == fake.answer_of([1] * 32, 17, VOCAB)


def test_a_full_decode_cache_holds_the_prefill_side_back_and_loses_nothing(fake):
    # Each prompt fills half of the decode side's cache, and answers are long: at most one decodes, and while it does
    # the prefill side fills its own cache with what waits for room, and stops.
    requests = [Request(f"q{i}", [i + 1] * 24, Sampling(max_tokens=20)) for i in range(8)]
    pair = faked(fake, {"num_blocks": 20}, {"num_blocks": 12})
    pair.begin(requests)
    for _ in range(12):
        pair.turn(pair.prefill)
    assert len(pair.prefill.offered) == 3, "the prefill cache holds three prompts of six blocks"
    assert not pair.prefill.moved
    assert pair.prefill.engine.scheduler.waiting
    pair.turn(pair.decode)
    assert len(pair.decode.arriving) == 1
    assert len(pair.decode.offers) == 2
    assert pair.go_on() == {r.id: fake.answer_of(r.prompt, 20, VOCAB) for r in requests}
    assert pair.decode.engine.counters["preempted"] == 0


@pytest.mark.parametrize("turns", [(1, 1), (4, 1), (1, 4)], ids=["alike", "prefill is fast", "decode is fast"])
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_cancelled_anywhere_a_request_ends_once_and_gives_everything_back(fake, turns, lookahead, preemption):
    requests = traffic(150, seed=7)
    rng = random.Random(8)
    small = {"num_blocks": 12, "host_blocks": 9, "lookahead": lookahead, "preemption": preemption}
    pair = faked(fake, {"lookahead": lookahead, "num_blocks": 16}, small, lag=lambda: rng.choice((0, 0, 2, 5)))
    # Many are cancelled, each somewhere else: before or in its prompt, on offer, on its way, in decode.
    places = {r.id: rng.choice(PLACES) for r in requests if rng.random() < 0.5}
    pair.begin(requests)
    cancelled: dict[str, str] = {}
    for _ in range(3000):
        for worker, count in zip((pair.prefill, pair.decode), turns, strict=True):
            for _ in range(count):
                for key in [key for key, place in places.items() if whereabouts(pair, key) == place]:
                    assert pair.prefill.cancel(key)
                    cancelled[key] = places.pop(key)
                pair.turn(worker)
        if pair.prefill.done and pair.decode.done:
            break
    else:
        pytest.fail("the run does not end")
    pair.check_empty()
    assert set(pair.ends) == {r.id for r in requests}
    assert set(cancelled.values()) == set(PLACES)
    for request in requests:
        answer = fake.answer_of(request.prompt, request.sampling.max_tokens, VOCAB)
        tokens, end = pair.tokens[request.id], pair.ends[request.id].finished
        if end == "length":
            # The decode side may be done by the time that the word reaches it.
            assert tokens == answer
            assert cancelled.get(request.id) in (None, "granted", "decode side")
        else:
            assert end == "cancelled"
            assert request.id in cancelled
            assert tokens == answer[: len(tokens)]
    ended = Counter(cancelled[key] for key in cancelled if pair.ends[key].finished == "cancelled")
    assert set(ended) == set(PLACES)


PLACES = ("prompt", "offered", "granted", "decode side")


def whereabouts(pair: Pair, key: str) -> str:
    """Where a request stands, told from outside."""
    number = pair.prefill.numbers[key]
    if key in pair.ends or key in {request.id for request in pair.prefill.coming}:
        return "nowhere"
    if number in pair.decode.arriving:
        return "granted"
    if number in pair.prefill.offered:
        return "offered"
    return "decode side" if number in pair.prefill.handed_over else "prompt"


def test_cancelling_what_is_over_or_unknown_does_nothing(fake):
    requests = [Request("a", [1, 2], Sampling(max_tokens=1)), Request("b", [1, 2], Sampling(max_tokens=3))]
    pair = faked(fake)
    pair.serve(requests)
    assert not pair.prefill.cancel("nobody")
    assert not pair.prefill.cancel("a")
    assert pair.prefill.cancel("b"), "the prefill side cannot know that it is over"
    assert pair.turn(pair.decode) == []


def test_several_of_each_share_the_requests(fake):
    requests = traffic(40, seed=9)
    config = replace(CONFIG, num_blocks=14)
    sides = [[fake.Runner(VOCAB, 14, 4) for _ in range(2)] for _ in range(2)]
    links = [[MemoryLink(fake_move(p, d)) for d in sides[1]] for p in sides[0]]
    prefills = [
        PrefillWorker(PrefillEngine(runner, config, decode_cache_tokens=56), [link.sender for link in row])
        for runner, row in zip(sides[0], links, strict=True)
    ]
    decodes = [
        DecodeWorker(DecodeEngine(runner, config), [row[i].receiver for row in links])
        for i, runner in enumerate(sides[1])
    ]
    numbered = dict(enumerate(requests))
    for place, worker in enumerate(prefills):
        worker.begin({n: r for n, r in numbered.items() if n % 2 == place}, {n: n // 2 % 2 for n in numbered})
    for worker in decodes:
        worker.begin(numbered)
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    for _ in range(2000):
        for output in drive(prefills, decodes):
            tokens[output.id].append(output.token)
        if all(worker.done for worker in (*prefills, *decodes)):
            break
    assert tokens == {r.id: fake.answer_of(r.prompt, r.sampling.max_tokens, VOCAB) for r in requests}
    assert all(link.bytes for row in links for link in row), "a link was never used"


def test_two_requests_of_one_id_are_refused(fake):
    with pytest.raises(ValueError, match="share an id"):
        faked(fake).begin([Request("a", [1]), Request("a", [2])])
