"""Overlap: a product and then the all-reduce of all of it, against chunks that travel while the next is computed.

The last product of a tensor-parallel sublayer is a sum over ranks: y = Σ_r x_r · w_rᵀ. Rows of y are independent, so
the first rows can be on the link while the next are computed (Wang et al. 2023, "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models", section 3; Jangda et al. 2022, "CoCoNet").

    baseline    the product, then one all-reduce
    optimized   chunks of rows, C at most: while chunk i travels, chunk i+1 is computed; their rows are chosen so that
                every product fills its waves beside the link's kernels (:mod:`impls.parallel.overlap_plan`)
    even        C chunks of equal rows
    async_tp    torch's symmetric-memory fused_matmul_reduce_scatter, then a gather: together an all-reduce

With T_c for the product and T_l for the link, the baseline takes T_c + T_l; chunks take at best max(T_c, T_l) plus the
last one's message, or the first one's product. Two things stand against it: a message has a price however small, and
the link's kernels hold multiprocessors that the products lack. A product runs in whole waves, so that an even chunk may
need one wave more than it had: at 8192 tokens by 4096 columns 11 for 8. Predicted by those counts, step by step; they
say that even chunks lose there, and that planned ones gain a part of what the plain T_c and T_l promise.

Recorded besides the latency: ``compute_s`` and ``comm_s``, each alone, ``step_s`` both together, and the exposed
communication, step_s - compute_s.
"""

# Shapes: T tokens, I inner width, i this rank's part of it, D width of the output.

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harness.pair import Claim, Context, Inputs, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.parallel.buckets import wide
from impls.parallel.link import Link
from impls.parallel.overlap_plan import chunk_rows, step_seconds
from impls.parallel.shared import ITEMSIZE, exposure, fenced, hidden_share, own_part, ring_bytes, split_sizes


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """``x`` (T, I) and ``w`` (D, I), whole; every rank takes its part of I.

    Raises:
        ValueError: fewer tokens than chunks, or less inner width than ranks.
    """
    if not 1 <= workload.chunks <= workload.tokens:
        raise ValueError(f"{workload.tokens} tokens cannot be cut into {workload.chunks} chunks")
    if workload.inner < workload.ranks:
        raise ValueError(f"an inner width of {workload.inner} leaves some of {workload.ranks} ranks without a part")
    return {
        "x": ctx.randn(workload.tokens, workload.inner, salt=1),
        "w": ctx.randn(workload.width, workload.inner, scale=workload.inner**-0.5, salt=2),
    }


class ProductThenSum:
    """The plain way, and what all ways share."""

    def __init__(self, workload: Workload, ctx: Context, link: Link | None = None) -> None:
        self.workload, self.ctx, self.link = workload, ctx, link or Link()
        part = split_sizes(workload.inner, self.link.world)[self.link.rank]
        self.x = torch.empty(workload.tokens, part, dtype=ctx.dtype, device=ctx.device)
        self.w = torch.empty(workload.width, part, dtype=ctx.dtype, device=ctx.device)
        self.y = torch.empty(workload.tokens, workload.width, dtype=ctx.dtype, device=ctx.device)

    def load(self, inputs: Inputs) -> None:
        """Take this rank's part of the inner width."""
        self.x.copy_(own_part(inputs["x"], 1, self.link.rank, self.link.world))
        self.w.copy_(own_part(inputs["w"], 1, self.link.rank, self.link.world))

    def poison(self) -> None:
        """Overwrite the output."""
        self.y.fill_(float("nan"))

    def run(self) -> None:
        """One product, one all-reduce."""
        self.link.reset()
        torch.mm(self.x, self.w.T, out=self.y)
        self.link.all_reduce(self.y).wait()

    def communicate(self) -> None:
        """The communication alone, on whatever lies in the output."""
        self.link.all_reduce(self.y).wait()

    def result(self) -> Mapping[str, torch.Tensor]:
        """``y`` (T, D)."""
        return {"y": self.y}

    def counters(self) -> Mapping[str, float]:
        """Bytes over the link, and seconds of computation, communication, both, and what stays exposed."""
        self.run()
        sent = self.link.most(self.link.sent, self.ctx.device)
        found = exposure(self.run, self.link.mute, self.link, self.ctx.device)
        alone = statistics.median(fenced(self.communicate, self.link, self.ctx.device) for _ in range(5))
        self.run()
        return {
            "link_bytes": sent,
            **found,
            "comm_s": alone,
            "hidden_share": hidden_share(found["exposed_comm"], alone),
        }


class Chunked(ProductThenSum):
    """Chunks of so many rows each; the link works on one while the next is computed."""

    def __init__(self, workload: Workload, ctx: Context, rows: Sequence[int], link: Link | None = None) -> None:
        super().__init__(workload, ctx, link)
        self.chunks = list(zip(self.x.split(list(rows)), self.y.split(list(rows)), strict=True))

    def run(self) -> None:
        """Start each chunk's all-reduce as soon as its product is there."""
        self.link.reset()
        handles = []
        for x, y in self.chunks:
            torch.mm(x, self.w.T, out=y)
            handles.append(self.link.all_reduce(y))
        for handle in handles:
            handle.wait()

    def communicate(self) -> None:
        """The same messages without the products."""
        handles = [self.link.all_reduce(y) for _, y in self.chunks]
        for handle in handles:
            handle.wait()


def optimized(workload: Workload, ctx: Context) -> Chunked:
    """Chunks that fill their waves."""
    return Chunked(workload, ctx, planned_rows(workload))


def even(workload: Workload, ctx: Context) -> Chunked:
    """Chunks of equal rows."""
    return Chunked(workload, ctx, split_sizes(workload.tokens, workload.chunks))


class AsyncTP(ProductThenSum):
    """torch's own, on symmetric memory; it moves bytes by copies between GPUs, which our link does not see."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        from torch.distributed import _symmetric_memory as symm_mem

        super().__init__(workload, ctx)
        self.group_name = self.link.group.group_name
        symm_mem.enable_symm_mem_for_group(self.group_name)

    def run(self) -> None:
        """Product and reduce-scatter in one, then a gather."""
        part = torch.ops.symm_mem.fused_matmul_reduce_scatter(self.x, self.w.T, "sum", 0, self.group_name)
        self.link.all_gather(self.y, part).wait()

    def counters(self) -> Mapping[str, float]:
        """None: nothing here can be left out or counted."""
        return {}


class Alone:
    """The oracle: the whole product in one process, in at least float32."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        self.y = torch.empty(0)

    def load(self, inputs: Inputs) -> None:
        """Take the whole of both."""
        self.x, self.w = (inputs[name].to(wide(inputs[name].dtype)) for name in ("x", "w"))

    def run(self) -> None:
        """One product."""
        self.y = self.x @ self.w.T

    def result(self) -> Mapping[str, torch.Tensor]:
        """``y`` (T, D)."""
        return {"y": self.y}


def tokens_divide(workload: Workload) -> str | None:
    """Why the rows cannot be scattered."""
    if workload.tokens % workload.ranks:
        return f"{workload.tokens} tokens do not divide over {workload.ranks} ranks, as a reduce-scatter needs"
    return "an inner width that does not divide" if workload.inner % workload.ranks else None


def work(workload: Workload) -> Work:
    """One product and one all-reduce of its output."""
    size = ITEMSIZE[workload.dtype]
    tokens, inner, width, ranks = workload.tokens, workload.inner, workload.width, workload.ranks
    return Work(
        flops=2.0 * tokens * inner * width,
        bytes=float(size * (tokens * inner + width * inner + ranks * tokens * width)),
        link_bytes=ring_bytes(ranks, 2 * tokens * width * size),
        items=tokens,
        unit="tokens",
        reasons={
            "flops": "two for each multiply and add",
            "bytes": "both operands read once over all ranks, the output written on each",
            "link_bytes": "2 (N-1)/N of the output",
            "messages": "one: chunks trade latency for overlap",
        },
    )


def planned_rows(workload: Workload) -> tuple[int, ...]:
    """Rows of the chunks of ``optimized``."""
    inner = split_sizes(workload.inner, workload.ranks)[0]
    return chunk_rows(workload.tokens, workload.chunks, inner, workload.width, _link_bytes_a_row(workload))


def predict(workload: Workload) -> float:
    """Waves of products and messages, one after another and overlapped, at the rates of two H200s."""

    def seconds(rows: Sequence[int]) -> float:
        inner = split_sizes(workload.inner, workload.ranks)[0]
        return step_seconds(rows, inner, workload.width, _link_bytes_a_row(workload))

    return seconds([workload.tokens]) / seconds(planned_rows(workload))


def _link_bytes_a_row(workload: Workload) -> float:
    return ring_bytes(workload.ranks, 2 * workload.width * ITEMSIZE[workload.dtype])


PAIR = Pair(
    name="overlap",
    kind="step",
    layer="system",
    relieves="link",
    claim=Claim(latency="lower", throughput="higher", communication="same", cost="smaller products and messages"),
    inputs=inputs,
    oracle=Alone,
    variants={
        "baseline": Variant(ProductThenSum, requires=("ranks>=2",)),
        "optimized": Variant(optimized, requires=("ranks>=2",)),
        "even": Variant(even, requires=("ranks>=2",)),
        "async_tp": Variant(AsyncTP, peer="torch", requires=("cuda", "ranks>=2"), supports=tokens_divide),
    },
    work=work,
    predict=predict,
    tolerance=Tolerance(rule="ranks"),
)
