"""Attention over the paged cache by the Triton kernels: rotation fused with the cache write, decodes, chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from impls.model.decoder import Decoder
from impls.serving.paged_cache import Layout, PagedCache
from kernels.paged_attention import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rope_cache import rope_cache

#: Query rows of a tile in the batch-invariant mode, whatever the chunk (more only for groups of more heads).
INVARIANT_TILE = 64


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


class KernelAttend:
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
        self.cache, self.layout, self.rope, self.positions_T = cache, layout, rope, positions_T
        self.decodes = 0 if invariant else layout.decodes
        self.invariant = invariant
        self.chunks = len(layout.host_lengths) - self.decodes
        # Decodes are one row each, so the first row of the first chunk is their number.
        self.starts_B1 = layout.starts_B[self.decodes :] - self.decodes if self.decodes else layout.starts_B

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        keys, values = self.cache.layer(layer)
        layout, decodes = self.layout, self.decodes
        group = q_BSHE.shape[2] // k_BSKE.shape[2]
        tile = max(INVARIANT_TILE, 1 << (group - 1).bit_length()) if self.invariant else None
        q_THE = rope_cache(
            q_BSHE[0],
            k_BSKE[0],
            v_BSKE[0],
            self.rope.cos,
            self.rope.sin,
            self.positions_T,
            layout.slots_T,
            keys,
            values,
        )
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

    def _decode(self, q_BHE: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        layout, decodes = self.layout, self.decodes
        out: Tensor = paged_decode(
            q_BHE,
            keys,
            values,
            layout.tables_BN[:decodes],
            layout.lengths_B[:decodes],
            longest=layout.longest,
        )
        return out
