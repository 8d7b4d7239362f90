"""Gradients in flat buckets that leave for the other ranks as soon as they are full.

Li et al. 2020, "PyTorch Distributed", sections 3.2.3 (buckets, filled in reverse order of the parameters, since that is
about the order in which backward makes gradients) and 3.2.4 (accumulation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from impls.parallel.link import Handle, Link


def wide(dtype: torch.dtype) -> torch.dtype:
    """Gradients are summed in at least float32: over many ranks 8 bits of a mantissa are soon used up."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


@dataclass
class _Bucket:
    flat: torch.Tensor
    waiting_for: int = 0
    size: int = 0
    handle: Handle | None = None
    views: list[tuple[torch.nn.Parameter, torch.Tensor]] = field(default_factory=list)


class Buckets:
    """Sums the gradients of ``params`` over the ranks of ``link``.

        buckets.start()
        with buckets.no_sync():
            loss_of_first_micro_batch.backward()
        loss_of_last_micro_batch.backward()
        sums = buckets.finish()                # by parameter, in at least float32

    Buckets are sent in the same order on every rank, whatever the order in which they fill: collectives must match.

    capacity: bytes after which a bucket is full; a larger parameter has a bucket of its own.
    overlap: send each bucket during backward; otherwise all of them in :meth:`finish`.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], link: Link, capacity: int, overlap: bool) -> None:
        if capacity < 1:
            raise ValueError(f"a bucket needs a capacity of at least 1 byte, got {capacity}")
        self.link, self.overlap = link, overlap
        self._sync = True
        self._next = 0
        self._filled: set[torch.nn.Parameter] = set()
        self._buckets = [_make(group) for group in _groups(params, capacity)]
        self._home: dict[torch.nn.Parameter, tuple[_Bucket, torch.Tensor]] = {}
        for bucket in self._buckets:
            for param, view in bucket.views:
                self._home[param] = (bucket, view)
        self._hooks = [param.register_post_accumulate_grad_hook(self._collect) for param in params]

    def start(self) -> None:
        """Begin a step with empty buckets."""
        self._next = 0
        self._filled.clear()
        for bucket in self._buckets:
            bucket.waiting_for, bucket.handle = bucket.size, None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only collect gradients meanwhile; another micro-batch follows."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def finish(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Send what is left, wait for all, and give every parameter's summed gradient: views of the buckets."""
        self._send(everything=True)
        for bucket in self._buckets:
            assert bucket.handle is not None
            bucket.handle.wait()
        return {param: view for bucket in self._buckets for param, view in bucket.views}

    def communicate(self) -> None:
        """The messages alone, with whatever the buckets hold."""
        for handle in [self.link.all_reduce(bucket.flat) for bucket in self._buckets]:
            handle.wait()

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def _collect(self, param: torch.Tensor) -> None:
        assert isinstance(param, torch.nn.Parameter)
        bucket, view = self._home[param]
        assert param.grad is not None
        if param in self._filled:
            view.add_(param.grad)
        else:  # the first of a step overwrites what the last left: no pass over the bucket to clear it
            view.copy_(param.grad)
            self._filled.add(param)
        param.grad = None
        if self._sync:
            bucket.waiting_for -= 1
            if self.overlap:
                self._send()

    def _send(self, everything: bool = False) -> None:
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.waiting_for > 0 and not everything:
                return
            for param, view in bucket.views:
                if param not in self._filled:  # it had no part in this step's loss
                    view.zero_()
            bucket.handle = self.link.all_reduce(bucket.flat)
            self._next += 1


def _groups(params: Sequence[torch.nn.Parameter], capacity: int) -> Iterator[list[torch.nn.Parameter]]:
    group: list[torch.nn.Parameter] = []
    size = 0
    for param in reversed(params):
        nbytes = param.numel() * wide(param.dtype).itemsize
        if group and size + nbytes > capacity:
            yield group
            group, size = [], 0
        group.append(param)
        size += nbytes
    if group:
        yield group


def _make(group: Sequence[torch.nn.Parameter]) -> _Bucket:
    total = sum(param.numel() for param in group)
    flat = torch.zeros(total, dtype=wide(group[0].dtype), device=group[0].device)
    bucket = _Bucket(flat, waiting_for=len(group), size=len(group))
    offset = 0
    for param in group:
        bucket.views.append((param, flat[offset : offset + param.numel()].view_as(param)))
        offset += param.numel()
    return bucket
