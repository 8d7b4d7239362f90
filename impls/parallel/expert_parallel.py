"""Expert parallelism: all tokens to all ranks and a sum over ranks, against each token to the ranks of its experts.

Every rank holds T/N tokens and E/N experts of one mixture-of-experts layer (Lepikhin et al. 2020, "GShard", section 3).
A step is the layer's forward and backward, with gradients of tokens, router and experts.

    baseline    all-gather of tokens and routing, this rank's experts on all of them, reduce-scatter of the results
    optimized   counts, then each token once to every rank that has one of its experts, and one row back
                (:mod:`impls.parallel.token_exchange`)
    overlapped  the same in two chunks of tokens: while one's experts compute, the other's rows travel

Bytes over the link that a rank sends in a step, for rows of D numbers of e bytes, T tokens padded to N equal parts
(:mod:`impls.parallel.expert_bytes`):

    baseline    (N-1)/N · T · (4·D·e + K·(8 + 2e))       tokens, results and the gradients of both; experts and router
    optimized   (S + R)·(2·D + K)·e + 4·K·S + 16·C·(N-1)  S rows that it sends to other ranks, R that come from them, C
                                                         chunks; twice counts of rows and pairs, 8 bytes each

With K experts of E drawn evenly, a token goes to another rank with chance q = 1 - C(E - E/N, K) / C(E, K), and
S = R = q·T·(N-1)/N, so that the ratio is about q. Two ranks with eight of 128 experts a token: q = 0.997, nothing is
saved but what an all-to-all is faster than an all-gather; two of 8: 0.79; on eight ranks 0.67 and 0.25. Predicted from
q, the products of the busiest rank alike on both sides, and the link's rates as measured on two H200.

The experts compute alike in both, on a GPU by :mod:`kernels.moe_experts`, on a CPU by the loop over experts. A popular
expert makes its rank the slowest in either: routing is not changed, no token is dropped.
"""

# Shapes: T tokens, t = T/N of this rank, K choices, E experts, e of this rank, D width, F inner width.

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.pair import Claim, Context, Inputs, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.moe import moe_grouped_experts
from impls.moe.routing import choices_of
from impls.parallel.buckets import wide
from impls.parallel.expert_bytes import CHUNKS, link_bytes
from impls.parallel.link import Link, gather_rows
from impls.parallel.shared import ITEMSIZE, exposure, fenced, hidden_share, own_part, split_sizes
from impls.parallel.token_exchange import Plan, RowLink, add_up_rows, arrive, depart, make_plans, spread

LEARNED = ("x", "router", "gate_up", "down")
#: Ceilings seen on H200s (700 W; two of them, NV18), for the prediction: dense bfloat16 products, bus bandwidths.
PRODUCTS, ALL_GATHER, ALL_TO_ALL = 680e12, 270e9, 331e9


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """x (T, D), experts and router (T, K), gate_up (E, 2F, D), down (E, D, F) and grad (T, D); every rank gets all.

    Raises:
        ValueError: fewer experts or tokens than ranks, or a token with more experts than there are.
    """
    choices_of(workload)
    for count, what in ((workload.experts, "experts"), (workload.tokens, "tokens")):
        if count < workload.ranks:
            raise ValueError(f"{count} {what} leave some of {workload.ranks} ranks without one")
    drawn = dict(moe_grouped_experts.inputs(workload, ctx))
    return drawn | {"grad": ctx.randn(workload.tokens, workload.width, salt=5)}


def local_experts(x: Tensor, experts: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, most: int) -> Tensor:
    """This rank's part of the layer's result (rows, D). Experts count from this rank's first; others add nothing.

    most: how many pairs of a row and an expert there are at most.
    """
    if x.is_cuda:
        from kernels.moe_experts import moe_experts

        out: Tensor = moe_experts(x, experts, router, gate_up, down, most)
        return out
    out = moe_grouped_experts.plain(x, experts, router, gate_up, down)
    # Without a pair nothing depends on anything; but other ranks wait for this one's gradients.
    return out if out.requires_grad else out + (x[:0].sum() + router[:0].sum())


class _Gather(torch.autograd.Function):
    """All-gather of rows; its adjoint is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return _gather(x, link)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce(grad, ctx.link), None


class _Reduce(torch.autograd.Function):
    """Reduce-scatter of rows; its adjoint is an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return _reduce(x, link)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.link), None


def _gather(x: Tensor, link: Link) -> Tensor:
    out = x.new_empty(len(x) * link.world, *x.shape[1:])
    link.all_gather(out, x.contiguous()).wait()
    return out


def _reduce(x: Tensor, link: Link) -> Tensor:
    out = x.new_empty(len(x) // link.world, *x.shape[1:])
    link.reduce_scatter(out, x.contiguous()).wait()
    return out


_gather_rows: Any = _Gather.apply
_reduce_rows: Any = _Reduce.apply


class ExpertLayer:
    """What all ways share: this rank's tokens and experts, a step's result, counters."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        self.workload, self.ctx, self.link = workload, ctx, RowLink()
        self.token_counts = split_sizes(workload.tokens, self.link.world)
        self.expert_counts = split_sizes(workload.experts, self.link.world)
        self.held: dict[str, Tensor] = {}
        self.out = torch.empty(0)
        self.grads: dict[str, Tensor] = {}
        self._counters: dict[str, float] = {}

    def layer(self, x: Tensor, experts: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """The layer's result for this rank's tokens (t, D)."""
        raise NotImplementedError

    def communicate(self) -> None:
        """A step's communication by itself, as it was in the last run."""
        raise NotImplementedError

    def load(self, inputs: Inputs) -> None:
        """Take this rank's tokens and experts."""
        with torch.no_grad():
            for name in (*LEARNED, "experts", "grad"):
                part = own_part(inputs[name], 0, self.link.rank, self.link.world)
                self.held[name] = part.detach().clone().requires_grad_(name in LEARNED)
        self.release()

    def release(self) -> None:
        """Let the last run's results go."""
        self.out, self.grads = torch.empty(0), {}

    poison = release

    def run(self) -> None:
        """Forward and backward."""
        self.link.reset()
        self.release()
        held = self.held
        out = self.layer(held["x"], held["experts"], held["router"], held["gate_up"], held["down"])
        leaves = [held[name] for name in LEARNED]
        # An expert without a token has no part in the loop's graph; its gradient is zero.
        grads = torch.autograd.grad(out, leaves, held["grad"], allow_unused=True, materialize_grads=True)
        self.out, self.grads = out.detach(), dict(zip(LEARNED, grads, strict=True))

    def result(self) -> Mapping[str, Tensor]:
        """``out`` and ``grad.NAME``, in the global view."""
        found = {"out": gather_rows(self.link, self.out, self.token_counts)}
        for name, grad in self.grads.items():
            counts = self.token_counts if name in ("x", "router") else self.expert_counts
            found[f"grad.{name}"] = gather_rows(self.link, grad, counts)
        return found

    def counters(self) -> Mapping[str, float]:
        """``link_bytes`` of the busiest rank, seconds with and without communication and of it alone, the share of it
        that is hidden."""
        if not self._counters:
            self.run()
            found = {"link_bytes": self.link.most(self.link.sent, self.ctx.device)}
            found |= exposure(self.run, self.link.mute, self.link, self.ctx.device)
            self.run()
            alone = statistics.median(fenced(self.communicate, self.link, self.ctx.device) for _ in range(5))
            found |= {"comm_s": alone, "hidden_share": hidden_share(found["exposed_comm"], alone)}
            self._counters = found
        return self._counters


class EveryToken(ExpertLayer):
    """The plain way: every rank sees every token."""

    def layer(self, x: Tensor, experts: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Gather, this rank's experts, sum over ranks. Ranks with a token less than others fill up with none."""
        link, lacking = self.link, self.token_counts[0] - len(x)
        first = sum(self.expert_counts[: link.rank])
        filled = [torch.nn.functional.pad(value, (0, 0, 0, lacking)) for value in (x, router)]
        numbers = _gather(torch.nn.functional.pad(experts, (0, 0, 0, lacking), value=-1), link) - first
        numbers = torch.where((numbers >= 0) & (numbers < len(gate_up)), numbers, -1)
        every_x, every_router = (_gather_rows(value, link) for value in filled)
        partial = local_experts(every_x, numbers, every_router, gate_up, down, numbers.numel())
        out: Tensor = _reduce_rows(partial, link)
        return out[: len(x)]

    def communicate(self) -> None:
        """Experts, tokens, router, results; the gradients of the last three."""
        rows, width, choices = self.token_counts[0], self.workload.width, self.workload.choices
        x = torch.zeros(rows, width, dtype=self.ctx.dtype, device=self.ctx.device)
        router = x.new_zeros(rows, choices)
        gathered = [_gather(value, self.link) for value in (router.long(), x, router)]
        for value in (gathered[1], gathered[1], gathered[2]):
            _reduce(value, self.link)
        _gather(x, self.link)


class Exchanged(ExpertLayer):
    """Each token to the ranks of its experts, in chunks of which one's rows travel while another's are computed."""

    def __init__(self, workload: Workload, ctx: Context, chunks: int) -> None:
        super().__init__(workload, ctx)
        self.chunks, self.plans = chunks, list[Plan]()

    def load(self, inputs: Inputs) -> None:
        super().load(inputs)
        self.plans = []

    def layer(self, x: Tensor, experts: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Backward runs the same order in reverse, so that there too a chunk's rows travel beside the other's products:
        autograd takes first what was made last."""
        link = self.link
        plans = make_plans(link, experts, self.workload.experts, self.chunks, self.plans or None)
        self.plans = plans
        sizes = [len(plan.slots_tN) for plan in plans]
        away = []
        for plan, some_x, some_router in zip(plans, x.split(sizes), router.split(sizes), strict=True):
            trips = [plan.trip(link) for _ in range(3)]
            numbers = trips[0].start(plan.experts_sK, back=False)
            rows = [
                depart(spread(some, plan), trip, False)
                for some, trip in zip((some_router, some_x), trips[1:], strict=True)
            ]
            away.append((numbers, rows, trips))
        back = []
        for plan, (numbers, rows, trips) in zip(plans, away, strict=True):
            trips[0].wait()
            some_router, some_x = (arrive(row, trip, False) for row, trip in zip(rows, trips[1:], strict=True))
            partial = local_experts(some_x, numbers, some_router, gate_up, down, plan.pairs)
            home = plan.trip(link)
            back.append((depart(partial, home, True), home))
        outs = [add_up_rows(arrive(row, home, True), plan) for plan, (row, home) in zip(plans, back, strict=True)]
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def communicate(self) -> None:
        """Counts, experts, router, tokens, results; the gradients of the last three."""
        counts = torch.zeros(self.link.world, 2, self.chunks, dtype=torch.long, device=self.ctx.device)
        self.link.all_to_all(torch.empty_like(counts), counts).wait()
        for plan in self.plans:
            router = self.held["router"].detach().new_zeros(sum(plan.sent), self.workload.choices)
            x = router.new_zeros(sum(plan.sent), self.workload.width)
            trip = plan.trip(self.link)
            there = []
            for value in (router.int(), router, x, x):
                there.append(trip.start(value, back=False))
                trip.wait()
            for value in (there[3], there[2], there[1]):
                trip.start(value, back=True)
                trip.wait()


class Alone:
    """The oracle: the whole layer by its definition in one process, in at least float32."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        self.held: dict[str, Tensor] = {}
        self.found: dict[str, Tensor] = {}

    def load(self, inputs: Inputs) -> None:
        """Take all of everything."""
        self.held = {name: inputs[name] for name in ("experts",)}
        for name in (*LEARNED, "grad"):
            value = inputs[name].detach()
            self.held[name] = value.to(wide(value.dtype)).clone().requires_grad_(name in LEARNED)

    def run(self) -> None:
        """Forward and backward."""
        held = self.held
        out = moe_grouped_experts.oracle(held["x"], held["experts"], held["router"], held["gate_up"], held["down"])
        grads = torch.autograd.grad(out, [held[name] for name in LEARNED], held["grad"])
        self.found = {"out": out.detach()} | {f"grad.{n}": g for n, g in zip(LEARNED, grads, strict=True)}

    def result(self) -> Mapping[str, Tensor]:
        """As the variants'."""
        return self.found


def optimized(workload: Workload, ctx: Context) -> ExpertLayer:
    """All tokens at once."""
    return Exchanged(workload, ctx, CHUNKS["optimized"])


def overlapped(workload: Workload, ctx: Context) -> ExpertLayer:
    """Two chunks."""
    return Exchanged(workload, ctx, CHUNKS["overlapped"])


def work(workload: Workload) -> Work:
    """The layer's products, forward and backward, and the rows of the tokens that have an expert elsewhere."""
    size, tokens, width = ITEMSIZE[workload.dtype], workload.tokens, workload.width
    expert = 3 * width * workload.inner
    return Work(
        flops=6.0 * tokens * workload.choices * expert,
        bytes=float(size * (3 * workload.experts * expert + 5 * tokens * width)),
        link_bytes=link_bytes(workload, "optimized"),
        messages=5,
        collective="all_to_all",
        items=tokens,
        unit="tokens",
        reasons={
            "flops": "three products of 2·D·F a pair forward, six backward",
            "bytes": "the experts read forward and backward and their gradients written; tokens in and out, and again "
            "with their gradients",
            "link_bytes": "each token once to every rank expected to have one of its experts, and one row back; both "
            "again for the gradients",
            "messages": "counts, tokens, results, and the gradients of both",
        },
    )


def predict(workload: Workload) -> float:
    """Products of a rank's share and then the link, by either way's bytes; the host's wait is not counted."""
    products = work(workload).flops / workload.ranks / PRODUCTS
    plain = products + link_bytes(workload, "baseline") / ALL_GATHER
    return float(plain / (products + link_bytes(workload, "optimized") / ALL_TO_ALL))


PAIR = Pair(
    name="expert_parallel",
    kind="step",
    layer="system",
    relieves="link",
    claim=Claim(
        latency="lower",
        throughput="higher",
        communication="lower",
        cost="the host waits for the counts; tokens that have experts on every rank save nothing",
    ),
    inputs=inputs,
    oracle=Alone,
    variants={
        "baseline": Variant(EveryToken, requires=("ranks>=2",)),
        "optimized": Variant(optimized, requires=("ranks>=2",)),
        "overlapped": Variant(overlapped, requires=("ranks>=2",)),
    },
    work=work,
    predict=predict,
    tolerance=Tolerance(rule="ranks"),
)
