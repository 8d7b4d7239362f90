"""The contiguous key-value cache: for every row one block as long as the longest length it may reach.

Shape suffixes: B rows, K key-value heads, G query heads of one key-value head, S new positions, T cached positions
attended to, E width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from impls.model.config import ModelConfig
from impls.model.decoder import CausalAttention


class KVCache:
    """Keys and values of every layer, (layers, B, K, capacity, E) each, so that a head's keys lie in one stream.

    The cache keeps no lengths: the caller knows them, and says with each pass where the new positions go. A position
    is read only by positions at or after it, so that what padding leaves behind is overwritten before it is read.

        cache = KVCache(model.config, rows=4, capacity=1024, dtype=torch.float32)
        logits = model(prompt_BS, positions_BS, cache.prefill(positions_BS), last_B=lengths_B - 1)
        logits = model(token_B1, lengths_B1, cache.extend(lengths_B1, context=longest + 1))

    Raises:
        ValueError: rows or capacity below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if rows < 1 or capacity < 1:
            raise ValueError(f"a cache needs at least one row and one position, got {rows} rows of {capacity}")
        shape = (config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim)
        self._hold(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def _hold(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v
        self.rows, self.capacity = k.shape[1], k.shape[3]
        self._rows_B1 = torch.arange(self.rows, device=k.device).unsqueeze(1)

    @property
    def nbytes(self) -> int:
        """Bytes reserved for keys and values."""
        return self.k.nbytes + self.v.nbytes

    def rows_of(self, start: int, stop: int) -> KVCache:
        """The same memory seen as a cache of rows `start` to `stop` - 1, e.g. to prefill one row among others."""
        if not 0 <= start < stop <= self.rows:
            raise ValueError(f"rows {start}:{stop} are not within the cache's {self.rows} rows")
        view = object.__new__(KVCache)
        view._hold(self.k[:, start:stop], self.v[:, start:stop])
        return view

    def prefill(self, positions_BS: Tensor) -> _Prefill:
        """An `Attend` for rows that are empty: positions_BS is 0 to S-1 in each row; attends to the new keys alone."""
        self._check(positions_BS, positions_BS.shape[1])
        return _Prefill(self, positions_BS)

    def extend(self, positions_BS: Tensor, context: int | None = None) -> _Extend:
        """An `Attend` for rows that hold something already: one new token each, or a chunk.

        Args:
            positions_BS: place of each new token in its row; may differ from row to row.
            context: cached positions to look at, more than the largest position; the whole capacity when left out.
                It is a host number, so that nothing is read back from the device: a caller that replays a CUDA graph
                keeps it fixed, others pass the longest length to read no more than they must.

        Raises:
            ValueError: `context` is longer than the cache, or the batch is another than the cache's.
        """
        context = self.capacity if context is None else context
        self._check(positions_BS, context)
        return _Extend(self, positions_BS, context)

    def write(self, layer: int, k_BSKE: Tensor, v_BSKE: Tensor, positions_BS: Tensor) -> None:
        """Put new keys and values in their places."""
        self.k[layer].transpose(1, 2)[self._rows_B1, positions_BS] = k_BSKE.to(self.k.dtype)
        self.v[layer].transpose(1, 2)[self._rows_B1, positions_BS] = v_BSKE.to(self.v.dtype)

    def _check(self, positions_BS: Tensor, context: int) -> None:
        if positions_BS.shape[0] != self.rows:
            raise ValueError(f"{positions_BS.shape[0]} rows given to a cache of {self.rows}")
        if not 1 <= context <= self.capacity:
            raise ValueError(f"a context of {context} does not fit the cache's capacity of {self.capacity}")


class _Prefill(CausalAttention):
    def __init__(self, cache: KVCache, positions_BS: Tensor) -> None:
        self.cache, self.positions_BS = cache, positions_BS

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        self.cache.write(layer, k_BSKE, v_BSKE, self.positions_BS)
        return super().__call__(layer, q_BSHE, k_BSKE, v_BSKE)


class _Extend:
    def __init__(self, cache: KVCache, positions_BS: Tensor, context: int) -> None:
        self.cache, self.positions_BS, self.context = cache, positions_BS, context
        self.mask: Tensor | None = None

    def _added_mask(self, layer: int, groups: int, dtype: torch.dtype) -> Tensor:
        """0 where a query sees a position and -inf where not, (B, 1, G S, T): made by the first layer, used by all.

        Made anew in every pass, since a replayed graph changes the positions in place.
        """
        if layer == 0 or self.mask is None:
            places_T = torch.arange(self.context, device=self.positions_BS.device)
            hidden_BST = places_T > self.positions_BS.unsqueeze(-1)
            bias_BST = torch.zeros(hidden_BST.shape, dtype=dtype, device=hidden_BST.device)
            bias_BST.masked_fill_(hidden_BST, float("-inf"))
            self.mask = bias_BST[:, None, None].expand(-1, 1, groups, -1, -1).flatten(2, 3)
        return self.mask

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        self.cache.write(layer, k_BSKE, v_BSKE, self.positions_BS)
        k_BKTE = self.cache.k[layer, :, :, : self.context].to(q_BSHE.dtype)
        v_BKTE = self.cache.v[layer, :, :, : self.context].to(q_BSHE.dtype)
        rows, new, heads, width = q_BSHE.shape
        groups = heads // k_BKTE.shape[1]
        # The query heads that share a key head are stacked as if they were positions: the cache is read once for all
        # of them, and never repeated in memory.
        q_BKGSE = q_BSHE.view(rows, new, -1, groups, width).permute(0, 2, 3, 1, 4)
        mask = self._added_mask(layer, groups, q_BSHE.dtype)
        out = F.scaled_dot_product_attention(q_BKGSE.flatten(2, 3), k_BKTE, v_BKTE, attn_mask=mask)
        return out.view(rows, -1, groups, new, width).permute(0, 3, 1, 2, 4).reshape(rows, new, heads, width)
