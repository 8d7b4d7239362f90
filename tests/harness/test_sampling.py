"""Samples are interleaved, stop when they are tight or time is up, and never fewer than promised."""

from __future__ import annotations

import random

import pytest

from harness.clock import Tick
from harness.sampling import LEAST_WARMUP_CALLS, MAX_SAMPLES, Lane, Plan, sample_all


class FakeMachine:
    """A clock that advances by what each sample takes, and remembers who was sampled when."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []

    def lane(self, name: str, seconds, exclusive: bool = False) -> Lane:
        def sample() -> Tick:
            value = seconds() if callable(seconds) else seconds
            self.now += value
            self.log.append(name)
            return Tick(value)

        def enter() -> None:
            self.log.append(f"+{name}")

        def leave() -> None:
            self.log.append(f"-{name}")

        return Lane(name, sample, exclusive, enter, leave)

    def plan(self, budget: float = 1.0, **more) -> Plan:
        return Plan(budget=budget, least=10, now=lambda: self.now, **more)


def test_variants_take_turns_in_random_order() -> None:
    machine = FakeMachine()
    noise = random.Random(1)
    lanes = [machine.lane(n, lambda: noise.uniform(0.9, 1.1)) for n in "abc"]
    series = sample_all(lanes, machine.plan(budget=60.0))
    rounds = len(series["a"].values)
    assert {n: len(s.values) for n, s in series.items()} == dict.fromkeys("abc", rounds)
    tail = [x for x in machine.log if x in "abc"][-3 * rounds :]
    turns = [tuple(tail[i : i + 3]) for i in range(0, len(tail), 3)]
    assert all(sorted(t) == ["a", "b", "c"] for t in turns)
    assert len(set(turns)) > 1


def test_a_call_longer_than_the_budget_still_gets_ten_samples() -> None:
    machine = FakeMachine()
    series = sample_all([machine.lane("slow", 100.0)], machine.plan(budget=1.0))
    assert len(series["slow"].values) == 10


def test_steady_samples_stop_early_and_noisy_ones_at_the_budget() -> None:
    machine = FakeMachine()
    assert len(sample_all([machine.lane("steady", 0.01)], machine.plan(budget=100.0))["steady"].values) == 10
    noise = random.Random(2)
    series = sample_all([machine.lane("noisy", lambda: noise.choice([0.01, 0.03]))], machine.plan(budget=2.0))
    assert 10 < len(series["noisy"].values) <= MAX_SAMPLES


def test_an_exact_number_of_samples_is_kept() -> None:
    machine = FakeMachine()
    assert len(sample_all([machine.lane("a", 0.01)], machine.plan(exactly=17))["a"].values) == 17
    assert len(sample_all([machine.lane("a", 0.01)], machine.plan(exactly=3))["a"].values) == 3


def test_warm_up_goes_on_until_times_settle() -> None:
    machine = FakeMachine()
    falling = iter([1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.015] + [0.01] * 1000)
    series = sample_all([machine.lane("a", lambda: next(falling))], machine.plan(budget=100.0))
    assert series["a"].settled
    assert max(series["a"].values) == 0.01


def test_exclusive_variants_alternate_in_blocks_and_never_live_beside_another() -> None:
    machine = FakeMachine()
    lanes = [machine.lane("a", 0.01), machine.lane("big", 0.01, exclusive=True)]
    series = sample_all(lanes, machine.plan(budget=3.0))
    alive: set[str] = set()
    for entry in machine.log:
        if entry.startswith("+"):
            alive.add(entry[1:])
            assert len(alive) == 1
        elif entry.startswith("-"):
            alive.discard(entry[1:])
    assert machine.log.count("+big") == machine.log.count("-big") == 3
    assert all(len(s.values) >= 10 for s in series.values())


@pytest.mark.parametrize("asked", [1, 2, 3, 10, 17])
def test_exactly_is_exact_in_blocks_too(asked: int) -> None:
    machine = FakeMachine()
    lanes = [machine.lane("a", 0.01), machine.lane("big", 0.01, exclusive=True)]
    series = sample_all(lanes, machine.plan(exactly=asked))
    assert [len(s.values) for s in series.values()] == [asked, asked]


def test_the_skew_kept_is_that_of_the_samples_kept() -> None:
    skews = iter(range(10_000))

    def sample() -> Tick:
        skew = float(next(skews))
        return Tick(0.01 + skew * 1e-9, skew=skew)

    lanes = [Lane(name, sample, exclusive=True) for name in "ab"]
    for series in sample_all(lanes, FakeMachine().plan(exactly=10)).values():
        assert series.warmup > 0
        assert [round((v - 0.01) * 1e9) for v in series.values] == [round(s) for s in series.skews]


def test_a_lane_is_left_when_sampling_fails() -> None:
    machine = FakeMachine()

    def broken() -> float:
        raise RuntimeError("no")

    try:
        sample_all([machine.lane("a", broken)], machine.plan())
    except RuntimeError:
        machine.log.append("raised")
    assert machine.log == ["+a", "-a", "raised"]


def test_steps_too_long_to_settle_alone_warm_up_side_by_side_before_they_count() -> None:
    """Five of 0.1 s had four calls each in their share of the time, and their first rounds were a half slower."""
    machine = FakeMachine()
    calls = dict.fromkeys("abcde", 0)

    def slow_at_first(name: str) -> float:
        calls[name] += 1
        return 0.15 if calls[name] <= 6 else 0.1

    lanes = [machine.lane(n, lambda n=n: slow_at_first(n)) for n in "abcde"]
    series = sample_all(lanes, machine.plan(budget=10.0))
    for found in series.values():
        assert max(found.values) == 0.1
        assert found.warmup == LEAST_WARMUP_CALLS
    assert machine.log.count("a") == series["a"].warmup + len(series["a"].values)


def test_uncounted_rounds_take_at_most_half_of_the_time_and_none_where_a_number_was_asked() -> None:
    machine = FakeMachine()
    assert sample_all([machine.lane("long", 4.0)], machine.plan(budget=10.0))["long"].warmup == 2
    exact = FakeMachine()
    assert sample_all([exact.lane("long", 4.0)], exact.plan(budget=10.0, exactly=3))["long"].warmup == 1


def test_every_block_of_one_that_is_alone_warms_up_anew() -> None:
    machine = FakeMachine()
    lanes = [machine.lane(n, 0.1, exclusive=True) for n in "ab"]
    assert sample_all(lanes, machine.plan(budget=12.0))["a"].warmup == 3 * LEAST_WARMUP_CALLS
