"""Tokens to the ranks that hold their experts, and the results back: exact counts, nothing padded, nothing twice.

A token goes once to every rank that has one of its experts, however many it has there, with the numbers of its experts
there and the router's weights; that rank adds up what its experts give and one row comes back. So a rank of N sends at
most what an all-gather would, and less wherever a token's K experts leave some ranks out (DeepSeek-AI 2024,
"DeepSeek-V3 Technical Report", section 3.2.2, and its DeepEP send likewise; a row for every pair would be K copies).

All-to-all takes the sizes of its parts as numbers of the host. They come from the device, after an all-to-all of the
counts: one wait of the host a layer, forward only, for all chunks at once. It is the price of exactness; parts of the
largest size that could occur need no wait, and move and compute what is not there.

The exchange is its own adjoint with sender and receiver swapped: backward sends the results' gradients along the way of
the tokens, and the tokens' gradients along the way of the results.
"""

# Shapes: t tokens of this rank (of one chunk), K choices, N ranks, s rows sent and r received, D width.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from impls.parallel.link import Handle, Link
from impls.parallel.shared import split_sizes


class RowLink(Link):
    """A link that also exchanges parts of unequal sizes; their bytes are counted exactly, one's own part not."""

    def exchange_rows(self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Handle:
        """``sent[r]`` rows of x go to rank r, ``received[r]`` rows of out come from it, both in rank order.

        Muted, out is filled with rows of x, again and again where it has more.
        """
        if self.muted:
            if len(out):
                out.copy_(x[torch.arange(len(out), device=x.device) % len(x)] if len(x) else torch.zeros_like(out))
            return _Done()
        row = x[:1].nbytes if len(x) else 0
        self._count((sum(sent) - sent[self.rank]) * row * self.world)
        work = dist.all_to_all_single(out, x, list(received), list(sent), group=self.group, async_op=True)
        return _Done() if work is None else work


class _Done:
    def wait(self) -> None:
        return None


@dataclass
class Trip:
    """The way of some rows between ranks, out and back, and what is on the way."""

    link: RowLink
    sent: list[int]
    received: list[int]
    _handle: Handle | None = None
    _held: Tensor | None = None  # what is being sent must not be freed meanwhile
    _coming: Tensor | None = None

    def start(self, x: Tensor, back: bool) -> Tensor:
        """Rows (s, …) to the ranks, or rows (r, …) ``back``: what comes is there after :meth:`wait`."""
        there, here = (self.received, self.sent) if back else (self.sent, self.received)
        self._held = x.contiguous()
        self._coming = x.new_empty(sum(here), *x.shape[1:])
        self._handle = self.link.exchange_rows(self._coming, self._held, here, there)
        return self._coming

    def wait(self) -> Tensor:
        """What was started last, once it has come; on a GPU the stream waits and not the host."""
        handle, came = self._handle, self._coming
        if handle is None or came is None:
            raise RuntimeError("nothing is on its way")
        handle.wait()
        self._handle = self._held = self._coming = None
        return came


class _Depart(torch.autograd.Function):
    """Starts a trip; backward waits for the gradients that came the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: Trip, back: bool) -> Tensor:
        ctx.trip = trip
        return trip.start(x, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.trip.wait(), None, None


class _Arrive(torch.autograd.Function):
    """Waits for a trip; backward starts the gradients' own the other way, whose end :class:`_Depart` hands on."""

    @staticmethod
    def forward(ctx: Any, moving: Tensor, trip: Trip, back: bool) -> Tensor:
        trip.wait()
        ctx.trip, ctx.back = trip, back
        return moving.view_as(moving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.trip.start(grad, not ctx.back)
        return grad, None, None


class _Spread(torch.autograd.Function):
    """A row for every rank that a token goes to; backward adds their gradients up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.token_s)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return add_up(grad, ctx.plan.slots_tN), None


class _AddUp(torch.autograd.Function):
    """The sum of a token's rows; backward gives each its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return add_up(rows, plan.slots_tN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.plan.token_s), None


depart: Any = _Depart.apply
arrive: Any = _Arrive.apply
spread: Any = _Spread.apply
add_up_rows: Any = _AddUp.apply


def add_up(rows: Tensor, slots_tN: Tensor) -> Tensor:
    """out[t] = Σ_r rows[slots[t, r]], in at least float32 and in the order of ranks; a slot of -1 adds nothing."""
    tokens, ranks = slots_tN.shape
    if rows.is_cuda:
        from kernels.moe_combine import combine

        out: Tensor = combine(rows.contiguous(), slots_tN, None, tokens, ranks)
        return out
    found = torch.cat([rows, torch.zeros_like(rows[:1]) if len(rows) else rows.new_zeros(1, rows.shape[1])])
    wide = found if rows.dtype in (torch.float32, torch.float64) else found.float()
    return wide[slots_tN].sum(1).to(rows.dtype)


@dataclass
class Plan:
    """Where a chunk's tokens go, and what comes here."""

    token_s: Tensor  # of each row sent, int64, rank after rank
    slots_tN: Tensor  # the row of a token for a rank, int32, -1 where it does not go
    experts_sK: Tensor  # of each row sent the experts there, counted from that rank's first, int32, -1 for others
    sent: list[int]
    received: list[int]
    pairs: int  # of a token and an expert of this rank, among the rows that come

    def trip(self, link: RowLink) -> Trip:
        """A way for one tensor of these rows."""
        return Trip(link, self.sent, self.received)


def make_plans(
    link: RowLink, experts_tK: Tensor, experts: int, chunks: int, known: Sequence[Plan] | None
) -> list[Plan]:
    """Plans of this rank's tokens, cut into chunks; experts are spread over ranks by :func:`split_sizes`.

    known: plans made before for the same tokens, whose counts a muted link takes instead of asking.
    """
    ranks = link.world
    sizes = split_sizes(len(experts_tK), chunks)
    routes = [_route(part, experts, ranks) for part in experts_tK.split(sizes)]
    mine = torch.stack([torch.stack([route.rows_N for route in routes]), torch.stack([r.pairs_N for r in routes])])
    mine = mine.movedim(2, 0).contiguous()
    theirs = torch.empty_like(mine)  # (N, 2, chunks): rows and pairs by rank
    coming = link.all_to_all(theirs, mine)
    # All that does not hang on the counts is on the device's way before the host waits for them.
    packed = [_pack(route) for route in routes]
    coming.wait()
    counts = torch.stack([mine, theirs]).tolist()  # the one place where the host waits
    plans = []
    for chunk, (token, local, slots) in enumerate(packed):
        sent, received = ([by_rank[0][chunk] for by_rank in side] for side in counts)
        here = sum(by_rank[1][chunk] for by_rank in counts[1])
        if link.muted and known is not None:
            received, here = known[chunk].received, known[chunk].pairs
        rows = sum(sent)
        plans.append(Plan(token[:rows], slots, local[:rows], sent, received, here))
    return plans


@lru_cache(maxsize=16)
def _owners(experts: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of every rank the expert after its last, its first one, and its number: to make them anew would hold the host."""
    ends = torch.tensor(split_sizes(experts, ranks), device=device).cumsum(0)
    return ends, torch.cat([ends.new_zeros(1), ends[:-1]]), torch.arange(ranks, device=device)


@dataclass
class _Route:
    """Where a chunk's tokens go."""

    experts_tK: Tensor
    goes_tN: Tensor
    rows_N: Tensor
    pairs_N: Tensor
    owners: tuple[Tensor, Tensor, Tensor]


def _route(experts_tK: Tensor, experts: int, ranks: int) -> _Route:
    owners = ends, _, rank_N = _owners(experts, ranks, experts_tK.device)
    there_tKN = torch.searchsorted(ends, experts_tK, right=True).unsqueeze(-1) == rank_N
    goes_tN = there_tKN.any(1)
    return _Route(experts_tK, goes_tN, goes_tN.sum(0), there_tKN.sum((0, 1)), owners)


def _pack(route: _Route) -> tuple[Tensor, Tensor, Tensor]:
    """Token and experts there of each row sent, with room for all tokens to go to all ranks, and every token's rows."""
    tokens, ranks = route.goes_tN.shape
    ends, first, _ = route.owners
    flat = route.goes_tN.T.flatten()
    row = flat.cumsum(0) - 1
    # A row's place among all tokens for all ranks; those that do not go meet in one element too many.
    place = row.new_zeros(len(flat) + 1)
    place.scatter_(0, torch.where(flat, row, len(flat)), torch.arange(len(flat), device=flat.device))
    token, rank = place[:-1] % max(1, tokens), place[:-1] // max(1, tokens)
    chosen = route.experts_tK.index_select(0, token)
    there = torch.searchsorted(ends, chosen, right=True) == rank[:, None]
    local = torch.where(there, chosen - first[rank][:, None], -1).int()
    slots = torch.where(flat, row, -1).view(ranks, tokens).T.int().contiguous()
    return token, local, slots
