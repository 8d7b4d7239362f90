"""Which tokens the model runs next: iteration-level scheduling with chunked prefill.

Every step first takes one token of each sequence in decode, then spends what is left of the token budget on prompts
(Agrawal et al., OSDI 2024, "Sarathi-Serve", algorithm 3); sequences join and leave at every step (Yu et al., OSDI
2022, "Orca", section 3). When the cache runs out, the sequence that was admitted last gives its blocks up, so that the
oldest always goes on and the engine never deadlocks ("PagedAttention", section 4.5).

Each switch of :class:`EngineConfig` turns one of these ideas off and leaves the rest as it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from impls.serving.block_manager import BlockManager
from impls.serving.prefix_index import PrefixIndex
from impls.serving.request import Sequence, State


@dataclass(frozen=True)
class EngineConfig:
    """The engine's sizes and switches.

    max_running: sequences that run at once. max_step_tokens: token budget of a step. block_size, num_blocks,
    host_blocks: tokens a block, blocks on the device and on the host. context: longest prompt and answer together.

    paging: ``blocks`` as they are needed, or ``reserve`` a contiguous run of ``context`` tokens at admission.
    batching: ``continuous``, or ``static``: a batch starts and ends together (rows that finish are dropped from it).
    chunked_prefill: prompts are cut to the budget, or run whole, however long.
    preemption: ``recompute`` what was given up, or ``swap`` it to the host and back.
    lookahead: the next step is scheduled and launched before the tokens of the last have come back, which it takes from
    the device: the host's work hides behind the device's. An answer that ends on a stop token costs one row too many.
    prefix_caching: full blocks of a text that is in the cache are used again by whoever begins with it.
    batch_invariant: every pass has one shape and one order of summation, so that a request's numbers do not depend on
    its neighbours to the bit.

    Raises:
        ValueError: a size below 1, a budget below the number of sequences that decode at once, or prefix caching of
            reserved runs, which share nothing.
    """

    max_running: int = 8
    max_step_tokens: int = 512
    block_size: int = 16
    num_blocks: int = 1024
    host_blocks: int = 0
    context: int = 2048
    paging: Literal["blocks", "reserve"] = "blocks"
    batching: Literal["continuous", "static"] = "continuous"
    chunked_prefill: bool = True
    preemption: Literal["recompute", "swap"] = "recompute"
    batch_invariant: bool = False
    lookahead: bool = False
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        for name in ("max_running", "max_step_tokens", "block_size", "num_blocks", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.host_blocks < 0:
            raise ValueError(f"host_blocks must not be negative, got {self.host_blocks}")
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens {self.max_step_tokens} is below max_running {self.max_running}: "
                "each sequence in decode takes one token of the budget"
            )
        for name, known in (
            ("paging", ("blocks", "reserve")),
            ("batching", ("continuous", "static")),
            ("preemption", ("recompute", "swap")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.prefix_caching and self.paging != "blocks":
            raise ValueError("prefix_caching shares blocks: it needs paging='blocks'")


@dataclass(slots=True)
class Chunk:
    """Tokens ``start`` to ``start + length - 1`` of a sequence; ``samples`` when the next token follows from them."""

    sequence: Sequence
    start: int
    length: int
    samples: bool


@dataclass(slots=True)
class Step:
    """One pass through the model: block moves first (out, copies, in), then the chunks.

    admitted: sequences that start in it, each with how many of its tokens were in the cache.
    """

    chunks: list[Chunk] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def decode_only(self) -> bool:
        """Whether every sequence runs one token, so that its number of sequences is its whole shape."""
        return all(chunk.length == 1 for chunk in self.chunks)


class Scheduler:
    """Sequences that wait, run, or sit swapped out on the host, and the choice of the next step.

    ``running`` is in order of admission: the last is the first to be preempted.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        reserve = config.context if config.paging == "reserve" else 0
        index = PrefixIndex(config.block_size) if config.prefix_caching else None
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.host_blocks, reserve, index)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.swapped: deque[Sequence] = deque()
        self._batch_left = 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not (self.waiting or self.running or self.swapped)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind those that wait."""
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """The next step; its blocks are allocated. Empty only when the engine is idle."""
        step = Step()
        self.blocks.begin_step()
        budget = self.config.max_step_tokens
        for sequence in list(self.running):
            if sequence.pending == 1 and sequence.state is State.RUNNING:
                budget -= self._go_on(sequence, 1, step)
        # What preemption took out of the step is not given back to the budget: the next step has it.
        for sequence in list(self.running):
            if sequence.pending > 1 and sequence.state is State.RUNNING:
                take = self._chunk(sequence, budget)
                budget -= self._go_on(sequence, take, step) if take else 0
        # Only what preemption left in the step will run. Whoever is let in below may read it already in this very step:
        # every layer writes the keys and values of a pass before it attends to them.
        for chunk in step.chunks:
            self.blocks.publish(chunk.sequence, chunk.start + chunk.length)
        if not step.preempted:
            budget -= self._swap_in(step, budget)
            if not self.swapped:
                self._admit(step, budget)
        assert step.chunks or self.idle, "nothing can run and something waits"
        return step

    def advance(self, chunk: Chunk, token: int | None) -> str | None:
        """Books a chunk that has run, with the token that followed; the reason to finish, or None."""
        sequence = chunk.sequence
        sequence.computed = chunk.start + chunk.length
        if token is None:
            return None
        sequence.tokens.append(token)
        return sequence.finish_reason()

    def finish(self, sequence: Sequence, *, broken: bool = False) -> None:
        """Takes a sequence out, wherever it is, and frees what it holds, which nobody shall use when it is broken."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.SWAPPED:
            self.swapped.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        self.blocks.release(sequence, broken=broken)
        sequence.state = State.DONE

    def _chunk(self, sequence: Sequence, budget: int, known: int = 0) -> int:
        pending = sequence.pending - known
        return min(pending, max(budget, 0)) if self.config.chunked_prefill else pending

    def _go_on(self, sequence: Sequence, take: int, step: Step) -> int:
        """Runs the next ``take`` tokens, preempting the last admitted until there is room; the tokens that it took."""
        while not self.blocks.can_extend(sequence, sequence.computed + take):
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is sequence:
                return 0
        self._put(sequence, take, step)
        return take

    def _put(self, sequence: Sequence, take: int, step: Step) -> None:
        self.blocks.extend(sequence, sequence.computed + take)
        step.chunks.append(Chunk(sequence, sequence.computed, take, take == sequence.pending))

    def _preempt(self, victim: Sequence, step: Step) -> None:
        step.chunks = [chunk for chunk in step.chunks if chunk.sequence is not victim]
        self.running.remove(victim)
        victim.preemptions += 1
        step.preempted.append(victim)
        if self.config.preemption == "swap" and victim.computed and self.blocks.can_swap_out(victim):
            step.swap_out.extend(self.blocks.swap_out(victim))
            victim.state = State.SWAPPED
            self.swapped.appendleft(victim)
            return
        self.blocks.release(victim)
        victim.lost, victim.computed = victim.computed, 0
        victim.state = State.WAITING
        self.waiting.appendleft(victim)
        self._batch_left += 1

    def _swap_in(self, step: Step, budget: int) -> int:
        """Brings back what was swapped out, oldest preemption last, as room and budget allow."""
        spent = 0
        while self.swapped and len(self.running) < self.config.max_running:
            sequence = self.swapped[0]
            take = self._chunk(sequence, budget - spent)
            if take < 1 or not self.blocks.can_admit(sequence, spare=1 if self.running else 0):
                break
            self.swapped.popleft()
            self._run(sequence)
            step.swap_in.extend(self.blocks.swap_in(sequence))
            self._put(sequence, take, step)
            self.blocks.publish(sequence, sequence.computed + take)
            spent += take
        return spent

    def _admit(self, step: Step, budget: int) -> None:
        """Lets waiting sequences in, first come first served, while slots, blocks and budget last."""
        if self.config.batching == "static" and not self.running:
            self._batch_left = min(len(self.waiting), self.config.max_running)
        prompts = 0
        while self.waiting and len(self.running) < self.config.max_running:
            if self.config.batching == "static" and self._batch_left < 1:
                break
            sequence = self.waiting[0]
            known = self.blocks.find_known(sequence)
            take = self._chunk(sequence, budget, known.tokens)
            # A whole prompt longer than the budget still has to run: alone, as the step's only prompt.
            if take < 1 or (take > budget and prompts):
                break
            if not self.blocks.can_admit(sequence, spare=1 if self.running else 0, known=known):
                break
            self.waiting.popleft()
            self._run(sequence)
            self._batch_left -= 1
            step.copies.extend(self.blocks.adopt(sequence, known))
            step.admitted.append((sequence, known.tokens))
            self._put(sequence, take, step)
            self.blocks.publish(sequence, sequence.computed + take)
            budget -= take
            prompts += 1

    def _run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        self.running.append(sequence)
