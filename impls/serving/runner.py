"""Runs a step of the scheduler through the model: lays the tokens out, moves blocks, samples.

All chunks of a step go through the model as one row of tokens, decodes first: linears and norms see the tokens alone,
and only attention knows where sequences begin ("Orca", section 3, selective batching).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from impls.model.decoder import Attend, Decoder, Parts, keep_unrotated
from impls.serving.paged_cache import GatherAttend, Layout, PagedCache
from impls.serving.pending import fill_pending
from impls.serving.request import PENDING, Sequence
from impls.serving.sampler import Draws, sample
from impls.serving.scheduler import Chunk, EngineConfig, Step
from impls.serving.to_device import to_device

if TYPE_CHECKING:
    from impls.serving.chunk_graphs import ChunkGraphs
    from impls.serving.decode_graphs import DecodeGraphs

#: Rows of every pass of the batch-invariant mode: one shape, so that a library has no choice of algorithm to make.
INVARIANT_ROWS = 64


class ModelRunner:
    """The model, its paged cache, and what a step needs on the device.

    Args:
        model: its weights are shared, nothing of it is changed.
        config: sizes and switches of the engine.
        kernels: attention by the Triton kernels with the rotation fused into the cache write; by default on a GPU
            only. False gathers and uses torch's attention.
        graphs: replay steps as CUDA graphs, of decodes captured for batch buckets, with chunks for token buckets; by
            default on a GPU with kernels. What no bucket holds is launched kernel by kernel.

    Raises:
        ValueError: the context is longer than the model's, or graphs are asked for where there are none.
    """

    def __init__(
        self, model: Decoder, config: EngineConfig, *, kernels: bool | None = None, graphs: bool | None = None
    ) -> None:
        if config.context > model.config.max_position_embeddings:
            raise ValueError(
                f"context {config.context} exceeds the model's {model.config.max_position_embeddings} positions"
            )
        weight = model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        on_gpu = self.device.type == "cuda"
        self.kernels = on_gpu if kernels is None else kernels
        self.config = config
        self.model = self._decoder(model)
        self.cache = PagedCache(
            model.config, config.num_blocks, config.block_size, self.dtype, self.device, config.host_blocks
        )
        self.tables = BlockTables(config, self.device)
        # The tokens of the last launch stay on the device, where the next one finds those that the host waits for.
        self.drawn = torch.zeros(config.max_running, dtype=torch.int64, device=self.device)
        self.drawn_rows: dict[Sequence, int] = {}
        if self.kernels:
            from impls.serving.kernel_attend import RopeTable

            self.rope = RopeTable.of(model, config.context)
        self.graphs: DecodeGraphs | None = None
        self.chunk_graphs: ChunkGraphs | None = None
        if graphs if graphs is not None else on_gpu and self.kernels and not config.batch_invariant:
            if not (on_gpu and self.kernels):
                raise ValueError("CUDA graphs need a CUDA GPU and kernels=True")
            from impls.serving.chunk_graphs import ChunkGraphs
            from impls.serving.decode_graphs import DecodeGraphs

            self.chunk_graphs = ChunkGraphs(self)
            self.graphs = DecodeGraphs(self, self.chunk_graphs.pool)

    def _decoder(self, model: Decoder) -> Decoder:
        """The model with the parts that this way of running needs."""
        if not self.kernels:
            return model
        if self.config.batch_invariant:
            # The library's products in one shape for every pass: a batch of one must not take another way.
            return with_parts(model, Parts(rotate=keep_unrotated))
        from impls.serving.fast_decoder import fast_decoder

        return fast_decoder(model)

    @property
    def vocab(self) -> int:
        """Size of the model's vocabulary."""
        return self.model.config.vocab_size

    def forget(self, sequence: Sequence) -> None:
        """Its blocks are no longer its own: its row of the block tables is free again."""
        self.tables.drop(sequence)

    @torch.inference_mode()
    def launch(self, step: Step) -> Callable[[], list[int]]:
        """Moves blocks and starts the chunks, if any; what it returns waits for the tokens of those that sample."""
        self.cache.copy_out(step.swap_out)
        self.cache.copy(step.copies)
        self.cache.copy_in(step.swap_in)
        if not step.chunks:
            return _collector(self.drawn[:0], [])
        chunks = sorted(step.chunks, key=lambda chunk: chunk.length > 1)
        if self.config.batch_invariant:
            # In several passes a sequence must not come before one whose blocks it reads.
            chunks = step.chunks
            logits = self._run_invariant(chunks)
        elif self.graphs is not None and step.decode_only and len(chunks) <= self.graphs.largest:
            logits = self.graphs.replay(chunks)
        elif self.chunk_graphs is not None and self.chunk_graphs.holds(chunks):
            logits = self.chunk_graphs.replay(chunks)
        else:
            logits = self._run(chunks)
        drawing = [chunk.sequence for chunk in chunks if chunk.samples]
        self.drawn_rows = {sequence: row for row, sequence in enumerate(drawing)}
        if not drawing:
            return _collector(self.drawn[:0], [])
        draws = Draws.of([(sequence.sampling, len(sequence.tokens)) for sequence in drawing], self.device)
        tokens = sample(logits, draws)
        self.drawn[: len(drawing)] = tokens
        rows = [self.drawn_rows[chunk.sequence] for chunk in step.chunks if chunk.samples]
        return _collector(tokens, rows)

    def attend(self, layout: Layout, positions: Tensor) -> Attend:
        """Attention over the cache for one pass."""
        if self.kernels:
            from impls.serving.kernel_attend import KernelAttend

            return KernelAttend(self.cache, layout, self.rope, positions, invariant=self.config.batch_invariant)
        return GatherAttend(self.cache, layout, apart=self.config.batch_invariant)

    def _run(self, chunks: Items[Chunk], rows: int = 0) -> Tensor:
        """Logits of the chunks that sample, from one pass; padded to ``rows`` tokens when that is more."""
        tokens, positions, layout = self.lay_out(chunks, rows)
        hidden = self.model.hidden(tokens.unsqueeze(0), positions.unsqueeze(0), self.attend(layout, positions))[0]
        ends = [layout.host_starts[i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.samples]
        if not ends:
            return hidden.new_empty(0, self.vocab)
        picked = to_device(torch.tensor(ends), self.device)
        # In the invariant mode the output layer sees every row, so that it too has one shape.
        logits: Tensor = self.model.lm_head(hidden if rows else hidden[picked])
        return logits[picked] if rows else logits

    def _run_invariant(self, chunks: Items[Chunk]) -> Tensor:
        """The same in passes of :data:`INVARIANT_ROWS` rows each, chunks cut where a pass is full."""
        passes: list[list[Chunk]] = [[]]
        room = INVARIANT_ROWS
        for chunk in chunks:
            start, left = chunk.start, chunk.length
            while left:
                if not room:
                    passes.append([])
                    room = INVARIANT_ROWS
                take = min(room, left)
                passes[-1].append(Chunk(chunk.sequence, start, take, chunk.samples and take == left))
                start, left, room = start + take, left - take, room - take
        return torch.cat([self._run(part, INVARIANT_ROWS) for part in passes])

    def lay_out(self, chunks: Items[Chunk], rows: int = 0) -> tuple[Tensor, Tensor, Layout]:
        """Token ids and positions of a pass on the device, and where they stand; decodes must come first."""
        decodes = sum(chunk.length == 1 for chunk in chunks)
        total = sum(chunk.length for chunk in chunks)
        packed = np.empty((4, max(rows, total)), dtype=np.int64)
        starts, lengths = self.pack(chunks, packed)
        tables = self.tables.of(chunks)
        on_device = to_device(torch.from_numpy(packed), self.device)
        bounds = to_device(torch.tensor([*lengths, *starts], dtype=torch.int32), self.device)
        layout = Layout(
            slots_T=on_device[2],
            tables_BN=tables,
            lengths_B=bounds[: len(lengths)],
            starts_B=bounds[len(lengths) :],
            decodes=decodes,
            longest=max(lengths),
            widest=max(chunk.length for chunk in chunks),
            host_lengths=tuple(lengths),
            host_starts=tuple(starts),
        )
        tokens = on_device[0]
        if (packed[3] >= 0).any():
            tokens = fill_pending(tokens, on_device[3], self.drawn)
        return tokens, on_device[1], layout

    def pack(self, chunks: Items[Chunk], packed: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[list[int], list[int]]:
        """Writes each token's id, position, slot, and row among the last launch's tokens if it is pending, else -1.

        ``packed`` is (4, at least as many tokens); what lies behind them becomes padding. Returns the first row of each
        chunk with the end of the last one, and how many tokens of each sequence are in the cache after it.
        """
        size = self.config.block_size
        at = 0
        starts, lengths = [0], []
        packed[3] = -1
        for chunk in chunks:
            sequence, start, stop = chunk.sequence, chunk.start, chunk.start + chunk.length
            places = slice(at, at + chunk.length)
            packed[0, places] = sequence.tokens[start:stop]
            if chunk.length == 1:
                packed[1, at] = start
                packed[2, at] = sequence.blocks[start // size] * size + start % size
            else:
                positions = np.arange(start, stop)
                first = start // size
                blocks = np.array(sequence.blocks[first : (stop - 1) // size + 1])
                packed[1, places] = positions
                packed[2, places] = blocks[positions // size - first] * size + positions % size
            at += chunk.length
            if packed[0, at - 1] == PENDING:
                packed[3, at - 1] = self.drawn_rows[sequence]
            starts.append(at)
            lengths.append(stop)
        packed[:2, at:] = 0
        packed[2, at:] = -1
        return starts, lengths


class BlockTables:
    """Block tables of the sequences that run, one row each, kept on the device and brought up to date as they grow.

    Rebuilding them from Python lists at every step would cost more than the step's launch does.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.width = -(-config.context // config.block_size)
        shape = (config.max_running, self.width)
        pinned = device.type == "cuda"
        self.host = torch.zeros(shape, dtype=torch.int32)
        self.snapshots = [torch.zeros(shape, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self.view = self.host.numpy()
        self.device = torch.zeros(shape, dtype=torch.int32, device=device)
        self.free = list(range(config.max_running - 1, -1, -1))
        self.rows: dict[str, int] = {}
        self.filled = [0] * config.max_running
        self.stale = False

    def row(self, sequence: Sequence) -> int:
        """The sequence's row, brought up to date on the host; ``stale`` says that the device must follow."""
        row = self.rows.get(sequence.id)
        if row is None:
            row = self.rows[sequence.id] = self.free.pop()
            self.filled[row] = 0
        have, want = self.filled[row], len(sequence.blocks)
        if have < want:
            self.view[row, have:want] = sequence.blocks[have:want]
            self.filled[row] = want
            self.stale = True
        return row

    def sync(self) -> None:
        """Copies what changed to the device; the copy is queued before the pass that reads it."""
        if self.stale:
            # The host may go on to change the rows before the copy has run, so the copy reads a snapshot; the one of
            # two launches ago has been read, since that launch's tokens have come back.
            self.snapshots.reverse()
            self.snapshots[0].copy_(self.host)
            self.device.copy_(self.snapshots[0], non_blocking=True)
            self.stale = False

    def of(self, chunks: Items[Chunk]) -> Tensor:
        """The tables of these chunks' sequences, in their order."""
        rows = [self.row(chunk.sequence) for chunk in chunks]
        self.sync()
        return self.device[to_device(torch.tensor(rows), self.device.device)]

    def drop(self, sequence: Sequence) -> None:
        """Frees the row of a sequence, if it has one."""
        row = self.rows.pop(sequence.id, None)
        if row is not None:
            self.free.append(row)


def with_parts(model: Decoder, parts: Parts) -> Decoder:
    """A decoder of other parts over the very same weights: nothing is copied, and the model given stays as it is.

    Raises:
        ValueError: the model's sublayers were replaced, so that its weights are not where a decoder keeps them.
    """
    with torch.device("meta"):
        twin = Decoder(model.config, parts)
    try:
        twin.load_state_dict(model.state_dict(), assign=True)
    except RuntimeError as error:
        raise ValueError(f"the engine takes a decoder with its own linear layers: {error}") from error
    if model.config.tie_word_embeddings:
        twin.lm_head.weight = twin.embed_tokens.weight
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
    twin.frequencies = model.frequencies
    twin.weights_digest = model.weights_digest
    return twin.eval()


def _collector(tokens_B: Tensor, rows: Items[int]) -> Callable[[], list[int]]:
    """Waits for the tokens, and gives them in the order of ``rows``.

    A launch that draws none is waited for all the same: what the host reuses two launches later must have been read.
    """
    if tokens_B.device.type == "cpu":
        return lambda: tokens_B[torch.tensor(rows, dtype=torch.int64)].tolist()
    host = torch.empty(tokens_B.shape, dtype=tokens_B.dtype, pin_memory=True)
    host.copy_(tokens_B, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def collect() -> list[int]:
        arrived.synchronize()
        tokens = host.tolist()
        return [tokens[row] for row in rows]

    return collect
