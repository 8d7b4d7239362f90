"""What the serving tests share: a model and its requests, an engine's runner without a model, and made-up time."""

from __future__ import annotations

from collections.abc import Sequence as Items
from types import SimpleNamespace

import pytest
import torch

from impls.model.weights import load_model
from impls.serving.plain_loop import plain_tokens
from impls.serving.request import PENDING, Request, Sampling, Sequence
from impls.serving.scheduler import Step


def next_token(tokens: Items[int], vocab: int) -> int:
    """What the fake model answers after these tokens."""
    state = len(tokens)
    for token in tokens[-3:]:
        state = (state * 1_000_003 + token + 17) % 2_147_483_647
    return state % vocab


def answer_of(prompt: Items[int], length: int, vocab: int) -> list[int]:
    """The whole answer of the fake model."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, vocab))
    return tokens[len(prompt) :]


class FakeRunner:
    """The next token is a hash of the text, read from the cache alone: a wrong block gives a wrong token."""

    def __init__(self, vocab: int, num_blocks: int, block_size: int, host_blocks: int = 0, clock=None, cost=None):
        self.vocab = vocab
        self.block_size = block_size
        self.cache = [[-1] * block_size for _ in range(num_blocks)]
        self.host = [[-1] * block_size for _ in range(host_blocks)]
        self.clock, self.cost = clock, cost
        self.steps: list[tuple[int, int]] = []
        self.drawn: dict[Sequence, int] = {}

    def forget(self, sequence: Sequence) -> None:
        pass

    def launch(self, step: Step):
        tokens = self.execute(step)
        drawing = [chunk.sequence for chunk in step.chunks if chunk.samples]
        self.drawn = dict(zip(drawing, tokens, strict=True))
        return lambda: tokens

    def execute(self, step: Step) -> list[int]:
        for source, target in step.swap_out:
            self.host[target] = list(self.cache[source])
        copied = [(target, list(self.cache[source])) for source, target in step.copies]
        for target, block in copied:
            self.cache[target] = block
        for source, target in step.swap_in:
            self.cache[target] = list(self.host[source])
        tokens = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            assert chunk.start == sequence.computed
            for place in range(chunk.start, chunk.start + chunk.length):
                token = sequence.tokens[place]
                token = self.drawn[sequence] if token == PENDING else token
                self.cache[sequence.blocks[place // self.block_size]][place % self.block_size] = token
        for chunk in step.chunks:
            if chunk.samples:
                length = chunk.start + chunk.length
                blocks = chunk.sequence.blocks
                seen = [self.cache[blocks[p // self.block_size]][p % self.block_size] for p in range(length)[-3:]]
                tokens.append(next_token([0] * (length - len(seen)) + seen, self.vocab))
        self.steps.append((step.tokens, len(step.chunks)))
        if self.clock is not None:
            self.clock.now += self.cost(step)
        return tokens


class FakeClock:
    """Time that passes only when something says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(scope="session")
def fake() -> SimpleNamespace:
    """The fake runner, the fake clock, and the answers that the fake model gives."""
    return SimpleNamespace(Runner=FakeRunner, Clock=FakeClock, next_token=next_token, answer_of=answer_of)


class ForwardsAnew:
    """Runs a captured pass anew at each replay, on the same static inputs and into the same static output."""

    def _capture(self, size, pool):
        with torch.inference_mode():
            out = self._forward(size).clone()

        class Replay:
            @staticmethod
            def replay():
                out.copy_(self._forward(size))

        self.graphs[size] = (Replay, out)
        return pool


def ends_of(engine, requests):
    """The tokens of each request, and how each ended."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    ends: dict[str, str] = {}

    def keep(output):
        if output.token is not None:
            tokens[output.id].append(output.token)
        if output.finished is not None:
            ends[output.id] = f"{output.finished} {output.reason}".strip()

    engine.serve(requests, keep)
    return tokens, ends


def differences(found, want, ends):
    """One line for each answer that is not the wanted one: where they part, and how it ended."""
    lines = []
    for key, tokens in want.items():
        if found[key] != tokens:
            same = next((i for i, (a, b) in enumerate(zip(found[key], tokens, strict=False)) if a != b), None)
            place = min(len(found[key]), len(tokens)) if same is None else same
            lines.append(f"{key} ({ends.get(key)}) parts at token {place}: {found[key]} instead of {tokens}")
    return lines


@pytest.fixture(scope="session")
def served() -> SimpleNamespace:
    """What an engine gave, in what it is not the wanted, and graphs of a kind where there is no GPU."""
    return SimpleNamespace(
        ends_of=ends_of, differences=differences, anew=lambda kind: type("Forwards", (ForwardsAnew, kind), {})
    )


@pytest.fixture(scope="session")
def model():
    """A small model in float32, the same in every test: nobody changes its weights."""
    return load_model(shape="tiny", seed=1)


@pytest.fixture(scope="session")
def requests():
    """Prompts and answers of very different lengths, one of them a single token."""
    generator = torch.Generator().manual_seed(3)
    lengths = [(5, 9), (40, 6), (1, 12), (17, 8), (33, 10), (8, 1), (23, 14)]
    return [
        Request(f"r{i}", torch.randint(512, (prompt,), generator=generator).tolist(), Sampling(max_tokens=answer))
        for i, (prompt, answer) in enumerate(lengths)
    ]


@pytest.fixture(scope="session")
def answers(model, requests):
    """What the plain loop answers to each."""
    return {request.id: plain_tokens(model, request) for request in requests}
