"""The paged key-value cache on the device, its overflow on the host, and attention over it in plain torch.

Shape suffixes: N blocks, P slots of a block, K key-value heads, H query heads, E width of a head, T tokens of a pass,
B sequences in decode, C positions attended to.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from impls.model.config import ModelConfig
from impls.serving.to_device import to_device


class PagedCache:
    """Keys and values of every layer in blocks, (layers, 2, N, K, P, E).

    A block holds one head's slots next to each other, so that a kernel that reads a head streams P·E numbers at once.
    The host pool is block-major, (host blocks, layers, 2, K, P, E): a block that is swapped moves in one piece.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        host_blocks: int = 0,
    ) -> None:
        block = (config.num_kv_heads, block_size, config.head_dim)
        self.kv = torch.zeros(config.num_layers, 2, num_blocks, *block, dtype=dtype, device=device)
        self.host = torch.zeros(
            host_blocks, config.num_layers, 2, *block, dtype=dtype, pin_memory=device.type == "cuda" and host_blocks > 0
        )
        self.block_size = block_size

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.kv.nbytes

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, (N, K, P, E) each."""
        return self.kv[layer, 0], self.kv[layer, 1]

    def copy_out(self, moves: Items[tuple[int, int]]) -> None:
        """Copies device blocks to host blocks: gathered on the device first, so that the link sees whole blocks."""
        if not moves:
            return
        device_blocks = to_device(torch.tensor([source for source, _ in moves]), self.kv.device)
        packed = self.kv[:, :, device_blocks].permute(2, 0, 1, 3, 4, 5).contiguous()
        for row, (_, host_block) in enumerate(moves):
            self.host[host_block].copy_(packed[row], non_blocking=True)

    def copy(self, moves: Items[tuple[int, int]]) -> None:
        """Copies device blocks to other device blocks; all are read before any is written."""
        if not moves:
            return
        places = to_device(torch.tensor(moves).T.contiguous(), self.kv.device)
        self.kv[:, :, places[1]] = self.kv[:, :, places[0]]

    def copy_in(self, moves: Items[tuple[int, int]]) -> None:
        """Copies host blocks back to device blocks."""
        if not moves:
            return
        packed = torch.empty(len(moves), *self.host.shape[1:], dtype=self.kv.dtype, device=self.kv.device)
        for row, (host_block, _) in enumerate(moves):
            packed[row].copy_(self.host[host_block], non_blocking=True)
        device_blocks = to_device(torch.tensor([target for _, target in moves]), self.kv.device)
        self.kv[:, :, device_blocks] = packed.permute(1, 2, 0, 3, 4, 5)


@dataclass(frozen=True)
class Layout:
    """Where a pass's tokens stand: the first ``decodes`` rows are sequences with one new token, then come chunks.

    slots_T: place of each token in the cache, block · P + offset; negative ones are padding and are not written.
    tables_BN, lengths_B: block table, and tokens in the cache with the new ones, of every sequence, decodes first.
    starts_B: the first row of each sequence in the pass, and the number of rows at the end.
    longest: the largest of ``lengths_B``, and widest the largest number of rows of one sequence, on the host.
    """

    slots_T: Tensor
    tables_BN: Tensor
    lengths_B: Tensor
    starts_B: Tensor
    decodes: int
    longest: int
    widest: int = 1
    host_lengths: tuple[int, ...] = ()
    host_starts: tuple[int, ...] = ()


class GatherAttend:
    """Attention by gathering each sequence's blocks into a contiguous copy: what any torch can do, on any device.

    apart: every new token is computed alone, with its own context and nothing padded to a neighbour's length, so that
    its numbers cannot depend on what else is in the pass.
    """

    def __init__(self, cache: PagedCache, layout: Layout, apart: bool = False) -> None:
        self.cache, self.layout, self.apart = cache, layout, apart
        size = cache.block_size
        self.blocks_T, self.offsets_T = layout.slots_T // size, layout.slots_T % size
        self.seen_BC: Tensor | None = None
        if layout.decodes:
            places_C = torch.arange(layout.longest, device=layout.slots_T.device)
            self.seen_BC = places_C < layout.lengths_B[: layout.decodes].unsqueeze(1)

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        keys, values = self.cache.layer(layer)
        real = self.layout.host_starts[-1]
        keys[self.blocks_T[:real], :, self.offsets_T[:real]] = k_BSKE[0, :real].to(keys.dtype)
        values[self.blocks_T[:real], :, self.offsets_T[:real]] = v_BSKE[0, :real].to(values.dtype)
        q_THE = q_BSHE[0]
        out_THE = torch.zeros_like(q_THE)
        first = 0 if self.apart else self.layout.decodes
        if first:
            out_THE[:first] = self._decode(q_THE[:first], keys, values)
        starts = self.layout.host_starts
        for row in range(first, len(self.layout.host_lengths)):
            begin, end = starts[row], starts[row + 1]
            out_THE[begin:end] = self._chunk(row, q_THE[begin:end], keys, values)
        return out_THE.unsqueeze(0)

    def _gather(self, pages: Tensor, tables: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """(rows, K, length, E) from blocks that may lie anywhere."""
        needed = -(-length // self.cache.block_size)
        found = pages[tables[:, :needed]]
        return found.permute(0, 2, 1, 3, 4).flatten(2, 3)[:, :, :length].to(dtype)

    def _decode(self, q_BHE: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert self.seen_BC is not None
        tables = self.layout.tables_BN[: self.layout.decodes]
        longest = max(self.layout.host_lengths[: self.layout.decodes])
        k_BKCE = self._gather(keys, tables, longest, q_BHE.dtype)
        v_BKCE = self._gather(values, tables, longest, q_BHE.dtype)
        q_BKGE = q_BHE.unflatten(1, (k_BKCE.shape[1], -1))
        seen_B11C = self.seen_BC[:, None, None, :longest]
        # What lies beyond a sequence's length may be another's leftovers, NaN even, and 0 · NaN is NaN.
        unseen_B1C1 = ~seen_B11C.transpose(2, 3)
        k_BKCE, v_BKCE = k_BKCE.masked_fill(unseen_B1C1, 0.0), v_BKCE.masked_fill(unseen_B1C1, 0.0)
        mask = seen_B11C.expand(-1, 1, q_BKGE.shape[2], -1)
        return F.scaled_dot_product_attention(q_BKGE, k_BKCE, v_BKCE, attn_mask=mask).flatten(1, 2)

    def _chunk(self, row: int, q_SHE: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        length, new = self.layout.host_lengths[row], q_SHE.shape[0]
        table = self.layout.tables_BN[row : row + 1]
        k_1KCE = self._gather(keys, table, length, q_SHE.dtype)
        v_1KCE = self._gather(values, table, length, q_SHE.dtype)
        if self.apart:
            return torch.cat(
                [self._attend(q_SHE[i : i + 1], k_1KCE[:, :, : length - new + i + 1], v_1KCE) for i in range(new)]
            )
        return self._attend(q_SHE, k_1KCE, v_1KCE)

    @staticmethod
    def _attend(q_SHE: Tensor, k_1KCE: Tensor, v_1KCE: Tensor) -> Tensor:
        """The last S positions of C attend to themselves and to what precedes them."""
        new, context = q_SHE.shape[0], k_1KCE.shape[2]
        v_1KCE = v_1KCE[:, :, :context]
        # Query heads of one key head are stacked as if they were positions, so that keys are read once for all.
        q_1KGSE = q_SHE.unflatten(1, (k_1KCE.shape[1], -1)).permute(1, 2, 0, 3).unsqueeze(0)
        groups = q_1KGSE.shape[2]
        mask = None
        if new > 1:
            places = torch.arange(context, device=q_SHE.device)
            seen_SC = places <= (context - new + torch.arange(new, device=q_SHE.device)).unsqueeze(1)
            mask = seen_SC.repeat(groups, 1)
        out: Tensor = F.scaled_dot_product_attention(q_1KGSE.flatten(2, 3), k_1KCE, v_1KCE, attn_mask=mask)
        out_KGSE: Tensor = out[0].unflatten(1, (groups, new))
        return out_KGSE.permute(2, 0, 1, 3).flatten(1, 2)
