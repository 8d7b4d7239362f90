"""Data parallelism: all-reduce each gradient after the backward pass, against buckets that travel during it.

Every rank holds the whole model and some rows of the batch; gradients are summed over ranks (Li et al. 2020, "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", sections 3.2.2 to 3.2.4).

    baseline    backward, then one blocking all-reduce a parameter; again for every micro-batch
    optimized   gradients are added into flat float32 buckets in the order in which backward makes them; a full bucket
                leaves at once, while backward goes on; under accumulation only after the last micro-batch (``no_sync``)
    coalesced   the same buckets, but sent only when backward has ended: what overlap adds is the difference
    ddp         torch's DistributedDataParallel with the same size of bucket

Bytes over the link: 2 (N-1)/N of the gradients, once a step. A micro-batch more costs the baseline that again.
Predicted: the step of one process on its own rows, plus what of the communication backward is too short to hide. More
ranks raise throughput; the latency of a step on the same rows does not fall.

Rows need not divide over ranks: losses are summed and divided by all tokens, so that sums over ranks are right.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from harness.pair import Claim, Context, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.parallel import shared
from impls.parallel.buckets import Buckets, wide
from impls.parallel.link import Link, gather_rows
from impls.parallel.shared import TrainCase, fenced, hidden_share, ring_bytes


def inputs(workload: Workload, ctx: Context) -> dict[str, Any]:
    """Tokens and initial weights; every rank gets all of them.

    Raises:
        ValueError: fewer rows than ranks times micro-batches.
    """
    least = workload.ranks * workload.micro_batches
    if workload.batch < least:
        raise ValueError(
            f"{workload.batch} rows are too few for {workload.ranks} ranks of {workload.micro_batches} micro-batches: "
            f"each needs a row, so at least {least}"
        )
    return shared.train_inputs(workload, ctx)


class DataParallel(TrainCase):
    """What all ways share: this rank's rows, its micro-batches, the loss."""

    link: Link

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, ctx, shared.empty_model(shared.model_config(workload), ctx), Link())
        self.rows = shared.split_sizes(workload.batch, self.link.world)

    def own_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        return shared.own_part(tokens, 0, self.link.rank, self.link.world)

    def micro_batches(self) -> list[torch.Tensor]:
        return list(self.tokens.split(shared.split_sizes(len(self.tokens), self.workload.micro_batches)))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """This micro-batch's share of the mean over all ranks' tokens."""
        logits = self.model(tokens[:, :-1])
        return shared.summed_loss(logits, tokens[:, 1:]) / float(self.workload.batch * self.workload.seq)

    def communicate(self) -> None:
        """A step's communication by itself."""
        raise NotImplementedError

    def counters(self) -> Mapping[str, float]:
        """Besides those of every step ``comm_s``, its communication alone, and ``hidden_share``, what of it backward
        hides. ``compute_s`` is the step of one process on its own rows: over ``step_s`` it is the scaling efficiency,
        ``scaling``, and never above what it is alone: latency does not fall."""
        if "comm_s" not in self._counters:
            found = dict(super().counters())
            alone = statistics.median(fenced(self.communicate, self.link, self.ctx.device) for _ in range(5))
            found |= {
                "comm_s": alone,
                "hidden_share": hidden_share(found["exposed_comm"], alone),
                "scaling": found["compute_s"] / found["step_s"],
            }
            self._counters = found
        return self._counters

    def hidden(self) -> torch.Tensor:
        return gather_rows(self.link, shared.plain_hidden(self.model, self.tokens[:, :-1]), self.rows)


class AfterBackward(DataParallel):
    """The plain way."""

    def forward_backward(self) -> dict[str, torch.Tensor]:
        sums: dict[str, torch.Tensor] = {}
        for tokens in self.micro_batches():
            self.loss(tokens).backward()
            for name, param in self.params.items():
                assert param.grad is not None
                grad = param.grad.to(wide(param.dtype))
                self.link.all_reduce(grad).wait()
                sums[name] = sums[name].add_(grad) if name in sums else grad
                param.grad = None
        return sums

    def communicate(self) -> None:
        for _ in range(self.workload.micro_batches):
            for master in self.masters.values():
                self.link.all_reduce(torch.zeros_like(master)).wait()


class Bucketed(DataParallel):
    """The fast way; ``overlap`` sends a bucket when it is full, otherwise all are sent at the end."""

    def __init__(self, workload: Workload, ctx: Context, overlap: bool) -> None:
        super().__init__(workload, ctx)
        self.buckets = Buckets(list(self.params.values()), self.link, workload.bucket_kib * 1024, overlap)

    def forward_backward(self) -> dict[str, torch.Tensor]:
        self.buckets.start()
        micro_batches = self.micro_batches()
        for number, tokens in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            with nullcontext() if last else self.buckets.no_sync():
                self.loss(tokens).backward()
        sums = self.buckets.finish()
        return {name: sums[param] for name, param in self.params.items()}

    def communicate(self) -> None:
        self.buckets.communicate()

    def close(self) -> None:
        self.buckets.close()


class TorchDDP(DataParallel):
    """torch's own. It averages over ranks where ours sums; its reducer is C++, so its bytes are not counted here."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, ctx)
        for param in self.params.values():
            torch.nn.init.zeros_(param)  # it compares and sends them when it is made
        self.ddp = torch.nn.parallel.DistributedDataParallel(
            self.model, bucket_cap_mb=workload.bucket_kib / 1024, gradient_as_bucket_view=True
        )
        self._silent = False

    def forward_backward(self) -> dict[str, torch.Tensor]:
        micro_batches = self.micro_batches()
        for number, tokens in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            with self.ddp.no_sync() if self._silent or not last else nullcontext():
                logits = self.ddp(tokens[:, :-1])
                tokens_in_all = self.workload.batch * self.workload.seq
                loss = shared.summed_loss(logits, tokens[:, 1:]) * self.link.world / tokens_in_all
                loss.backward()
        return self.own_grads()

    def quiet(self) -> Any:
        stack = ExitStack()
        self._silent = True
        stack.callback(setattr, self, "_silent", False)
        return stack

    def counters(self) -> Mapping[str, float]:
        found = TrainCase.counters(self)
        return {k: v for k, v in found.items() if k != "link_bytes"}


def optimized(workload: Workload, ctx: Context) -> TrainCase:
    """Buckets, overlapped."""
    return Bucketed(workload, ctx, overlap=True)


def coalesced(workload: Workload, ctx: Context) -> TrainCase:
    """Buckets, after backward."""
    return Bucketed(workload, ctx, overlap=False)


def work(workload: Workload) -> Work:
    """The step of the whole batch; gradients cross the link once, in at least float32."""
    gradients = shared.model_config(workload).parameters * shared.wide_size(workload.dtype)
    return Work(
        flops=shared.train_flops(workload),
        bytes=workload.ranks * shared.weight_traffic(workload),
        link_bytes=ring_bytes(workload.ranks, 2 * gradients),
        items=workload.batch * workload.seq,
        unit="tokens",
        reasons={
            "flops": "6 a weight and token, attention causal",
            "bytes": "each rank's weights, gradients and moments; no activations",
            "link_bytes": "2 (N-1)/N of the gradients, in at least float32",
            "messages": "one: what is sent in buckets is sent so to hide it",
        },
    )


PAIR = Pair(
    name="data_parallel",
    kind="step",
    layer="system",
    relieves="link",
    claim=Claim(
        latency="same",
        throughput="higher",
        cost="every rank holds all weights, gradients and moments; a step on the same rows is not shorter",
    ),
    inputs=inputs,
    oracle=shared.oracle,
    variants={
        "baseline": Variant(AfterBackward, requires=("ranks>=2",)),
        "optimized": Variant(optimized, requires=("ranks>=2",)),
        "coalesced": Variant(coalesced, requires=("ranks>=2",)),
        "ddp": Variant(TorchDDP, peer="torch", requires=("ranks>=2",)),
    },
    work=work,
    tolerance=Tolerance(rule="ranks"),
    check_runs=5,
)
