"""Bytes of the tensors that are alive, counted operation by operation: a CPU has no allocator to ask."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """``now`` and ``peak`` bytes of all storages made while it is active, in bytes.

    A storage counts once and whole, whatever views of it there are, from the operation that makes it until nothing
    refers to it. Scratch memory inside an operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)


class Allocated:
    """The same of a GPU, where the caching allocator counts: ``now`` and ``peak`` above what there was on entry."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> Allocated:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *exc: object) -> None:
        torch.cuda.synchronize(self.device)

    @property
    def now(self) -> int:
        return int(torch.cuda.memory_allocated(self.device)) - self._before

    @property
    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device)) - self._before


def live_bytes(device: torch.device) -> LiveBytes | Allocated:
    """What counts on this device; a context manager."""
    return Allocated(device) if device.type == "cuda" else LiveBytes()
