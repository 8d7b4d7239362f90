"""Schedules of a pipeline as plain data: what every rank computes, sends and receives in a step, and in which order.

A model is cut into stages, stage s on rank s mod p: one stage a rank, or v of them when the schedule is interleaved. A
batch is cut into m micro-batches. Schedules differ in nothing but the order of each rank's computations:

    gpipe         all forwards, then all backwards (Huang et al. 2019, "GPipe", section 2.2); one micro-batch makes it
                  the naive way, in which all ranks but one wait
    one_f_one_b   p - 1 - r forwards to warm up, then one forward and one backward in turn, then the backwards that are
                  left (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
                  Megatron-LM", section 2.2.1; 2019, "PipeDream", section 3.2)
    interleaved   the same with v stages a rank, p micro-batches of one stage at a time (Narayanan et al. 2021,
                  section 2.2.2)

Share of a step that ranks wait, for equal stages and messages that take no time: (p-1) / (v m + p-1), whatever the
order of forwards and backwards. Micro-batches whose activations a rank keeps at once: m under gpipe, min(p - r, m)
under 1F1B, and of interleaved stages (each 1/v of a rank's layers) at most 2 (p - r - 1) + (v - 1) p + 1.

Messages follow from the order. The ranks are imagined in step, a forward of 1 and a backward of 2: what a computation
has made is sent as soon as it ends, and received at the end of whatever the receiver computes then. What a rank sends
and receives at one such moment is one exchange, started together. The next exchange waits for the one before, a
computation for what it needs. So sends may be rendezvous (NCCL's are, one after another on a stream): :func:`faults`
plays a schedule in which every exchange waits to be met on all of its other sides, which is stricter.
"""

# p ranks, r one of them, v stages a rank, m micro-batches.

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind = Literal["forward", "backward"]


@dataclass(frozen=True)
class Compute:
    """Forward or backward of one stage on one micro-batch."""

    kind: Kind
    stage: int
    micro: int


@dataclass(frozen=True)
class Message:
    """What a computation made, on its way: an activation to the next stage, a gradient to the one before."""

    source: Compute
    sender: int
    receiver: int


@dataclass(frozen=True)
class Exchange:
    """Messages that one rank sends and receives together, those between two ranks in the same order on both."""

    messages: tuple[Message, ...]


Action: TypeAlias = Compute | Exchange
Order = Sequence[Compute]


@dataclass(frozen=True)
class Schedule:
    """``actions[r]`` is what rank r does."""

    ranks: int
    stages: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    def orders(self) -> list[list[Compute]]:
        """The computations of every rank."""
        return [[action for action in mine if isinstance(action, Compute)] for mine in self.actions]

    def exchanges(self, rank: int) -> list[Exchange]:
        """The exchanges of one rank."""
        return [action for action in self.actions[rank] if isinstance(action, Exchange)]


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards, both in the order of the micro-batches."""
    micros = range(micro_batches)
    kinds: tuple[Kind, Kind] = ("forward", "backward")
    return _scheduled([[Compute(kind, rank, k) for kind in kinds for k in micros] for rank in range(ranks)], 1)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """One forward, one backward."""
    return interleaved(ranks, micro_batches, 1)


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B with ``chunks`` stages a rank.

    Raises:
        ValueError: several stages a rank, and micro-batches that do not come in groups of as many as there are ranks.
    """
    if chunks > 1 and micro_batches % ranks:
        raise ValueError(f"{micro_batches} micro-batches do not divide over {ranks} ranks, as interleaved stages need")
    group = ranks if chunks > 1 else 1
    total = micro_batches * chunks

    def turn(kind: Kind, rank: int, number: int) -> Compute:
        """The computation of that number: a group of micro-batches on one stage, then on the next."""
        round_, place = divmod(number, group * chunks)
        chunk = place // group if kind == "forward" else chunks - 1 - place // group
        return Compute(kind, chunk * ranks + rank, round_ * group + place % group)

    orders = []
    for rank in range(ranks):
        ahead = ranks - 1 - rank if chunks == 1 else 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
        ahead = min(ahead, total)
        order = [turn("forward", rank, number) for number in range(ahead)]
        for number in range(total - ahead):
            order += [turn("forward", rank, ahead + number), turn("backward", rank, number)]
        orders.append(order + [turn("backward", rank, number) for number in range(total - ahead, total)])
    return _scheduled(orders, chunks)


def bubble_formula(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Share of a step that ranks wait, of equal stages and messages that take no time."""
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)


def needs(one: Compute, stages: int) -> list[Compute]:
    """What must be done before it."""
    if one.kind == "forward":
        return [Compute("forward", one.stage - 1, one.micro)] if one.stage else []
    own = [Compute("forward", one.stage, one.micro)]
    return own + ([Compute("backward", one.stage + 1, one.micro)] if one.stage < stages - 1 else [])


def times(
    orders: Sequence[Order], stages: int, duration: Callable[[Compute], float]
) -> dict[Compute, tuple[float, float]]:
    """Start and end of every computation that takes so long, where messages take no time.

    Raises:
        ValueError: an order that waits for itself.
    """
    spans: dict[Compute, tuple[float, float]] = {}
    free, done = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while done[rank] < len(order) and all(one in spans for one in needs(order[done[rank]], stages)):
                now = order[done[rank]]
                start = max([free[rank], *(spans[one][1] for one in needs(now, stages))])
                free[rank] = start + duration(now)
                spans[now] = (start, free[rank])
                done[rank] += 1
                moved = True
    waiting = [str(order[at]) for order, at in zip(orders, done, strict=True) if at < len(order)]
    if waiting:
        raise ValueError(f"these computations wait for one another: {', '.join(waiting)}")
    return spans


def makespan(schedule: Schedule, duration: Callable[[Compute], float]) -> float:
    """The time of a step whose computations take so long, where messages take no time."""
    return max(end for _, end in times(schedule.orders(), schedule.stages, duration).values())


def in_step(one: Compute) -> float:
    """A backward has two products for each of a forward's."""
    return 1 if one.kind == "forward" else 2


def live_peaks(schedule: Schedule) -> list[int]:
    """For every rank the most stages' micro-batches that have gone forward and not yet backward."""
    peaks = []
    for order in schedule.orders():
        live = peak = 0
        for one in order:
            live += 1 if one.kind == "forward" else -1
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def busiest_messages(schedule: Schedule) -> int:
    """Messages that the busiest rank sends in a step."""
    return max(
        sum(message.sender == rank for exchange in schedule.exchanges(rank) for message in exchange.messages)
        for rank in range(schedule.ranks)
    )


def _message(source: Compute, ranks: int, stages: int) -> Message | None:
    """Where it goes, if another stage wants it."""
    to = source.stage + (1 if source.kind == "forward" else -1)
    return Message(source, source.stage % ranks, to % ranks) if 0 <= to < stages else None


def _scheduled(orders: Sequence[Order], chunks: int) -> Schedule:
    """Orders of computations with the exchanges between them.

    Raises:
        ValueError: fewer than two ranks, or no micro-batch.
    """
    ranks, stages = len(orders), len(orders) * chunks
    if ranks < 2:
        raise ValueError(f"a pipeline needs at least 2 ranks, got {ranks}")
    if not orders[0]:
        raise ValueError("a pipeline needs at least 1 micro-batch and 1 stage a rank")
    spans = times(orders, stages, in_step)
    moments: list[dict[float, list[Message]]] = [defaultdict(list) for _ in orders]
    for source, (_, end) in sorted(spans.items(), key=lambda item: (item[1][1], item[0].stage, item[0].kind)):
        message = _message(source, ranks, stages)
        if message is not None:
            moments[message.sender][end].append(message)
            busy_until = (e for s, e in (spans[one] for one in orders[message.receiver]) if s < end < e)
            moments[message.receiver][next(busy_until, end)].append(message)
    actions = []
    for order, met in zip(orders, moments, strict=True):
        mine: list[Action] = []
        left = sorted(met)
        for one in order:
            while left and left[0] <= spans[one][0]:
                mine.append(Exchange(tuple(met[left.pop(0)])))
            mine.append(one)
        actions.append((*mine, *(Exchange(tuple(met[moment])) for moment in left)))
    micros = len({one.micro for one in orders[0]})
    return Schedule(ranks, stages, micros, tuple(actions))


def faults(schedule: Schedule) -> list[str]:
    """Everything that is wrong with a schedule, in words; empty when it can be run.

    Every stage computes every micro-batch once each way, on its own rank, backward after forward; every send is
    received and in the same order; and nobody waits for ever, though every exchange waits until all of its messages
    are met.
    """
    return [*_missing(schedule), *_out_of_order(schedule), *_deadlock(schedule)]


def _missing(schedule: Schedule) -> list[str]:
    found = []
    for rank, order in enumerate(schedule.orders()):
        kinds: tuple[Kind, Kind] = ("forward", "backward")
        stages = range(rank, schedule.stages, schedule.ranks)
        wanted = {Compute(kind, s, k) for kind in kinds for s in stages for k in range(schedule.micro_batches)}
        counted = Counter(order)
        found += [f"rank {rank} lacks {one}" for one in wanted if not counted[one]]
        found += [f"rank {rank} has {one} {n} times" for one, n in counted.items() if n > 1 or one not in wanted]
        seen: set[Compute] = set()
        for one in order:
            if one.kind == "backward" and Compute("forward", one.stage, one.micro) not in seen:
                found.append(f"rank {rank} goes backward before forward: {one}")
            seen.add(one)
    return found


def _out_of_order(schedule: Schedule) -> list[str]:
    def between(rank: int, sender: int, receiver: int) -> list[Message]:
        every = (message for exchange in schedule.exchanges(rank) for message in exchange.messages)
        return [message for message in every if (message.sender, message.receiver) == (sender, receiver)]

    ends = [(a, b) for a in range(schedule.ranks) for b in range(schedule.ranks) if a != b]
    return [
        f"rank {a} sends to rank {b} other messages than that receives, or in another order"
        for a, b in ends
        if between(a, a, b) != between(b, a, b)
    ]


def _deadlock(schedule: Schedule) -> list[str]:
    """Play it: a rank stands at an action until that can end."""
    at = [0] * schedule.ranks
    done: list[set[Compute]] = [set() for _ in at]  # what a rank has computed or received
    left: dict[tuple[int, int], set[Message]] = {}  # what an exchange that stands still waits for

    def here(rank: int) -> Action | None:
        return schedule.actions[rank][at[rank]] if at[rank] < len(schedule.actions[rank]) else None

    def can_end(rank: int, action: Action) -> bool:
        if isinstance(action, Compute):
            return all(one in done[rank] for one in needs(action, schedule.stages))
        waiting = left.setdefault((rank, at[rank]), set(action.messages))
        for message in list(waiting):
            other = message.receiver if message.sender == rank else message.sender
            theirs = here(other)
            if message.source not in done[message.sender]:
                continue  # it is not made yet
            if isinstance(theirs, Exchange) and message in theirs.messages:
                waiting.discard(message)
                left.setdefault((other, at[other]), set(theirs.messages)).discard(message)
        return not waiting

    moved = True
    while moved:
        moved = False
        for rank in range(schedule.ranks):
            action = here(rank)
            if action is not None and can_end(rank, action):
                sources = [action] if isinstance(action, Compute) else [message.source for message in action.messages]
                done[rank].update(sources)
                at[rank] += 1
                moved = True
    return [f"rank {rank} waits for ever at {here(rank)}" for rank in range(schedule.ranks) if here(rank) is not None]
