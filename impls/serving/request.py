"""What an engine is asked for, what it keeps of it while it runs, and when it says no."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from impls.serving.prefix_index import Node


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and when to stop.

    temperature: 0 takes the most likely token. top_k: only the k most likely; 0 takes all. top_p: only the most
    likely tokens whose probabilities reach p together (Holtzman et al., 2020, "The Curious Case of Neural Text
    Degeneration", section 3.1). seed: the same request with the same seed gives the same tokens, whatever runs beside
    it. max_tokens: length of the answer. stop: ids that end it; the id itself is the answer's last token.

    Values are not checked here: a request that makes no sense is refused by the engine, with its reason.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    stop: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True)
class Request:
    """A prompt and what is wanted for it; ``arrival`` is seconds from the start of the run."""

    id: str
    prompt: Items[int]
    sampling: Sampling = field(default_factory=Sampling)
    arrival: float = 0.0


@dataclass(frozen=True)
class Limits:
    """What bounds a request: the vocabulary, the model's context, and the tokens that the whole cache can hold."""

    vocab: int
    context: int
    cache_tokens: int

    def refusal(self, request: Request) -> str | None:
        """Why this request cannot be served, or None. What passes can always be finished, so nothing waits for ever."""
        return (
            _form_problem(request)
            or _sampling_problem(request.sampling)
            or self._length_problem(request)
            or self._token_problem(request)
        )

    def _length_problem(self, request: Request) -> str | None:
        prompt, answer = len(request.prompt), request.sampling.max_tokens
        if not prompt:
            return "the prompt is empty"
        if prompt + answer > self.context:
            return f"{prompt} prompt and {answer} answer tokens exceed the context of {self.context}"
        # The last token is sampled and never read again, so it takes no place in the cache.
        if prompt + answer - 1 > self.cache_tokens:
            return f"{prompt} prompt and {answer} answer tokens exceed the cache of {self.cache_tokens} tokens"
        return None

    def _token_problem(self, request: Request) -> str | None:
        prompt = request.prompt
        if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < self.vocab:
            return None  # told quickly, since long prompts come while others decode
        for place, token in enumerate(prompt):
            if not _is_whole(token) or not 0 <= token < self.vocab:
                return f"token {token!r} at place {place} of the prompt is not in the vocabulary of {self.vocab}"
        return None


def sent_at(request: Request) -> float:
    """Its arrival; 0 where that is no time, which it is refused for."""
    return request.arrival if _is_number(request.arrival) and request.arrival >= 0 else 0.0


def prompt_length(request: Request) -> int:
    """Tokens of its prompt; 0 where that is none, which it is refused for."""
    return len(request.prompt) if isinstance(request.prompt, Items) else 0


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _form_problem(request: Request) -> str | None:
    prompt: Any = request.prompt
    sampling: Any = request.sampling
    if not isinstance(prompt, Items):
        return f"the prompt is of type {type(prompt).__name__}, not a sequence of token ids"
    if not isinstance(sampling, Sampling):
        return f"sampling is {sampling!r}, not a Sampling"
    if not _is_number(request.arrival) or request.arrival < 0:
        return f"arrival is {request.arrival!r}; it must be a finite number of seconds, at least 0"
    return None


def _sampling_problem(sampling: Sampling) -> str | None:
    if not _is_whole(sampling.max_tokens) or sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens!r}; it must be a whole number of at least 1"
    if not _is_number(sampling.temperature) or sampling.temperature < 0:
        return f"temperature is {sampling.temperature!r}; it must be a finite number of at least 0"
    if not _is_number(sampling.top_p) or not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p!r}; it must be above 0 and at most 1"
    if not _is_whole(sampling.top_k) or not 0 <= sampling.top_k < 2**63:
        return f"top_k is {sampling.top_k!r}; it must be a whole number of at least 0"
    if not _is_whole(sampling.seed) or not -(2**63) <= sampling.seed < 2**63:
        return f"seed is {sampling.seed!r}; it must be a 64-bit whole number"
    if not isinstance(sampling.stop, tuple | list) or not all(map(_is_whole, sampling.stop)):
        return f"stop is {sampling.stop!r}; it must be a tuple of token ids"
    return None


#: Stands in a sequence for a token that the device has not handed over yet.
PENDING = -1


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    DONE = "done"


class Sequence:
    """A request under way.

    tokens: the prompt and what was generated so far. computed: how many of them have their keys and values in the
    cache. blocks: the cache blocks that hold them, in order; host_blocks: those on the host while it is swapped out.
    lost: how many were computed when they were last given up for others. cached: prompt tokens that were in the cache
    when it was first admitted. keys: hashes of its first blocks, as far as asked for; indexed: how many of its blocks
    the prefix index was told of, and prefix: where it stands there.
    """

    __slots__ = (
        "blocks",
        "cached",
        "computed",
        "host_blocks",
        "id",
        "indexed",
        "keys",
        "limit",
        "lost",
        "preemptions",
        "prefix",
        "prompt_len",
        "sampling",
        "state",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        self.id = request.id
        self.sampling = request.sampling
        self.tokens: list[int] = list(request.prompt)
        self.prompt_len = len(self.tokens)
        self.limit = self.prompt_len + request.sampling.max_tokens
        self.computed = 0
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        self.state = State.WAITING
        self.preemptions = 0
        self.lost = 0
        self.cached = 0
        self.keys: list[int] = []
        self.indexed = 0
        self.prefix: Node | None = None

    @property
    def pending(self) -> int:
        """Tokens still to be run through the model: one in decode, more in prefill and after a preemption."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> list[int]:
        """The answer so far."""
        return self.tokens[self.prompt_len :]

    def finish_reason(self, length: int | None = None) -> str | None:
        """``stop`` or ``length`` when the first ``length`` tokens (all by default) are a complete answer, else None."""
        length = len(self.tokens) if length is None else length
        if length > self.prompt_len and self.tokens[length - 1] in self.sampling.stop:
            return "stop"
        return "length" if length >= self.limit else None
