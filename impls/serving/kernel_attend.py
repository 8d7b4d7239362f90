"""Attention over the paged cache by the Triton kernels: rotation fused with the cache write, decodes, chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from impls.model.decoder import Decoder
from impls.serving.paged_cache import Layout, PagedCache
from kernels._rows import multiprocessors
from kernels.paged_attention import MAX_SPLITS, paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rope_cache import rope_cache

#: Query rows of a tile in the batch-invariant mode, whatever the chunk (more only for groups of more heads).
INVARIANT_TILE = 64
#: Where decodes are launched before it is known how many there are: programs a multiprocessor if every row is one, and
#: positions that a program should have to read at least.
DECODE_PROGRAMS, SPLIT_LENGTH = 8, 512


@dataclass(frozen=True)
class RopeTable:
    """Cosine and sine of every position's angles, float32, (positions, E / 2) each."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def of(model: Decoder, positions: int) -> RopeTable:
        """The model's own angles, so that both ways of rotating agree."""
        places = torch.arange(positions, device=model.embed_tokens.weight.device).unsqueeze(0)
        half = model.config.head_dim // 2
        cos, sin = model.cos_sin(places)
        return RopeTable(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())


class PagedPass:
    """What both ways of attending share: the pass, the cache that it writes to, and its decodes."""

    def __init__(self, cache: PagedCache, layout: Layout, rope: RopeTable, positions_T: Tensor, decodes: int) -> None:
        self.cache, self.layout, self.rope, self.positions_T = cache, layout, rope, positions_T
        self.decodes = decodes

    def _write(self, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Puts new keys and values in their slots; the queries, rotated."""
        rope, slots_T = self.rope, self.layout.slots_T
        out: Tensor = rope_cache(q_THE, k_TKE, v_TKE, rope.cos, rope.sin, self.positions_T, slots_T, keys, values)
        return out

    def _decode(self, q_BHE: Tensor, keys: Tensor, values: Tensor, splits: int | None = None) -> Tensor:
        layout, decodes = self.layout, self.decodes
        out: Tensor = paged_decode(
            q_BHE,
            keys,
            values,
            layout.tables_BN[:decodes],
            layout.lengths_B[:decodes],
            longest=layout.longest,
            splits=splits,
        )
        return out


class KernelAttend(PagedPass):
    """An `Attend` for one pass of a model that leaves the rotation to it.

    invariant: every row goes through the kernel for chunks with one tile shape, so that its numbers do not depend on
    the batch, nor on whether its token was computed in a chunk or alone.
    """

    def __init__(
        self,
        cache: PagedCache,
        layout: Layout,
        rope: RopeTable,
        positions_T: Tensor,
        *,
        invariant: bool = False,
    ) -> None:
        super().__init__(cache, layout, rope, positions_T, decodes=0 if invariant else layout.decodes)
        self.invariant = invariant
        self.chunks = len(layout.host_lengths) - self.decodes
        # Decodes are one row each, so the first row of the first chunk is their number.
        self.starts_B1 = layout.starts_B[self.decodes :] - self.decodes if self.decodes else layout.starts_B

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        keys, values = self.cache.layer(layer)
        layout, decodes = self.layout, self.decodes
        group = q_BSHE.shape[2] // k_BSKE.shape[2]
        tile = max(INVARIANT_TILE, 1 << (group - 1).bit_length()) if self.invariant else None
        q_THE = self._write(q_BSHE[0], k_BSKE[0], v_BSKE[0], keys, values)
        if decodes and not self.chunks:
            return self._decode(q_THE, keys, values).unsqueeze(0)
        out: Tensor = torch.zeros_like(q_THE) if q_THE.shape[0] > layout.host_starts[-1] else torch.empty_like(q_THE)
        if decodes:
            out[:decodes] = self._decode(q_THE[:decodes], keys, values)
        paged_prefill(
            q_THE[decodes:],
            keys,
            values,
            layout.tables_BN[decodes:],
            layout.lengths_B[decodes:],
            self.starts_B1,
            widest=layout.widest,
            rows=tile,
            out_THE=out[decodes:],
        )
        return out.unsqueeze(0)


class FixedAttend(PagedPass):
    """The same for a pass whose launches must not depend on what is in it, as those of a CUDA graph.

    The first ``layout.decodes`` rows are attended to as decodes whether they are or not, a row that is none having the
    length 0. Chunks may begin at any row, and one that is missing has no rows: ``starts_B`` is of the chunks alone,
    while the tables and lengths of the decodes come first, as always.
    """

    def __init__(self, cache: PagedCache, layout: Layout, rope: RopeTable, positions_T: Tensor) -> None:
        super().__init__(cache, layout, rope, positions_T, layout.decodes)
        self.out_THE: Tensor | None = None
        # Few of the rows may be decodes, with much to read each; programs that have nothing to do are not quite free.
        programs = layout.decodes * cache.kv.shape[3]
        most = DECODE_PROGRAMS * multiprocessors(cache.kv.device) // programs
        self.splits = max(1, min(MAX_SPLITS, most, layout.longest // SPLIT_LENGTH))

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        keys, values = self.cache.layer(layer)
        layout, decodes = self.layout, self.decodes
        q_THE = self._write(q_BSHE[0], k_BSKE[0], v_BSKE[0], keys, values)
        # Rows of nobody are zeros, and stay so: every layer writes to the very rows that the first one wrote to.
        out = self.out_THE = torch.zeros_like(q_THE) if self.out_THE is None else self.out_THE
        out[:decodes] = self._decode(q_THE[:decodes], keys, values, self.splits)
        # After the decodes, which leave zeros in rows of chunks.
        paged_prefill(
            q_THE,
            keys,
            values,
            layout.tables_BN[decodes:],
            layout.lengths_B[decodes:],
            layout.starts_B,
            widest=layout.widest,
            out_THE=out,
        )
        return out.unsqueeze(0)
