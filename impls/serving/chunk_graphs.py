"""Steps that hold chunks of prompts as CUDA graphs, captured for buckets of tokens.

What a step with chunks launches depends on how many decodes and chunks it has, how long each is and where it stands.
Here nothing of that is known when the graph is captured, so the pass has room for all: so many rows of tokens, decodes
first, every one of the first rows run as if it were a decode, and a fixed number of chunks, each as wide as the pass
may be. What is missing has the length 0, and the programs that were launched for it end at once. The output layer is
run behind the graph over the rows that a token is drawn from, as many as there are.

Buckets end where the device takes longer for a step than any host needs to launch it. Larger steps, and steps of more
chunks than there is room for, are launched kernel by kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from impls.serving.kernel_attend import FixedAttend
from impls.serving.paged_cache import Layout
from impls.serving.pending import fill_pending
from impls.serving.scheduler import Chunk, EngineConfig
from impls.serving.step_graphs import StepGraphs

if TYPE_CHECKING:
    from impls.serving.runner import ModelRunner

#: Chunks of more than one token that a graph has room for.
CHUNKS = 8
#: Tokens of the largest bucket, and from the second bucket on the steps between them: the rows of a product's tile.
MOST_TOKENS, TOKEN_STEP = 1024, 128
#: The least bucket: so few rows cost little beside the weights that are read for them.
LEAST_TOKENS = 64

Numbers = TypeVar("Numbers", Tensor, "np.ndarray[Any, np.dtype[np.int64]]")


def token_buckets(config: EngineConfig) -> list[int]:
    """Tokens that graphs are captured for, up to the longest step that there may be or :data:`MOST_TOKENS`.

    None is smaller than the number of sequences: the decodes of any step fit in each.
    """
    least = config.max_running
    longest = config.max_step_tokens if config.chunked_prefill else max(config.max_step_tokens, config.context + least)
    most = max(least, min(MOST_TOKENS, longest))
    between = {LEAST_TOKENS, config.max_step_tokens, *range(TOKEN_STEP, most, TOKEN_STEP)}
    return [*sorted(size for size in between if least <= size < most), most]


class ChunkGraphs(StepGraphs):
    """Graphs of the runner's step with chunks; what runs in them is counted in ``replays``, by bucket."""

    def __init__(self, runner: ModelRunner, sizes: Items[int] | None = None, pool: Any = None) -> None:
        config = runner.config
        self.decodes, self.chunks = config.max_running, min(CHUNKS, config.max_running)
        self.sequences = self.decodes + self.chunks
        sizes = token_buckets(config) if sizes is None else sizes
        numbers = 4 * sizes[-1] + 2 * self.sequences + self.chunks + 1 + self.decodes
        super().__init__(runner, sizes, numbers, pool)
        self.replays: Counter[int] = Counter()
        self._parts(self.inputs)[0][2:] = -1
        self.capture()

    def _parts(self, numbers: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Views of a step's numbers.

        Token, position, slot and row of a pending token, of each row (4, T); length and row among the block tables, of
        each sequence (2, decodes + chunks); the first row of each chunk and the end; rows that logits are wanted of.
        """
        rows, sequences = 4 * self.largest, 2 * self.sequences
        starts = rows + sequences
        picked = starts + self.chunks + 1
        return (
            numbers[:rows].reshape(4, self.largest),
            numbers[rows:starts].reshape(2, self.sequences),
            numbers[starts:picked],
            numbers[picked:],
        )

    def _forward(self, size: int) -> Tensor:
        """The last layer's output in the picked rows, from the static inputs of ``size`` rows."""
        runner = self.runner
        rows, (lengths, tables), starts, picked = self._parts(self.inputs)
        known, positions, slots, pending = (row[:size] for row in rows)
        tokens = fill_pending(known, pending, runner.drawn)
        layout = Layout(
            slots_T=slots,
            tables_BN=runner.tables.device[tables],
            lengths_B=lengths.to(torch.int32),
            starts_B=starts.to(torch.int32),
            decodes=self.decodes,
            longest=runner.config.context,
            widest=size,
        )
        attend = FixedAttend(runner.cache, layout, runner.rope, positions)
        hidden = runner.model.hidden(tokens.unsqueeze(0), positions.unsqueeze(0), attend)[0]
        return hidden[picked]

    def holds(self, chunks: Items[Chunk]) -> bool:
        """Whether there is a graph that a step of these chunks fits in."""
        wide = sum(chunk.length > 1 for chunk in chunks)
        return wide <= self.chunks and sum(chunk.length for chunk in chunks) <= self.largest

    def replay(self, chunks: Items[Chunk]) -> Tensor:
        """Logits of the chunks that sample; decodes must come first."""
        runner, tables = self.runner, self.runner.tables
        decodes = sum(chunk.length == 1 for chunk in chunks)
        wide = len(chunks) - decodes
        size = self.at_least(sum(chunk.length for chunk in chunks))
        rows, sequences, starts, picked = self._parts(self.blank())
        firsts, lengths = runner.pack(chunks, rows[:, :size])
        numbers = np.array([lengths, [tables.row(chunk.sequence) for chunk in chunks]])
        sequences[:] = 0
        sequences[:, :decodes] = numbers[:, :decodes]
        sequences[:, self.decodes : self.decodes + wide] = numbers[:, decodes:]
        starts[: wide + 1] = firsts[decodes:]
        starts[wide + 1 :] = firsts[-1]
        ends = [first - 1 for first, chunk in zip(firsts[1:], chunks, strict=True) if chunk.samples]
        picked[:] = 0
        picked[: len(ends)] = ends
        self.send()
        graph, hidden = self.graphs[size]
        graph.replay()
        self.replays[size] += 1
        if not ends:
            return hidden.new_empty(0, runner.vocab)
        logits: Tensor = runner.model.lm_head(hidden[: len(ends)])
        return logits
