"""Decode steps as CUDA graphs, captured for batch buckets.

A batch is padded to the next bucket: padding rows have no slot to write to and no position to attend to.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from impls.serving.kernel_attend import KernelAttend
from impls.serving.paged_cache import Layout
from impls.serving.pending import fill_pending
from impls.serving.recorder import TIMED_STEPS
from impls.serving.request import PENDING
from impls.serving.scheduler import Chunk
from impls.serving.step_graphs import StepGraphs
from impls.serving.to_device import to_device

if TYPE_CHECKING:
    from impls.serving.runner import ModelRunner

#: Numbers of a row: token, position, slot, length, table row, row of a pending token.
COLUMNS = 6


def buckets(most: int) -> list[int]:
    """Batch sizes that graphs are captured for: 1, 2, 4, 8, then every 8, up to ``most``, which is always one."""
    sizes = [size for size in (1, 2, 4) if size < most]
    sizes.extend(range(8, most, 8))
    return [*sizes, most]


class DecodeGraphs(StepGraphs):
    """Graphs of the runner's decode step; ``pool`` as in :class:`StepGraphs`."""

    def __init__(self, runner: ModelRunner, pool: Any = None) -> None:
        most = runner.config.max_running
        super().__init__(runner, buckets(most), COLUMNS * most, pool)
        self.columns = self.inputs.view(COLUMNS, most)
        self.columns[[2, 5]] = -1
        self.timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=TIMED_STEPS)
        self.capture()

    def _forward(self, size: int) -> Tensor:
        """Logits of ``size`` decode rows from the static inputs."""
        runner = self.runner
        known, positions, slots, lengths, rows, pending = (column[:size] for column in self.columns)
        tokens = fill_pending(known, pending, runner.drawn)
        layout = Layout(
            slots_T=slots,
            tables_BN=runner.tables.device[rows],
            lengths_B=lengths.to(torch.int32),
            starts_B=torch.arange(size + 1, dtype=torch.int32, device=runner.device),
            decodes=size,
            # How a context is split is captured with the graph, so it is chosen for the longest there may be.
            longest=runner.config.context,
            host_lengths=(runner.config.context,) * size,
            host_starts=tuple(range(size + 1)),
        )
        attend = KernelAttend(runner.cache, layout, runner.rope, positions)
        hidden = runner.model.hidden(tokens.unsqueeze(0), positions.unsqueeze(0), attend)[0]
        logits: Tensor = runner.model.lm_head(hidden)
        return logits

    def replay(self, chunks: Items[Chunk]) -> Tensor:
        """Logits of the chunks, one row each; they are overwritten by the next replay."""
        count = len(chunks)
        size = self.at_least(count)
        page = self.runner.config.block_size
        view = self.blank().reshape(COLUMNS, -1)
        for row, chunk in enumerate(chunks):
            sequence, place = chunk.sequence, chunk.start
            view[0, row] = sequence.tokens[place]
            view[1, row] = place
            view[2, row] = sequence.blocks[place // page] * page + place % page
            view[3, row] = place + 1
            view[4, row] = self.runner.tables.row(sequence)
            view[5, row] = self.runner.drawn_rows[sequence] if sequence.tokens[place] == PENDING else -1
        view[:, count:size] = np.array([[0], [0], [-1], [0], [0], [-1]])
        self.send()
        graph, logits = self.graphs[size]
        if count == self.largest and self.stream is not None:
            span = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            span[0].record()
            graph.replay()
            span[1].record()
            self.timed.append(span)
        else:
            graph.replay()
        if all(chunk.samples for chunk in chunks):
            return logits[:count]
        picked = [row for row, chunk in enumerate(chunks) if chunk.samples]
        return logits[to_device(torch.tensor(picked), self.runner.device)]

    def full_seconds(self, last: int) -> float | None:
        """The device's time for the model in a step of the largest batch: the median of the last ones; None before."""
        spans = list(self.timed)[-last:]
        if not spans:
            return None
        spans[-1][1].synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in spans)) / 1e3
