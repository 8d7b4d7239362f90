"""Takes samples of the variants of one pair: warm up until settled, then interleaved rounds in random order.

Drift of the machine hits every variant alike, because each round holds one sample of each. A variant that cannot live
beside the others is exclusive: it alternates with them in blocks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.stats import median, settled

if TYPE_CHECKING:  # clocks import torch, and who only asks for MIN_SAMPLES must not
    from harness.clock import Tick

MIN_SAMPLES = {"op": 10, "step": 10, "serve": 3}
MAX_SAMPLES = 1000
RELATIVE_HALF_WIDTH = 0.01
MAX_WARMUP_CALLS = 60
#: Rounds go on warming up for so many calls a variant, where its own warm-up ran out of time before it settled.
LEAST_WARMUP_CALLS = 8
BLOCKS = 3


@dataclass
class Series:
    """The samples of one variant, and how they were taken."""

    values: list[float] = field(default_factory=list)
    warmup: int = 0
    warmup_s: float = 0.0
    settled: bool = False
    host_bound: int = 0
    skews: list[float] = field(default_factory=list)

    def add(self, tick: Tick) -> None:
        """Keeps a sample."""
        self.values.append(tick.seconds)
        self.host_bound += tick.host_bound
        if tick.skew is not None:
            self.skews.append(tick.skew)

    @property
    def tight(self) -> bool:
        """Whether the interval of the median is within the aim."""
        return len(self.values) > 1 and median(self.values).relative_half_width <= RELATIVE_HALF_WIDTH


@dataclass
class Lane:
    """One variant's way through the sampling: ``sample`` gives one tick; ``enter`` and ``leave`` frame a block."""

    name: str
    sample: Callable[[], Tick]
    exclusive: bool = False
    enter: Callable[[], None] = lambda: None
    leave: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Plan:
    """How long and how often: seconds for the whole pair, least samples a variant, and a fixed count when asked.

    settle: let the first rounds warm up too when a variant's own warm-up was too short to settle.
    """

    budget: float
    least: int
    exactly: int | None = None
    seed: int = 0
    decide: Callable[[bool], bool] = lambda more: more
    shuffle: Callable[[list[str]], list[str]] | None = None
    now: Callable[[], float] = time.perf_counter
    settle: bool = True


def sample_all(lanes: Sequence[Lane], plan: Plan) -> dict[str, Series]:
    """Samples every lane. Lanes that can live together go in rounds; exclusive ones alternate in blocks.

    ``plan.decide`` turns rank 0's wish to go on into the decision of all ranks, and ``plan.shuffle`` does the same
    for the order of a round, so that no rank waits for ever.
    """
    series = {lane.name: Series() for lane in lanes}
    together = [lane for lane in lanes if not lane.exclusive]
    alone = [lane for lane in lanes if lane.exclusive]
    groups: list[list[Lane]] = ([together] if together else []) + [[lane] for lane in alone]
    if not groups:
        return series
    order = random.Random(plan.seed)
    blocks = 1 if len(groups) == 1 else BLOCKS
    share = plan.budget / (len(groups) * blocks)
    wanted = plan.exactly or plan.least
    for block in range(blocks):
        # Where blocks cannot share the count evenly the first ones take one more, so that "exactly" is exact.
        rounds = wanted // blocks + (block < wanted % blocks)
        if plan.exactly is not None and not rounds:
            continue
        for group in groups:
            _block(group, series, plan, share, rounds, order)
    return series


def _block(
    group: Sequence[Lane], series: dict[str, Series], plan: Plan, seconds: float, least: int, order: random.Random
) -> None:
    entered: list[Lane] = []
    try:
        for lane in group:
            entered.append(lane)
            lane.enter()
        start = plan.now()
        before = {lane.name: series[lane.name].warmup for lane in group}
        for lane in group:
            _warm_up(lane, series[lane.name], plan, seconds / (4 * len(group)))
        if plan.settle and plan.exactly is None:
            _settle(group, series, before, plan, start + seconds / 2)
        _rounds(group, series, plan, start + seconds, least, order)
    finally:
        for lane in entered:
            lane.leave()


def _warm_up(lane: Lane, series: Series, plan: Plan, seconds: float) -> None:
    start = plan.now()
    ticks: list[float] = []
    more = True
    while more:
        ticks.append(lane.sample().seconds)
        series.settled = settled(ticks)
        wish = not series.settled and len(ticks) < MAX_WARMUP_CALLS and plan.now() - start < seconds
        more = plan.decide(wish)
    series.warmup += len(ticks)
    series.warmup_s += plan.now() - start


def _settle(
    group: Sequence[Lane], series: dict[str, Series], before: dict[str, int], plan: Plan, deadline: float
) -> None:
    """Rounds that are not counted: long steps get few calls by themselves, and only side by side do allocators and
    caches come to what they will be. Ends when all had enough calls or half of the time is gone.

    before: calls that warmed up earlier blocks.
    """

    def wish() -> bool:
        calls = {lane.name: series[lane.name].warmup - before[lane.name] for lane in group}
        short = any(not series[name].settled and n < LEAST_WARMUP_CALLS for name, n in calls.items())
        return short and plan.now() < deadline

    while plan.decide(wish()):
        for lane in group:
            begun = plan.now()
            lane.sample()
            series[lane.name].warmup += 1
            series[lane.name].warmup_s += plan.now() - begun


def _rounds(
    group: Sequence[Lane],
    series: dict[str, Series],
    plan: Plan,
    deadline: float,
    least: int,
    order: random.Random,
) -> None:
    by_name = {lane.name: lane for lane in group}
    rounds = 0
    more = True
    while more:
        names = list(by_name)
        order.shuffle(names)
        if plan.shuffle is not None:
            names = plan.shuffle(names)
        for name in names:
            series[name].add(by_name[name].sample())
        rounds += 1
        if plan.exactly is not None:
            wish = rounds < least
        elif rounds < least:
            wish = True
        else:
            tight = all(series[name].tight for name in by_name)
            wish = not tight and plan.now() < deadline and rounds < MAX_SAMPLES
        more = plan.decide(wish)
