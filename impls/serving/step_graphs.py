"""Passes of fixed shapes as CUDA graphs: how they are captured, and how the numbers of a step reach them.

A pass launches hundreds of kernels, most of which take a few microseconds: launched one by one the host is slower than
the device, replayed as a graph it is not. A graph has fixed shapes and reads fixed memory, so a step is padded to the
next size there is a graph for, and its numbers (tokens, places, slots, lengths) are copied to where the graph reads.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from impls.serving.runner import ModelRunner


class StepGraphs:
    """One graph for each of ``sizes`` (ascending), captured largest first: the smaller ones reuse the memory.

    numbers: how many whole numbers a step has at most. inputs: where they stand on the device; what they are before the
    first step must make a pass that writes nothing, for graphs are captured with it.
    pool: memory that the graphs of another set work in and that these shall work in too. Steps run one after another,
    and what a graph gives is used before the next one runs, so that one memory is enough for all.
    """

    def __init__(self, runner: ModelRunner, sizes: Items[int], numbers: int, pool: Any = None) -> None:
        # The runner holds the graphs: held both ways, cache and graphs would outlive their last user.
        self.runner = cast("ModelRunner", weakref.proxy(runner))
        self.sizes = list(sizes)
        self.largest = self.sizes[-1]
        self.pool = pool
        device = runner.device
        pinned = device.type == "cuda"
        # The host writes the next step's numbers while this one's may still be on their way, so there are two of them.
        self.hosts = [torch.zeros(numbers, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self.inputs = torch.zeros(numbers, dtype=torch.int64, device=device)
        self.graphs: dict[int, tuple[Any, Tensor]] = {}
        # One stream to warm up on: the library keeps a workspace for every stream that it has seen.
        self.stream = torch.cuda.Stream(device) if pinned else None

    def capture(self) -> None:
        """Captures every size."""
        # What a collection frees in the middle of a capture (another engine's graphs, say) can spoil it.
        gc.collect()
        for size in reversed(self.sizes):
            self.pool = self._capture(size, self.pool)

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
            out = self._forward(size)
        self.graphs[size] = (graph, out)
        return graph.pool()

    def _forward(self, size: int) -> Tensor:
        """What is captured: from ``inputs`` alone, and without a word from the host."""
        raise NotImplementedError

    def at_least(self, size: int) -> int:
        """The smallest size there is a graph for that holds ``size``."""
        return next(known for known in self.sizes if known >= size)

    def blank(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where the host writes the next step's numbers. It holds an old step's: whatever the graph reads is written.

        That step was two launches ago or more, and has been read, since its tokens have come back.
        """
        self.hosts.reverse()
        return self.hosts[0].numpy()

    def send(self) -> None:
        """Brings them, and what changed in the block tables, to the device: queued before the pass that reads it."""
        self.runner.tables.sync()
        self.inputs.copy_(self.hosts[0], non_blocking=True)
