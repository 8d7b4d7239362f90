"""The link between a prefill and a decode worker: what they tell each other, and how blocks travel.

    prefill side                          decode side
    offer(number, blocks)          →      Offered: the last part of a prompt is about to run, its blocks will wait
                                   ←      grant(number, blocks): there is room in these
    ready(number, token)
    (the blocks travel)            →      Arrived, with the prompt's first token
    poll: the blocks were read
    withdraw(number)               →      Withdrawn: nobody wants it any more

The decode side pulls: nothing is sent before it has room, so a decode side that is slow makes the prefill side wait and
never overflows (Zhong et al., OSDI 2024, "DistServe", section 4.3; vLLM's NIXL connector reads the blocks in the same
way). It is asked before the prompt's last step, so that its answer comes while that runs. Requests are told by their
number in the trace, which both sides were given, as a router in front of them would. Messages of one direction stay in
order, blocks among them: what is withdrawn after its blocks have left is told behind them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from impls.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Offered:
    """A prompt will be computed after its next step."""

    number: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """All blocks of a request are in the place that was granted.

    token: the prompt's first one. ready: when it was there, on the prefill side (s). seconds: how long the blocks took
    from then on, or from the grant if that came later.
    """

    number: int
    token: int
    ready: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Nobody wants this request any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The prefill side has nothing more to offer in this run."""


Event = Offered | Arrived | Withdrawn | Closed


class Sender(Protocol):
    """The prefill side's end of a link to one decode worker."""

    def offer(self, number: int, blocks: Items[int]) -> None:
        """The request's prompt will lie in these blocks."""

    def ready(self, number: int, token: int) -> None:
        """It does, and has its first token; the blocks stay as they are until ``poll`` names the request."""

    def withdraw(self, number: int) -> bool:
        """True when nothing has left yet, and the blocks are free at once; else ``poll`` names them as ever."""
        ...

    def poll(self) -> list[int]:
        """Requests whose blocks have been read since the last call."""
        ...

    def finish(self) -> None:
        """Nothing more is offered in this run."""


class Receiver(Protocol):
    """The decode side's end of a link to one prefill worker."""

    def poll(self) -> list[Event]:
        """What came since the last call, in order."""
        ...

    def grant(self, number: int, blocks: Items[int]) -> None:
        """The blocks that the request's keys and values shall be written to; they are nobody else's."""

    def finish(self) -> None:
        """Nothing more is granted in this run."""


def transfer_bytes(config: ModelConfig, prompt: int, block_size: int, itemsize: int) -> int:
    """Bytes of the blocks that a prompt of so many tokens fills: whole blocks travel."""
    return config.kv_values_per_token * -(-prompt // block_size) * block_size * itemsize


@dataclass(frozen=True)
class Pieces:
    """How the blocks of a request are cut for the way: whole layers, as many as fit ``most`` bytes, one at least.

    kv: the cache, (layers, 2, N, K, P, E).
    """

    kv: Tensor
    most: int

    def ranges(self, blocks: int) -> list[tuple[int, int]]:
        """First layer and the one behind the last, for every piece."""
        layers, one = self.kv.shape[0], self.layer_bytes(blocks)
        step = max(1, self.most // one)
        return [(at, min(at + step, layers)) for at in range(0, layers, step)]

    def layer_bytes(self, blocks: int) -> int:
        """Bytes of one layer of so many blocks."""
        return blocks * self.kv[0, :, 0].numel() * self.kv.element_size()

    def view(self, buffer: Tensor, layers: tuple[int, int], blocks: int) -> Tensor:
        """A piece's place at the beginning of a byte buffer, (layers, 2, blocks, K, P, E)."""
        shape = (layers[1] - layers[0], 2, blocks, *self.kv.shape[3:])
        size = (layers[1] - layers[0]) * self.layer_bytes(blocks)
        return buffer[:size].view(self.kv.dtype).view(shape)

    def gather(self, piece: Tensor, layers: tuple[int, int], blocks: Tensor) -> None:
        """Copies layers of these blocks out of the cache."""
        torch.index_select(self.kv[layers[0] : layers[1]], 2, blocks, out=piece)

    def scatter(self, piece: Tensor, layers: tuple[int, int], blocks: Tensor) -> None:
        """Copies them into the cache."""
        self.kv[layers[0] : layers[1]].index_copy_(2, blocks, piece)


@dataclass(slots=True)
class _Letter:
    """A message under way; it is seen when it was looked for ``looks`` times more."""

    looks: int
    event: Event

    def due(self) -> bool:
        """Whether it is seen at this look."""
        self.looks -= 1
        return self.looks < 0


class MemoryLink:
    """Both ends in one process and one thread; for tests, and to see the roles at work without ranks.

    move: copies blocks of the prefill side to blocks of the decode side; the bytes that this took.
    lag: how many looks a message takes before it is seen; asked once for each.
    clock: of both sides.
    """

    def __init__(
        self,
        move: Callable[[Items[int], Items[int]], int],
        lag: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._move, self._lag, self._clock = move, lag, clock
        self._forth: deque[_Letter] = deque()
        self._grants: deque[_Letter] = deque()
        self._offered: dict[int, list[int]] = {}
        self._ready: dict[int, Arrived] = {}
        self._granted: set[int] = set()
        self._leaving: dict[int, list[int]] = {}
        self._targets: dict[int, tuple[list[int], float]] = {}
        self._read: list[int] = []
        self.bytes = 0
        self.sender = _MemorySender(self)
        self.receiver = _MemoryReceiver(self)

    def tell(self, event: Event) -> None:
        """Sends an event to the decode side."""
        self._forth.append(_Letter(self._lag(), event))

    def offer(self, number: int, blocks: Items[int]) -> None:
        """See :class:`Sender`."""
        self._offered[number] = list(blocks)
        self.tell(Offered(number))

    def ready(self, number: int, token: int) -> None:
        """See :class:`Sender`."""
        self._ready[number] = Arrived(number, token, self._clock(), 0.0)
        self._leave(number)

    def withdraw(self, number: int) -> bool:
        """See :class:`Sender`."""
        self.tell(Withdrawn(number))
        self._ready.pop(number, None)
        self._granted.discard(number)
        return self._offered.pop(number, None) is not None

    def look_back(self) -> list[int]:
        """The prefill side looks: what is ready and was granted leaves, and whose blocks were read is told."""
        while self._grants and self._grants[0].due():
            event = self._grants.popleft().event
            assert isinstance(event, Offered)
            if event.number in self._offered:
                self._granted.add(event.number)
                self._leave(event.number)
        read, self._read = self._read, []
        return read

    def _leave(self, number: int) -> None:
        if number in self._granted and number in self._ready:
            self._granted.remove(number)
            self._leaving[number] = self._offered.pop(number)
            self.tell(self._ready.pop(number))

    def grant(self, number: int, blocks: Items[int]) -> None:
        """See :class:`Receiver`."""
        self._targets[number] = (list(blocks), self._clock())
        self._grants.append(_Letter(self._lag(), Offered(number)))

    def look_forth(self) -> list[Event]:
        """The decode side looks: blocks are read at the last moment, when they are seen to have arrived."""
        seen: list[Event] = []
        while self._forth and self._forth[0].due():
            event = self._forth.popleft().event
            if isinstance(event, Arrived):
                targets, granted = self._targets.pop(event.number)
                self.bytes += self._move(self._leaving.pop(event.number), targets)
                self._read.append(event.number)
                event = replace(event, seconds=self._clock() - max(granted, event.ready))
            elif isinstance(event, Withdrawn):
                self._targets.pop(event.number, None)
            seen.append(event)
        return seen


class _MemorySender:
    def __init__(self, link: MemoryLink) -> None:
        self._link = link
        self.offer, self.ready, self.withdraw, self.poll = link.offer, link.ready, link.withdraw, link.look_back

    def finish(self) -> None:
        self._link.tell(Closed())


class _MemoryReceiver:
    def __init__(self, link: MemoryLink) -> None:
        self.poll, self.grant = link.look_forth, link.grant

    def finish(self) -> None:
        """Nothing to end."""
