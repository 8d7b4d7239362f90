"""What a forward pass keeps for backward, in bytes: the part of a step's memory that grows with the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def saved_bytes(run: Callable[[], object], weights: Iterable[torch.Tensor]) -> int:
    """Bytes of all distinct storages that autograd keeps while ``run`` computes; those of ``weights`` do not count.

    Views of one storage count once and whole, since one view keeps all of it. What is kept lives until backward, so
    that no address is given out twice meanwhile; it is not held any longer than without counting.
    """
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(kept.values())
