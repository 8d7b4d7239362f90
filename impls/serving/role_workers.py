"""A prefill and a decode worker: an engine of each role, its links, and what it does in one turn.

A worker never waits inside a turn: whoever drives it does when ``moved`` says that nothing happened. Requests are sent
to the prefill side and cancelled there; a request is answered first here, then there, and ends once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from impls.serving.engine import Output
from impls.serving.kv_link import Arrived, Closed, Offered, Receiver, Sender, Withdrawn
from impls.serving.request import Request, Sequence, sent_at
from impls.serving.role_engines import DecodeEngine, PrefillEngine


class PrefillWorker:
    """Sends requests into a prefill engine by the clock and hands over what it has computed."""

    def __init__(self, engine: PrefillEngine, senders: Items[Sender]) -> None:
        self.engine, self.senders = engine, senders
        engine.nearly = self._offer
        self.begin({})

    def begin(self, requests: dict[int, Request], routes: Mapping[int, int] | None = None) -> None:
        """A new run of these requests, by their numbers in the trace; ``routes`` says whose answer goes to which of the
        senders, by the same numbers, and the first one has those that it does not name.

        Raises:
            ValueError: two of them share an id.
        """
        self.engine.reset()
        self.routes = dict(routes or {})
        self.numbers = {request.id: number for number, request in requests.items()}
        if len(self.numbers) < len(requests):
            raise ValueError("two requests share an id; give each request its own")
        self.coming = deque(sorted(requests.values(), key=sent_at))
        self.offered: dict[int, Sequence] = {}
        self.handed_over: set[int] = set()
        self.moved = False
        self._finished = False

    @property
    def done(self) -> bool:
        """Whether every request ended here or was read by the decode side, which was told so."""
        return self._finished

    @property
    def next_arrival(self) -> float | None:
        """When the next request is sent (s); None when all were."""
        return sent_at(self.coming[0]) if self.coming else None

    def turn(self) -> list[Output]:
        """Takes in what is due, lets go of what was read, and runs a step if there is one to run."""
        engine = self.engine
        steps = engine.counters["steps"]
        self.moved = False
        while self.coming and sent_at(self.coming[0]) <= engine.now:
            engine.submit(self.coming.popleft())
            self.moved = True
        for sender in self.senders:
            for number in sender.poll():
                engine.drop(self.offered.pop(number))
                self.moved = True
        outputs = engine.step() if engine.busy else []
        for sequence in engine.take_ready():
            number = self.numbers[sequence.id]
            self._sender(number).ready(number, sequence.tokens[-1])
        for output in outputs:
            if output.finished is not None:
                self._take_back(self.numbers[output.id])
        if not self.coming and engine.idle and not self._finished:
            for sender in self.senders:
                sender.finish()
            self._finished = self.moved = True
        self.moved |= bool(outputs) or engine.counters["steps"] > steps
        return outputs

    def cancel(self, request_id: str) -> bool:
        """Drops a request wherever it is; False when it was not sent yet, or ended on this side.

        Where its blocks have left already the decode side ends it, and tells so, unless it is over there by then.
        """
        number = self.numbers.get(request_id)
        if number is None or any(request.id == request_id for request in self.coming):
            return False
        if number not in self.handed_over:
            return self.engine.cancel(request_id)
        if self._sender(number).withdraw(number):
            del self.offered[number]
            self.engine.cancel(request_id)
        return True

    def _offer(self, sequence: Sequence) -> None:
        number = self.numbers[sequence.id]
        self.offered[number] = sequence
        self.handed_over.add(number)
        blocks = self.engine.scheduler.blocks.blocks_for(sequence.prompt_len)
        self._sender(number).offer(number, sequence.blocks[:blocks])

    def _take_back(self, number: int) -> None:
        """A request is over; if it was on offer, its first token turned out to be its last."""
        if number in self.offered:
            del self.offered[number]
            self.handed_over.remove(number)
            self._sender(number).withdraw(number)

    def _sender(self, number: int) -> Sender:
        return self.senders[self.routes.get(number, 0)]


@dataclass(slots=True)
class Waits:
    """Seconds of each request from its first token to its admission on the decode side: in all, and what of it the
    blocks took once both sides were ready."""

    whole: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)


class DecodeWorker:
    """Takes what prefill workers offer, in the order of the offers, as far as there is room, and decodes it."""

    def __init__(self, engine: DecodeEngine, receivers: Items[Receiver]) -> None:
        self.engine, self.receivers = engine, receivers
        self.begin({})

    def begin(self, requests: dict[int, Request]) -> None:
        """A new run; the requests are those that may be offered, by their numbers in the trace."""
        self.engine.reset()
        self.requests = requests
        self.offers: deque[tuple[Receiver, Offered]] = deque()
        self.arriving: dict[int, Sequence] = {}
        self.waits = Waits()
        self.moved = False
        self._open = len(self.receivers)
        self._finished = False

    @property
    def done(self) -> bool:
        """Whether the prefill side has closed and every request that it handed over ended."""
        return self._finished

    def turn(self) -> list[Output]:
        """Hears what came, grants room to whom it can, and runs a step if there is one to run."""
        engine = self.engine
        steps = engine.counters["steps"]
        self.moved = False
        for receiver in self.receivers:
            for event in receiver.poll():
                self.moved = True
                if isinstance(event, Offered):
                    self.offers.append((receiver, event))
                elif isinstance(event, Arrived):
                    self._admit(event)
                elif isinstance(event, Withdrawn):
                    self._drop(event.number)
                else:
                    assert isinstance(event, Closed)
                    self._open -= 1
        while self.offers and self._grant(*self.offers[0]):
            self.offers.popleft()
            self.moved = True
        outputs = engine.step() if engine.busy else []
        if not (self._open or self.offers or self._finished) and engine.idle:
            for receiver in self.receivers:
                receiver.finish()
            self._finished = self.moved = True
        self.moved |= bool(outputs) or engine.counters["steps"] > steps
        return outputs

    def _grant(self, receiver: Receiver, offer: Offered) -> bool:
        sequence = self.engine.reserve(self.requests[offer.number])
        if sequence is None:
            return False
        self.arriving[offer.number] = sequence
        receiver.grant(offer.number, self.engine.targets(sequence))
        return True

    def _admit(self, event: Arrived) -> None:
        self.engine.admit(self.arriving.pop(event.number), event.token)
        self.waits.whole.append(self.engine.clock() - event.ready)
        self.waits.transfer.append(event.seconds)

    def _drop(self, number: int) -> None:
        """Nobody wants it: without a word where the prefill side ended it, else as a cancelled request of our own."""
        for entry in self.offers:
            if entry[1].number == number:
                self.offers.remove(entry)
                return
        if number in self.arriving:
            self.engine.drop(self.arriving.pop(number))
        else:
            self.engine.cancel(self.requests[number].id)


def drive(prefill: Items[PrefillWorker], decode: Items[DecodeWorker]) -> list[Output]:
    """One round of turns in one process; what came out of it."""
    workers: list[PrefillWorker | DecodeWorker] = [*prefill, *decode]
    return [output for worker in workers for output in worker.turn()]
