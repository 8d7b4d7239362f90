"""What disaggregation promises and what it costs, in time that passes by a price of steps: no noise, no hardware.

Every engine has a clock of its own, and the one that is behind goes on; a message is seen when it was sent by then.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace

import pytest

from harness.serving.metrics import Slo, summarize
from impls.serving.engine import Engine
from impls.serving.kv_link import Event, MemoryLink
from impls.serving.ranked_case import share_out
from impls.serving.recorder import Recorder
from impls.serving.request import Request, Sampling
from impls.serving.role_engines import DecodeEngine, PrefillEngine
from impls.serving.role_workers import DecodeWorker, PrefillWorker
from impls.serving.schedule_cost import StepCost
from impls.serving.scheduler import EngineConfig
from impls.serving.timelines import Part, merge

VOCAB = 1009
CONFIG = EngineConfig(max_running=8, max_step_tokens=64, block_size=4, num_blocks=400, context=300)
PRICE = StepCost(fixed=1.0, prefill=0.1, decode=0.02)


def price(step) -> float:
    decodes = sum(chunk.length == 1 for chunk in step.chunks)
    return PRICE.of(step.tokens - decodes, decodes)


class TimedLink(MemoryLink):
    """What the prefill side tells at a time is seen from that time on, blocks so many seconds later."""

    def __init__(self, move, clocks, transfer: float) -> None:
        super().__init__(move, clock=clocks[1])
        self.sent: deque[float] = deque()
        self.clocks, self.transfer = clocks, transfer

    def tell(self, event: Event) -> None:
        super().tell(event)
        late = self.transfer if type(event).__name__ == "Arrived" else 0.0
        self.sent.append(max([self.clocks[0].now + late, *list(self.sent)[-1:]]))

    def look_forth(self) -> list[Event]:
        letters, self._forth = self._forth, deque()
        while self.sent and self.sent[0] <= self.clocks[1].now:
            self.sent.popleft()
            self._forth.append(letters.popleft())
        seen = super().look_forth()
        self._forth = letters
        return seen


@dataclass
class Outcome:
    """The figures of a run, the gaps between tokens from the second one on, and the share of its time a rank worked."""

    metrics: dict
    later_gaps: list[float]
    busy: list[float]


def outcome(parts, recorders) -> Outcome:
    whole = merge(parts)
    gaps = [
        b - a
        for request in whole["requests"].values()
        for a, b in zip(request["token_times"][1:], request["token_times"][2:], strict=False)
    ]
    busy = [sum(seconds for *_, seconds in recorder.steps) / whole["end"] for recorder in recorders]
    metrics = summarize(whole, Slo(ttft=60.0, tpot=1.5)).metrics
    return Outcome({key: entry["value"] for key, entry in metrics.items()}, sorted(gaps), busy)


def side_by_side(fake, requests: list[Request]) -> Outcome:
    parts, recorders = [], []
    shares = share_out([len(r.prompt) + r.sampling.max_tokens for r in requests], 2)
    for rank in range(2):
        clock, recorder = fake.Clock(), Recorder()
        runner = fake.Runner(VOCAB, CONFIG.num_blocks, 4, clock=clock, cost=price)
        engine = Engine(runner, CONFIG, clock=clock, sleep=clock.sleep, recorder=recorder)
        engine.serve([r for r, share in zip(requests, shares, strict=True) if share == rank])
        parts.append(Part(0.0, recorder.timeline()))
        recorders.append(recorder)
    return outcome(parts, recorders)


def apart(fake, requests: list[Request], transfer: float = 0.0) -> Outcome:
    clocks, recorders = (fake.Clock(), fake.Clock()), (Recorder(), Recorder())
    configs = CONFIG, replace(CONFIG, max_running=16)
    runners = [fake.Runner(VOCAB, CONFIG.num_blocks, 4, clock=clock, cost=price) for clock in clocks]

    def move(sources, targets) -> int:
        for source, target in zip(sources, targets, strict=True):
            runners[1].cache[target] = list(runners[0].cache[source])
        return len(sources)

    link = TimedLink(move, clocks, transfer)
    first = PrefillEngine(runners[0], configs[0], decode_cache_tokens=1600, clock=clocks[0], recorder=recorders[0])
    second = DecodeEngine(runners[1], configs[1], clock=clocks[1], recorder=recorders[1])
    prefill, decode = PrefillWorker(first, [link.sender]), DecodeWorker(second, [link.receiver])
    numbered = dict(enumerate(requests))
    prefill.begin(numbered)
    decode.begin(numbered)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    while not (prefill.done and decode.done):
        late = prefill.done or (clocks[1].now < clocks[0].now and not decode.done)
        worker, clock, other = (decode, clocks[1], clocks[0]) if late else (prefill, clocks[0], clocks[1])
        for output in worker.turn():
            tokens[output.id].append(output.token)
        if not worker.moved:
            # Nothing to do: until the other one is further, or the next thing is known to happen.
            due = [t for t in (prefill.next_arrival, *list(link.sent)[:1]) if t is not None and t > clock.now]
            clock.now = min([*due, max(other.now, clock.now) + 0.01])
    assert tokens == {r.id: fake.answer_of(r.prompt, r.sampling.max_tokens, VOCAB) for r in requests}
    return outcome([Part(0.0, recorder.timeline()) for recorder in recorders], recorders)


def traffic(count: int, every: float, prompt: int, answer: int) -> list[Request]:
    rng = random.Random(1)
    return [
        Request(
            f"q{i}",
            [rng.randrange(VOCAB) for _ in range(rng.randint(prompt // 2, prompt * 3 // 2))],
            Sampling(max_tokens=rng.randint(answer // 2, answer * 3 // 2)),
            arrival=i * every,
        )
        for i in range(count)
    ]


def test_prompts_no_longer_interrupt_decode_on_the_same_two_engines(fake):
    # A step with a chunk of a prompt is up to six times as long as one of decode alone.
    requests = traffic(60, every=12.0, prompt=90, answer=16)
    together, divided = side_by_side(fake, requests), apart(fake, requests, transfer=0.5)
    step = PRICE.of(0, 16)
    assert max(divided.later_gaps) <= step
    assert together.metrics["itl_p99"] > 4 * step
    assert divided.metrics["tpot_p99"] < 0.6 * together.metrics["tpot_p99"]
    assert divided.metrics["goodput"] > 1.5 * together.metrics["goodput"]


def test_the_transfer_is_paid_once_between_the_first_two_tokens(fake):
    requests = traffic(30, every=20.0, prompt=60, answer=12)
    free, paid = apart(fake, requests), apart(fake, requests, transfer=10.0)
    assert paid.metrics["ttft_p50"] == free.metrics["ttft_p50"]
    assert paid.later_gaps[-1] <= PRICE.of(0, 16)
    assert paid.metrics["e2e_p50"] == pytest.approx(free.metrics["e2e_p50"] + 10.0, abs=1.5)


def test_where_the_mix_does_not_fit_one_rank_idles_and_less_is_served(fake):
    requests = traffic(40, every=0.0, prompt=160, answer=3)
    together, divided = side_by_side(fake, requests), apart(fake, requests)
    assert divided.metrics["output_rate"] < 0.65 * together.metrics["output_rate"]
    assert divided.metrics["ttft_p99"] > 1.5 * together.metrics["ttft_p99"]
    assert min(together.busy) > 0.85
    assert divided.busy[0] > 0.95
    assert divided.busy[1] < 0.3
