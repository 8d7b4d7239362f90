"""The collectives of a group of ranks, with every byte counted that a rank sends, and a way to leave them out.

Bytes are those of the ring algorithms, which are the least for large messages (Patarasu and Yuan 2009, "Bandwidth
optimal all-reduce algorithms"; nccl-tests, doc/PERFORMANCE.md). For a buffer of S bytes on N ranks a rank sends

    all_reduce       2 (N-1)/N S        S: the buffer of one rank
    all_gather         (N-1)/N S        S: the gathered buffer
    reduce_scatter     (N-1)/N S        S: the buffer before it
    all_to_all         (N-1)/N S        S: the buffer of one rank; exact for uneven splits
    send                       S

whatever algorithm the backend takes. Counts are kept in bytes times N, as whole numbers, so that a count and a formula
agree exactly and not up to rounding.

**Muted**, no operation communicates: what would come from a peer is a copy of one's own. Values are then wrong, and
the time is that of the same step without a link. The difference of the two is the exposed communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Renamed in torch 2.13, where the old names warn.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle(Protocol):
    """Communication in flight."""

    def wait(self) -> Any: ...


class _Done:
    def wait(self) -> None:
        return None


class _All:
    def __init__(self, works: Sequence[Handle]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Link:
    """One group's collectives. Every operation starts and returns a handle; ``wait`` before the result is used.

    On a GPU ``wait`` orders the current stream after the communication and does not hold the host.

    Raises:
        ValueError: there is no process group, so there is nobody to talk to.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError("a link needs a process group: start several ranks (--ranks N)")
        self.group: Any = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.world = dist.get_world_size(self.group)
        self.muted = False
        self._sent_times_world = 0

    @property
    def sent(self) -> float:
        """Bytes that this rank has sent since the last :meth:`reset`."""
        return self._sent_times_world / self.world

    def reset(self) -> None:
        """Count from zero."""
        self._sent_times_world = 0

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Leave all communication out meanwhile."""
        self.muted = True
        try:
            yield
        finally:
            self.muted = False

    def _count(self, bytes_times_world: int) -> None:
        self._sent_times_world += bytes_times_world

    def all_reduce(self, x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Handle:
        """Reduce x over all ranks, in place."""
        if self.muted:
            return _Done()
        self._count(2 * (self.world - 1) * x.nbytes)
        return _handle(dist.all_reduce(x, op=op, group=self.group, async_op=True))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Handle:
        """out (N·n, …) = the x (n, …) of every rank, in rank order."""
        if self.muted:
            out.view(self.world, *x.shape).copy_(x)
            return _Done()
        self._count((self.world - 1) * x.nbytes * self.world)
        return _handle(_ALL_GATHER(out, x, group=self.group, async_op=True))

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> Handle:
        """out (n, …) = this rank's part of the sum of every rank's x (N·n, …)."""
        if self.muted:
            out.copy_(x.view(self.world, *out.shape)[self.rank])
            return _Done()
        self._count((self.world - 1) * x.nbytes)
        return _handle(_REDUCE_SCATTER(out, x, group=self.group, async_op=True))

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> Handle:
        """Part r of x (N·n, …) goes to rank r; out holds the parts meant for this rank, in rank order."""
        if self.muted:
            out.copy_(x)
            return _Done()
        self._count((self.world - 1) * x.nbytes)
        return _handle(dist.all_to_all_single(out, x, group=self.group, async_op=True))

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, to: int, source: int) -> Handle:
        """Send to one rank and receive from another at once (a step around a ring). Ranks count within the group.

        Raises:
            ValueError: CUDA tensors over gloo, which cannot send them.
        """
        if self.muted:
            received.copy_(sent)
            return _Done()
        if sent.is_cuda and dist.get_backend(self.group) == "gloo":
            raise ValueError("gloo sends no CUDA tensors from rank to rank: give each rank a GPU of its own (NCCL)")
        self._count(sent.nbytes * self.world)
        there, here = dist.get_global_rank(self.group, to), dist.get_global_rank(self.group, source)
        send = dist.P2POp(dist.isend, sent, there, self.group)
        receive = dist.P2POp(dist.irecv, received, here, self.group)
        return _All([_handle(work) for work in dist.batch_isend_irecv([send, receive])])

    def barrier(self) -> None:
        """All ranks go on together; not counted."""
        dist.barrier(group=self.group)

    def most(self, value: float, device: torch.device) -> float:
        """The largest of every rank's value; not counted."""
        box = torch.tensor([value], dtype=torch.float64, device=device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.group)
        return float(box.item())


def _handle(work: Any) -> Handle:
    # A backend may finish at once and give None.
    return _Done() if work is None else work


def gather_rows(link: Link, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """All ranks' rows (dimension 0) one under the other, where rank r has ``counts[r]`` of them. Not counted.

    For results and checks, not for a timed path: it pads to the longest.
    """
    longest = max(counts)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in range(link.world)]
    dist.all_gather(parts, padded, group=link.group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
