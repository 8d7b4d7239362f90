"""The engine in two roles: one runs prompts and keeps their blocks until they were read, one takes blocks and decodes.

Both are the engine itself, its steps, its scheduler, its preemption; what a role adds is who holds blocks without
running. On the prefill side a sequence leaves the running ones with its first token and its blocks stay until the
decode side has read them: that cache is the queue before the decode side (Zhong et al., OSDI 2024, "DistServe",
section 4.3), and a full one stops new prompts. On the decode side blocks are reserved first and written then, so what
arrives always has its place; nothing is reserved while a preempted sequence waits for room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from impls.serving.engine import Engine, Flight, Output, Runner
from impls.serving.request import PENDING, Limits, Request, Sequence, State
from impls.serving.scheduler import Chunk, EngineConfig, Scheduler, Step


class RoleScheduler(Scheduler):
    """A scheduler of sequences some of which hold blocks and do not run: ``held``, by id.

    A sequence that runs alone and finds no block waits for those that are held: to preempt it would help nobody. So a
    step may be empty where blocks are held, and then carries out its moves all the same.
    carry_out: launches a step that only moves blocks.
    """

    def __init__(self, config: EngineConfig, carry_out: Callable[[Step], object]) -> None:
        super().__init__(config)
        self.held: dict[str, Sequence] = {}
        self._carry_out = carry_out

    @property
    def idle(self) -> bool:
        """Whether there may be nothing to run: blocks that are held come back by themselves."""
        return super().idle or bool(self.held)

    def schedule(self) -> Step:
        """The next step; empty when the engine is idle."""
        step = super().schedule()
        if step.swap_out and not step.chunks:
            self._carry_out(step)
        return step

    def _preempt(self, victim: Sequence, step: Step) -> None:
        if not (self.held and self.running == [victim]):
            super()._preempt(victim, step)

    @property
    def anything(self) -> bool:
        """Whether a step may have something to run."""
        return bool(self.running or self.waiting or self.swapped)

    def hold(self, sequence: Sequence) -> None:
        """Its blocks stay its own while it neither runs nor waits."""
        sequence.state = State.DONE
        self.held[sequence.id] = sequence

    def start(self, sequence: Sequence) -> None:
        """A sequence that is held runs from the next step on."""
        del self.held[sequence.id]
        self._run(sequence)

    def finish(self, sequence: Sequence, *, broken: bool = False) -> None:
        """Takes a sequence out, held or not, and frees what it holds."""
        self.held.pop(sequence.id, None)
        super().finish(sequence, broken=broken)


class PrefillScheduler(RoleScheduler):
    """Holds a sequence from the step on that draws its first token, unless that token completes it."""

    def advance(self, chunk: Chunk, token: int | None) -> str | None:
        """Books a chunk that has run."""
        finished = super().advance(chunk, token)
        if token is not None and finished is None:
            self.running.remove(chunk.sequence)
            self.hold(chunk.sequence)
        return finished


@dataclass(frozen=True)
class SplitLimits(Limits):
    """``cache_tokens`` bounds prompt and answer on the decode side, ``prompt_tokens`` a prompt on the prefill side."""

    prompt_tokens: int = 0

    def _length_problem(self, request: Request) -> str | None:
        problem = super()._length_problem(request)
        if problem is None and len(request.prompt) > self.prompt_tokens:
            return f"{len(request.prompt)} prompt tokens exceed the prefill side's cache of {self.prompt_tokens} tokens"
        return problem


class RoleEngine(Engine):
    """What both roles share."""

    roles: RoleScheduler
    scheduler_class: type[RoleScheduler] = RoleScheduler

    def reset(self) -> None:
        """An engine as new."""
        super().reset()
        self.scheduler = self.roles = self.scheduler_class(self.config, self.runner.launch)

    @property
    def busy(self) -> bool:
        """Whether a step would run something, or has something to tell."""
        return self.roles.anything or bool(self._outbox) or self._flight is not None

    def drop(self, sequence: Sequence) -> None:
        """Ends a sequence here without a word: its blocks are free, and what becomes of it is told elsewhere."""
        self.scheduler.finish(sequence)
        del self._sequences[sequence.id]
        self._rests(self.now)


class PrefillEngine(RoleEngine):
    """Runs prompts. Who does not end with the first token keeps its blocks until :meth:`drop`.

    decode_cache_tokens: what the decode side's cache holds; requests that it could not finish are refused here.
    nearly: called before the step that draws a sequence's first token, where that is not the last one by its length.
    ready: those who got a first token and go on, since the last :meth:`take_ready`.
    """

    scheduler_class = PrefillScheduler

    def __init__(self, runner: Runner, config: EngineConfig, *, decode_cache_tokens: int, **more: Any) -> None:
        self.decode_cache_tokens = decode_cache_tokens
        self.nearly: Callable[[Sequence], object] = id
        super().__init__(runner, config, **more)

    def reset(self) -> None:
        """An engine as new."""
        super().reset()
        self.ready: list[Sequence] = []
        self.limits = SplitLimits(
            vocab=self.limits.vocab,
            context=self.limits.context,
            cache_tokens=self.decode_cache_tokens,
            prompt_tokens=self.limits.cache_tokens,
        )

    def take_ready(self) -> list[Sequence]:
        """Those who became ready since the last call."""
        ready, self.ready = self.ready, []
        return ready

    def _launch(self, step: Step) -> Flight:
        for chunk in step.chunks:
            if chunk.samples and chunk.sequence.limit > chunk.sequence.prompt_len + 1:
                self.nearly(chunk.sequence)
        flight = super()._launch(step)
        for chunk in step.chunks:
            if chunk.sequence.id in self.roles.held:
                self.runner.forget(chunk.sequence)
        return flight

    def _take(self, sequence: Sequence, place: int, token: int, now: float) -> Output:
        output = super()._take(sequence, place, token, now)
        if output.finished is None:
            self.ready.append(sequence)
        return output


class DecodeEngine(RoleEngine):
    """Decodes sequences whose prompts were run elsewhere. Runs a prompt itself only after a preemption."""

    def reserve(self, request: Request) -> Sequence | None:
        """A sequence with blocks for its prompt and its first token, held until :meth:`admit`.

        None while slots or blocks are lacking, or somebody who was preempted waits for them.
        """
        scheduler = self.roles
        under_way = len(scheduler.running) + len(scheduler.held)
        if scheduler.waiting or scheduler.swapped or under_way >= self.config.max_running:
            return None
        sequence = Sequence(request)
        sequence.tokens.append(PENDING)
        if not scheduler.blocks.can_admit(sequence, spare=1 if under_way else 0):
            return None
        scheduler.blocks.extend(sequence, len(sequence.tokens))
        scheduler.hold(sequence)
        self._sequences[sequence.id] = sequence
        if self.recorder is not None:
            self.recorder.arrived(request)
        return sequence

    def targets(self, sequence: Sequence) -> list[int]:
        """The blocks that its prompt's keys and values belong in."""
        return sequence.blocks[: self.scheduler.blocks.blocks_for(sequence.prompt_len)]

    def admit(self, sequence: Sequence, token: int) -> None:
        """Its first token and its prompt's keys and values are here: it decodes from the next step on."""
        sequence.tokens[-1] = token
        sequence.computed = sequence.prompt_len
        self.roles.start(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Ends a sequence here without a word."""
        super().drop(sequence)
        if self.recorder is not None:
            del self.recorder.requests[sequence.id]
