"""Collectives: many small messages, each waited for, against the same bytes in one message of the right size.

A message costs a latency and its bytes over the bandwidth (the alpha-beta model; Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH", section 3). P messages, each waited for, pay the latency
P times; and a message too small to fill the link never reaches its bandwidth.

    baseline      the payload in P pieces, one blocking operation for each
    optimized     the pieces lie side by side in one buffer: one operation
    asynchronous  P operations in flight at once, waited for at the end

Bytes over the link are those of :mod:`impls.parallel.link`, the same for all three. algbw is the payload over the time,
busbw that times the collective's factor (nccl-tests, doc/PERFORMANCE.md); the payload is one rank's buffer, for
all_gather the gathered one, for reduce_scatter the one before it.

Values are small whole numbers, so that sums are exact in every dtype and all results must be equal to the bit.
"""

# Shapes: N ranks, P pieces. A rank sends (P, G, n) and receives (P, H, m): G or H is N where parts go to or come from
# single ranks, else 1. Side by side in one buffer that is (G, P, n) and (H, P, m).

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from harness.pair import Claim, Context, Inputs, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.parallel.link import Handle, Link
from impls.parallel.shared import ITEMSIZE, ring_bytes

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
#: Modulus of the weights in a checksum: prime, so that a moved block changes the sum.
_WEIGHTS = 1021
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Form:
    """The shapes of one workload, as above."""

    ranks: int
    pieces: int
    sent: tuple[int, int, int]
    received: tuple[int, int, int]


def form(workload: Workload) -> Form:
    """The shapes of a workload.

    Raises:
        ValueError: an unknown operation, or a payload that does not divide into pieces and ranks.
    """
    op, ranks, pieces = workload.op, workload.ranks, workload.pieces
    if op not in OPS:
        raise ValueError(f"unknown collective {op!r}; choose one of {', '.join(OPS)}")
    unit = ITEMSIZE[workload.dtype] * pieces * ranks
    if unit <= 0 or workload.payload < unit or workload.payload % unit:
        raise ValueError(
            f"a payload of {workload.payload} B does not divide into {pieces} pieces of {workload.dtype} over {ranks} "
            f"ranks; take a multiple of {unit} B"
        )
    whole = workload.payload // (ITEMSIZE[workload.dtype] * pieces)
    part = whole // ranks
    one, parts = (pieces, 1, whole), (pieces, ranks, part)
    sent, received = {
        "all_gather": ((pieces, 1, part), parts),
        "reduce_scatter": (parts, (pieces, 1, part)),
        "all_to_all": (parts, parts),
    }.get(op, (one, one))
    return Form(ranks, pieces, sent, received)


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """``sent`` (P, G, n) of this rank, and the ``seed`` from which the oracle draws the others'."""
    return {"sent": draw(workload, ctx, ctx.rank, ctx.seed), "seed": ctx.seed}


def draw(workload: Workload, ctx: Context, rank: int, seed: int) -> torch.Tensor:
    """What that rank sends: whole numbers from -8 to 8, drawn on the device."""
    generator = torch.Generator(device=ctx.device).manual_seed(seed * 1_000_003 + rank)
    shape = form(workload).sent
    return torch.randint(-8, 9, shape, generator=generator, device=ctx.device, dtype=torch.int8).to(ctx.dtype)


class Collective:
    """What all ways share: buffers, checksums, counters. ``messages`` are the (received, sent) buffers of one run."""

    def __init__(self, workload: Workload, ctx: Context, coalesced: bool) -> None:
        self.workload, self.ctx, self.link, self.coalesced = workload, ctx, Link(), coalesced
        self.form = form(workload)
        self.sent = self._buffer(self.form.sent)
        # all_reduce works in place, as the gradients of a bucket are reduced.
        self.received = self.sent if workload.op == "all_reduce" else self._buffer(self.form.received)
        received, sent = self._canonical(self.received), self._canonical(self.sent)
        if coalesced:
            self.messages = [(self.received.flatten(), self.sent.flatten())]
        else:
            self.messages = [(r.flatten(), s.flatten()) for r, s in zip(received, sent, strict=True)]

    def _buffer(self, shape: tuple[int, int, int]) -> torch.Tensor:
        pieces, groups, size = shape
        stored = (groups, pieces, size) if self.coalesced else shape
        return torch.zeros(stored, dtype=self.ctx.dtype, device=self.ctx.device)

    def _canonical(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.transpose(0, 1) if self.coalesced else buffer

    def start(self, received: torch.Tensor, sent: torch.Tensor) -> Handle:
        """Start the workload's operation on one message."""
        link = self.link
        if self.workload.op == "all_reduce":
            return link.all_reduce(received)
        if self.workload.op == "all_gather":
            return link.all_gather(received, sent)
        if self.workload.op == "reduce_scatter":
            return link.reduce_scatter(received, sent)
        if self.workload.op == "all_to_all":
            return link.all_to_all(received, sent)
        return link.exchange(received, sent, (link.rank + 1) % link.world, (link.rank - 1) % link.world)

    def load(self, inputs: Inputs) -> None:
        """Copy in what this rank sends."""
        self._canonical(self.sent).copy_(inputs["sent"])

    def poison(self) -> None:
        """Overwrite what the next run must write."""
        self.received.fill_(float("nan"))

    def run(self) -> None:
        """Every message, each waited for before the next."""
        self.link.reset()
        for received, sent in self.messages:
            self.start(received, sent).wait()

    def result(self) -> Mapping[str, torch.Tensor]:
        """``out`` (P, H, m) of this rank, right after the first run since ``load``, and the checksums of all ranks."""
        out = self._canonical(self.received)
        mine = checksum(out)
        sums = mine.new_empty(self.link.world * 2)
        self.link.all_gather(sums, mine).wait()
        return {"out": out.reshape(-1).view(self.form.received), "sums": sums.view(-1, 2)}

    def counters(self) -> Mapping[str, float]:
        """``link_bytes`` of a run on the busiest rank, ``payload_bytes``, over which algbw is counted, ``messages``.

        A payload in one message is a point of this machine's curve of the link (:mod:`harness.link_curve`).
        """
        self.run()
        return {
            "link_bytes": self.link.most(self.link.sent, self.ctx.device),
            "payload_bytes": float(self.workload.payload),
            "messages": float(len(self.messages)),
        }


class InFlight(Collective):
    """All messages are started, then all are waited for."""

    def run(self) -> None:
        self.link.reset()
        handles = [self.start(received, sent) for received, sent in self.messages]
        for handle in handles:
            handle.wait()


class Alone:
    """The oracle: what this rank must receive, from what all ranks send; one process, no communication."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        self.workload, self.ctx = workload, ctx
        self.form = form(workload)
        self.seed = 0

    def load(self, inputs: Inputs) -> None:
        """Take the seed of what all ranks send."""
        self.seed = int(inputs["seed"])

    def run(self) -> None:
        """Nothing to time."""

    def received(self, rank: int) -> torch.Tensor:
        """What that rank must receive, (P, H, m)."""
        op, ranks = self.workload.op, self.form.ranks
        every = (draw(self.workload, self.ctx, r, self.seed) for r in range(ranks))
        if op == "send_recv":
            return draw(self.workload, self.ctx, (rank - 1) % ranks, self.seed)
        if op == "all_gather":
            return torch.cat(list(every), dim=1)
        if op == "all_to_all":
            return torch.stack([sent[:, rank] for sent in every], dim=1)
        total = next(every)
        for sent in every:
            total += sent
        return total[:, rank : rank + 1] if op == "reduce_scatter" else total

    def result(self) -> Mapping[str, torch.Tensor]:
        """As the variants'."""
        sums = torch.stack([checksum(self.received(rank)) for rank in range(self.form.ranks)])
        return {"out": self.received(0), "sums": sums}


def checksum(x: torch.Tensor) -> torch.Tensor:
    """The sum, and the sum weighted by place, float64 and exact for small whole numbers; by chunks, to stay small."""
    total = torch.zeros(2, dtype=torch.float64, device=x.device)
    flat = x.flatten()
    for begin in range(0, flat.numel(), _CHUNK):
        part = flat[begin : begin + _CHUNK].double()
        places = torch.arange(begin, begin + part.numel(), device=x.device).remainder_(_WEIGHTS).double()
        total += torch.stack([part.sum(), (part * places).sum()])
    return total


def baseline(workload: Workload, ctx: Context) -> Collective:
    """Piece by piece, each waited for."""
    return Collective(workload, ctx, coalesced=False)


def optimized(workload: Workload, ctx: Context) -> Collective:
    """One message."""
    return Collective(workload, ctx, coalesced=True)


def asynchronous(workload: Workload, ctx: Context) -> Collective:
    """Piece by piece, all in flight."""
    return InFlight(workload, ctx, coalesced=False)


def work(workload: Workload) -> Work:
    """The payload once over the link, by the ring algorithms."""
    payload = workload.payload
    sent = {"all_reduce": ring_bytes(workload.ranks, 2 * payload), "send_recv": float(payload)}
    return Work(
        bytes=2.0 * payload * workload.ranks,
        link_bytes=sent.get(workload.op, ring_bytes(workload.ranks, payload)),
        messages=1,
        collective=workload.op,
        items=payload,
        unit="B",
        reasons={
            "bytes": "each rank reads and writes its payload once",
            "link_bytes": "ring algorithms: (N-1)/N of the payload, twice for all_reduce; all of it for send_recv",
        },
    )


PAIR = Pair(
    name="collectives",
    kind="step",
    layer="system",
    relieves="link",
    claim=Claim(latency="lower", throughput="higher", cost="what is sent together must lie together"),
    inputs=inputs,
    oracle=Alone,
    variants={
        "baseline": Variant(baseline, requires=("ranks>=2",)),
        "optimized": Variant(optimized, requires=("ranks>=2",)),
        "asynchronous": Variant(asynchronous, requires=("ranks>=2",)),
    },
    work=work,
    tolerance=Tolerance(rule="exact"),
)
