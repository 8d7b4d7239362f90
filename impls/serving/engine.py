"""The engine: takes requests in, steps the model, hands tokens out.

    engine = Engine(ModelRunner(model, config), config)
    engine.submit(Request("a", prompt, Sampling(max_tokens=32)))
    while not engine.idle:
        for output in engine.step():
            print(output.id, output.token, output.finished)

One thread drives it. A request that makes no sense is refused with a reason, one whose numbers go wrong fails, one
that nobody wants any more is cancelled: each ends alone, and the others go on.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from impls.serving.recorder import Recorder
from impls.serving.request import PENDING, Limits, Request, Sequence, sent_at
from impls.serving.scheduler import EngineConfig, Scheduler, Step

#: A runner's token for a sequence whose logits were not numbers.
NOT_A_TOKEN = -1


class Runner(Protocol):
    """What carries out a step: the model with its cache, or a fake one in a test of the engine."""

    @property
    def vocab(self) -> int:
        """Token ids are below this."""
        ...

    def launch(self, step: Step) -> Callable[[], list[int]]:
        """Moves blocks and starts the chunks; what it returns waits for one token a chunk that samples, in their order.

        A token that is PENDING in a sequence is the one that the last launch drew for it.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Its blocks are no longer its own."""
        ...


@dataclass(frozen=True, slots=True)
class Output:
    """A token of a request, or its end, or both.

    finished: None while it goes on; ``stop`` or ``length`` when complete; else ``refused``, ``failed`` or
    ``cancelled``, with the reason.
    """

    id: str
    token: int | None = None
    finished: str | None = None
    reason: str = ""


@dataclass(slots=True)
class Flight:
    """A step that was launched: the sequences that draw a token in it, each with the place that the token will have.

    use, running: share of the cache that is held in it, and sequences that run, those among them that it completes.
    """

    step: Step
    collect: Callable[[], list[int]]
    began: float
    use: float
    running: int
    draws: list[tuple[Sequence, int]] = field(default_factory=list)


class Engine:
    """Requests in, tokens out; see the module's docstring.

    waited: seconds that the host spent waiting for the device's tokens; what it did beside that is hidden by lookahead
    as long as it still has to wait.
    counters: steps, prefill_tokens, decode_tokens, preempted, swapped_blocks, recomputed_tokens (those that run again
    after a preemption), and what was refused; prompt_tokens of what was admitted, and cached_tokens of them that were
    in the cache.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        recorder: Recorder | None = None,
    ) -> None:
        self.runner = runner
        self.config = config
        self.clock, self.sleep = clock, sleep
        self.recorder = recorder
        self.reset()

    def reset(self) -> None:
        """An engine as new: nothing queued, nothing cached, counters at zero, the run's clock at 0."""
        flight: Flight | None = getattr(self, "_flight", None)
        if flight is not None:
            flight.collect()  # it may still read what the next launches write
        for sequence in getattr(self, "_sequences", {}).values():
            self.runner.forget(sequence)
        self.scheduler = Scheduler(self.config)
        self.limits = Limits(
            vocab=self.runner.vocab,
            context=self.config.context,
            cache_tokens=self.config.num_blocks * self.config.block_size,
        )
        self._sequences: dict[str, Sequence] = {}
        self._outbox: list[Output] = []
        self._flight: Flight | None = None
        self._landed = 0.0
        self.waited = 0.0
        self.counters: Counter[str] = Counter()
        if self.recorder is not None:
            self.recorder.begin()
        self._start = self.clock()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to run or to report."""
        return not self._sequences and not self._outbox and self._flight is None

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self.clock() - self._start

    def submit(self, request: Request) -> str | None:
        """Takes a request in; the reason when it is refused (which the next step reports too), else None.

        Raises:
            ValueError: a request of that id is under way: its answers could not be told apart.
        """
        if request.id in self._sequences:
            raise ValueError(f"request {request.id!r} is under way already; give each request its own id")
        if self.recorder is not None:
            self.recorder.arrived(request)
        reason = self.limits.refusal(request)
        if reason is not None:
            self.counters["refused"] += 1
            self._outbox.append(Output(request.id, finished="refused", reason=reason))
            if self.recorder is not None:
                self.recorder.ended(request.id, max(self.now, sent_at(request)), "refused", reason)
            return reason
        sequence = Sequence(request)
        self._sequences[request.id] = sequence
        self.scheduler.add(sequence)
        return None

    def cancel(self, request_id: str) -> bool:
        """Drops a request and frees what it holds; False when it is not under way (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, "cancelled", "cancelled by the client")
        self._rests(self.now)
        self._outbox.append(Output(request_id, finished="cancelled", reason="cancelled by the client"))
        return True

    def step(self) -> list[Output]:
        """Runs the next step; the tokens that came out of it, and what ended since the last one."""
        outputs, self._outbox = self._outbox, []
        step = self.scheduler.schedule()
        for sequence in step.preempted:
            self.runner.forget(sequence)
        landing, self._flight = self._flight, self._launch(step) if step.chunks else None
        if not self.config.lookahead and self._flight is not None:
            landing, self._flight = self._flight, None
        if landing is not None:
            outputs.extend(self._land(landing))
        return outputs

    def _launch(self, step: Step) -> Flight:
        began, use, running = self.now, self.scheduler.blocks.use, len(self.scheduler.running)
        flight = Flight(step, self.runner.launch(step), began, use, running)
        self._count(step)
        for chunk in step.chunks:
            sequence = chunk.sequence
            finished = self.scheduler.advance(chunk, PENDING if chunk.samples else None)
            if chunk.samples:
                flight.draws.append((sequence, len(sequence.tokens) - 1))
            if finished is not None:
                # Complete by its length, whatever the token is. Its blocks may go to others at once: the device
                # runs launches in order, so that nobody writes to them before this one has read them.
                self.scheduler.finish(sequence)
                self.runner.forget(sequence)
        return flight

    def _land(self, flight: Flight) -> list[Output]:
        asked = self.now
        tokens = flight.collect()
        now = self.now
        self.waited += now - asked
        outputs = []
        for (sequence, place), token in zip(flight.draws, tokens, strict=True):
            # Who was cancelled or ended on a stop token meanwhile gets nothing more.
            if self._sequences.get(sequence.id) is sequence:
                outputs.append(self._take(sequence, place, token, now))
        if self.recorder is not None:
            decodes = sum(chunk.length == 1 for chunk in flight.step.chunks)
            ran_from = max(flight.began, self._landed)
            self.recorder.stepped(flight.step.tokens - decodes, decodes, now - ran_from)
            self.recorder.sample(ran_from, flight.use, flight.running)
            self.recorder.slots = (self.scheduler.blocks.slots_reserved, self.scheduler.blocks.slots_held)
        self._landed = now
        self._rests(now)
        return outputs

    def _rests(self, now: float) -> None:
        """Notes the state where nothing runs or is about to; what a step holds is noted when it has run."""
        if self.recorder is not None and self._flight is None and self.scheduler.idle and not self.scheduler.running:
            self.recorder.sample(now, self.scheduler.blocks.use, 0)

    def stream(self, request: Request) -> Iterator[int]:
        """The tokens of one request as they come; closing the iterator early cancels it.

        Raises:
            ValueError: the request is refused.
            RuntimeError: it failed, or was cancelled from elsewhere.
        """
        reason = self.submit(request)
        if reason is not None:
            self._outbox = [output for output in self._outbox if output.id != request.id]
            raise ValueError(f"request {request.id!r} is refused: {reason}")
        over = False
        try:
            while not over:
                outputs = self.step()
                # What belongs to others is theirs to read: the next step reports it again.
                self._outbox.extend(output for output in outputs if output.id != request.id)
                for output in outputs:
                    if output.id != request.id:
                        continue
                    over = output.finished is not None
                    if output.token is not None:
                        yield output.token
                    if output.finished in ("failed", "cancelled"):
                        raise RuntimeError(f"request {request.id!r} {output.finished}: {output.reason}")
        finally:
            if not over and self.cancel(request.id):
                self._outbox = [output for output in self._outbox if output.id != request.id]

    def serve(self, requests: Iterable[Request], on_output: Callable[[Output], None] | None = None) -> None:
        """Replays requests by the clock, from a fresh engine: each is sent at its arrival, however busy the engine is.

        Between arrivals an idle engine sleeps; it never waits for an answer before it sends the next (open loop).

        Raises:
            ValueError: two requests share an id; nothing was sent.
        """
        coming = deque(sorted(requests, key=sent_at))
        twice = [name for name, count in Counter(request.id for request in coming).items() if count > 1]
        if twice:
            raise ValueError(f"request {twice[0]!r} is there twice; give each request its own id")
        self.reset()
        while coming or not self.idle:
            now = self.now
            while coming and sent_at(coming[0]) <= now:
                self.submit(coming.popleft())
            if self.idle:
                self.sleep(max(0.0, sent_at(coming[0]) - now))
                continue
            for output in self.step():
                if on_output is not None:
                    on_output(output)

    def _take(self, sequence: Sequence, place: int, token: int, now: float) -> Output:
        if token == NOT_A_TOKEN:
            reason = "the model's logits are not finite"
            self._end(sequence, "failed", reason, now)
            return Output(sequence.id, finished="failed", reason=reason)
        sequence.tokens[place] = token
        finished = sequence.finish_reason(place + 1)
        if self.recorder is not None:
            self.recorder.token(sequence.id, now)
        if finished is not None:
            self._end(sequence, "finished", finished, now)
        return Output(sequence.id, token, finished)

    def _end(self, sequence: Sequence, status: str, reason: str, now: float | None = None) -> None:
        self.scheduler.finish(sequence, broken=status == "failed")
        self.runner.forget(sequence)
        del self._sequences[sequence.id]
        if self.recorder is not None:
            at = self.now if now is None else now
            self.recorder.ended(sequence.id, at, status, reason, sequence.preemptions, sequence.cached)

    def _count(self, step: Step) -> None:
        count = self.counters
        count["steps"] += 1
        for chunk in step.chunks:
            kind = (
                "decode_tokens" if chunk.length == 1 and chunk.start >= chunk.sequence.prompt_len else "prefill_tokens"
            )
            count[kind] += chunk.length
        for sequence, known in step.admitted:
            if not sequence.preemptions:
                sequence.cached = known
                count["prompt_tokens"] += sequence.prompt_len
                count["cached_tokens"] += known
        count["recomputed_tokens"] += sum(max(0, sequence.lost - known) for sequence, known in step.admitted)
        count["preempted"] += len(step.preempted)
        count["swapped_blocks"] += len(step.swap_out) + len(step.swap_in)
