"""Decode steps as CUDA graphs, captured for batch buckets.

A decode step of a small batch launches hundreds of kernels that take a few microseconds each: launched one by one the
host is slower than the device, replayed as a graph it is not. A graph has fixed shapes, so batches are padded to the
next bucket: padding rows have no slot to write to and no position to attend to.
"""

from __future__ import annotations

import gc
import statistics
import weakref
from collections import deque
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from impls.serving.kernel_attend import KernelAttend
from impls.serving.paged_cache import Layout
from impls.serving.pending import fill_pending
from impls.serving.recorder import TIMED_STEPS
from impls.serving.request import PENDING
from impls.serving.scheduler import Chunk
from impls.serving.to_device import to_device

if TYPE_CHECKING:
    from impls.serving.runner import ModelRunner


def buckets(most: int) -> list[int]:
    """Batch sizes that graphs are captured for: 1, 2, 4, 8, then every 8, up to ``most``, which is always one."""
    sizes = [size for size in (1, 2, 4) if size < most]
    sizes.extend(range(8, most, 8))
    return [*sizes, most]


class DecodeGraphs:
    """Graphs of the runner's decode step, largest first, in one memory pool: the smaller ones reuse its memory."""

    def __init__(self, runner: ModelRunner) -> None:
        # The runner holds the graphs: held both ways, cache and graphs would outlive their last user.
        self.runner = cast("ModelRunner", weakref.proxy(runner))
        self.largest = runner.config.max_running
        self.sizes = buckets(self.largest)
        device = runner.device
        # Token, position, slot, length, table row, row of a pending token: one copy brings a step to the device. The
        # host writes the next step's numbers while this one's may still be on their way, so there are two of them.
        pinned = device.type == "cuda"
        self.hosts = [torch.zeros(6, self.largest, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self.inputs = torch.zeros(6, self.largest, dtype=torch.int64, device=device)
        self.inputs[[2, 5]] = -1
        self.graphs: dict[int, tuple[Any, Tensor]] = {}
        self.timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=TIMED_STEPS)
        # One stream to warm up on: the library keeps a workspace for every stream that it has seen.
        self.stream = torch.cuda.Stream(device) if pinned else None
        # What a collection frees in the middle of a capture (another engine's graphs, say) can spoil it.
        gc.collect()
        pool: Any = None
        for size in reversed(self.sizes):
            pool = self._capture(size, pool)

    @torch.inference_mode()
    def _capture(self, size: int, pool: Any) -> Any:
        stream = self.stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream(self.runner.device))
        with torch.cuda.stream(stream):
            # Compilation and the libraries' own set-up must not be captured.
            for _ in range(2):
                self._forward(size)
        torch.cuda.current_stream(self.runner.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._forward(size)
        self.graphs[size] = (graph, logits)
        return graph.pool()

    def _forward(self, size: int) -> Tensor:
        """Logits of ``size`` decode rows from the static inputs."""
        runner = self.runner
        known, positions, slots, lengths, rows, pending = (column[:size] for column in self.inputs)
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
        size = next(size for size in self.sizes if size >= count)
        page = self.runner.config.block_size
        self.hosts.reverse()
        view = self.hosts[0].numpy()
        for row, chunk in enumerate(chunks):
            sequence, place = chunk.sequence, chunk.start
            view[0, row] = sequence.tokens[place]
            view[1, row] = place
            view[2, row] = sequence.blocks[place // page] * page + place % page
            view[3, row] = place + 1
            view[4, row] = self.runner.tables.row(sequence)
            view[5, row] = self.runner.drawn_rows[sequence] if sequence.tokens[place] == PENDING else -1
        view[:, count:size] = np.array([[0], [0], [-1], [0], [0], [-1]])
        self.runner.tables.sync()
        self.inputs.copy_(self.hosts[0], non_blocking=True)
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
