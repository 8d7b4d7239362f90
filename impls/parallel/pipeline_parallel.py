"""Pipeline parallelism: a model cut into stages by rank, the whole batch through one after another, against
micro-batches that keep all ranks at work.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2;
Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", section 2.

    baseline     naive model parallelism: the whole batch goes forward through all stages, then backward; while one rank
                 computes, the others wait
    optimized    1F1B: m micro-batches; a rank goes backward on one as soon as it can, so that it keeps few of them
    gpipe        all micro-batches forward, then all backward: the same bubble, and all of them are kept
    interleaved  1F1B with v stages a rank, each 1/v as long: ranks wait 1/v as long, for more messages and activations
    torch_pipelining   torch's own ``Schedule1F1B`` over the same stages

All ways run the same stages by a schedule (:mod:`impls.parallel.pipeline_schedule`), the baseline's of one micro-batch.
A rank keeps the weights, gradients and optimizer state of its stages only, which is what a pipeline is for; that holds
of all of them. Beside that, for p ranks and stages that take equally long:

    share of the step that ranks wait     baseline (p-1)/p    1F1B, gpipe (p-1)/(m+p-1)    interleaved (p-1)/(vm+p-1)
    activations kept by rank r, batches   baseline, gpipe 1   1F1B min(p-r, m)/m
                                          interleaved min((2 (p-r-1) + (v-1) p + 1) / (v m), 1)

Work of a step is the same: six FLOPs a weight and token. A weight is read once a micro-batch instead of once a step,
which 1F1B pays where micro-batches are small. Bytes over the link: the residual stream (T D numbers, T tokens of the
batch) crosses each of the p-1 cuts once forward and its gradient once backward, so that a rank sends 2 T D numbers (at
p = 2, and at the ends, T D), the same for all but interleaved stages, which make (v p - 1) cuts.

Predicted: the naive step takes the time of all stages, one after another; 1F1B takes (m+p-1)/m of that of the slowest
stage, so that equal stages give p m/(m+p-1). Throughput rises by that and a step of the same batch is as much shorter;
one micro-batch still passes all stages, one after another, and takes as long as it ever did.

Micro-batches are equally large. Tied embeddings would lie on the first and on the last rank and are refused.
Recorded besides: :func:`impls.parallel.pipeline_stage.idleness`, and what each rank keeps for backward at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.pair import Claim, Context, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.parallel import pipeline_schedule as schedules
from impls.parallel import shared
from impls.parallel.link import Handle
from impls.parallel.pipeline_schedule import Compute, Exchange, Schedule
from impls.parallel.pipeline_stage import (
    Part,
    Staged,
    Stopwatch,
    cut,
    idleness,
    medians,
    stage_costs,
    wide_sums,
)
from impls.parallel.shared import ITEMSIZE, TrainCase

ROUNDS = 5


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """``tokens`` (B, S+1) and initial weights as ``weight.NAME``; every rank gets all of them.

    Raises:
        ValueError: rows that do not divide into micro-batches, fewer layers than ranks, or tied embeddings.
    """
    if workload.dims.get("tied"):
        raise ValueError("tied embeddings would lie on the first and on the last rank of a pipeline: set tied to false")
    rows, micro_batches = workload.batch, workload.micro_batches
    if rows < 1 or micro_batches < 1 or rows % micro_batches:
        raise ValueError(f"a batch of {rows} rows does not divide into {micro_batches} micro-batches")
    cut(workload, workload.ranks)
    return shared.train_inputs(workload, ctx)


def schedule_of(workload: Workload, variant: str) -> Schedule:
    """What the ranks do in a step of one of our variants.

    Raises:
        ValueError: a variant that is not ours.
    """
    ranks, micro_batches = workload.ranks, workload.micro_batches
    if variant == "baseline":
        return schedules.gpipe(ranks, 1)
    if variant == "gpipe":
        return schedules.gpipe(ranks, micro_batches)
    if variant == "optimized":
        return schedules.one_f_one_b(ranks, micro_batches)
    if variant == "interleaved":
        return schedules.interleaved(ranks, micro_batches, workload.chunks)
    raise ValueError(f"the schedule of {variant!r} is not ours")


def link_bytes(workload: Workload, variant: str) -> float:
    """Bytes that the busiest rank sends in a step of one of our variants."""
    schedule = schedule_of(workload, variant)
    numbers = workload.batch // schedule.micro_batches * workload.seq * workload.width
    return float(schedules.busiest_messages(schedule) * numbers * ITEMSIZE[workload.dtype])


class Alone(shared.OneProcess):
    """The oracle: one process, no stages; by micro-batches too, so that it fits where the stages are meant to be."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, ctx)
        self.collected = wide_sums(self.params, self.masters)

    def forward_backward(self) -> dict[str, Tensor]:
        for tokens in self.tokens.chunk(self.workload.micro_batches):
            loss = shared.summed_loss(self.model(tokens[:, :-1]), tokens[:, 1:])
            (loss / float(self.workload.batch * self.workload.seq)).backward()
        return self.collected()


class Pipeline(Staged):
    """A step by a schedule. One exchange is on its way at a time."""

    def __init__(self, workload: Workload, ctx: Context, variant: str) -> None:
        self.schedule = schedule_of(workload, variant)
        if wrong := schedules.faults(self.schedule):
            raise RuntimeError(f"the schedule cannot be run: {'; '.join(wrong)}")
        super().__init__(workload, ctx, self.schedule.stages)
        self.stopwatch: Stopwatch | None = None
        self._live: dict[tuple[int, int], tuple[Tensor, Any]] = {}  # a stage's input, and where its backward begins
        self._made: dict[Compute, Tensor] = {}
        self._come: dict[Compute, Tensor] = {}
        self._flight: tuple[Handle, Exchange] | None = None

    def load(self, inputs: Any) -> None:
        """Set the initial weights, forget the optimizer's state, take the batch and cut it."""
        super().load(inputs)
        self._micro_batches = self.tokens.chunk(self.schedule.micro_batches)

    def forward_backward(self) -> dict[str, Tensor]:
        for action in self.schedule.actions[self.link.rank]:
            if isinstance(action, Exchange):
                self.exchange(action)
                continue
            if any(message.source in schedules.needs(action, self.stages) for message in self._on_the_way()):
                self.settle()
            if self.stopwatch is None:
                self.compute(action)
            else:
                with self.stopwatch.time(action):
                    self.compute(action)
        self.settle()
        return self.collected()

    def compute(self, one: Compute) -> None:
        """Forward or backward of a stage on a micro-batch."""
        last = one.stage == self.stages - 1
        if one.kind == "forward":
            tokens = self._micro_batches[one.micro]
            before = Compute("forward", one.stage - 1, one.micro)
            x = self._come.pop(before).requires_grad_() if one.stage else tokens[:, :-1]
            y = self.model(one.stage, x)
            if last:
                root: Any = self.loss(y, tokens[:, 1:])
            else:
                root = torch.autograd.graph.get_gradient_edge(y)  # what was sent need not be kept for backward
                self._made[one] = y.detach()
            self._live[one.stage, one.micro] = (x, root)
            return
        x, root = self._live.pop((one.stage, one.micro))
        grad = None if last else self._come.pop(Compute("backward", one.stage + 1, one.micro))
        torch.autograd.backward((root,), (grad,))
        if one.stage:
            assert x.grad is not None
            self._made[one] = x.grad

    def exchange(self, exchange: Exchange) -> None:
        """Start it, when the one before has ended."""
        self.settle()
        rows = self.workload.batch // self.schedule.micro_batches
        shape = (rows, self.workload.seq, self.workload.width)
        parts = []
        for message in exchange.messages:
            leaves = message.sender == self.link.rank
            if leaves:
                x = self._made.pop(message.source).contiguous()
            else:
                x = self._come[message.source] = torch.empty(shape, dtype=self.ctx.dtype, device=self.ctx.device)
            parts.append((x, message.receiver if leaves else message.sender, leaves))
        self._flight = (self.link.post(parts), exchange)

    def settle(self) -> None:
        """All that was sent has left, all that comes is here."""
        if self._flight is not None:
            self._flight[0].wait()
        self._flight = None

    def _on_the_way(self) -> tuple[schedules.Message, ...]:
        return self._flight[1].messages if self._flight is not None else ()

    def watched(self) -> dict[str, float]:
        """One step, and what ranks did in it."""
        self.stopwatch = Stopwatch(self.ctx.device)

        def step() -> None:
            self.forward_backward()

        span = shared.fenced(step, self.link, self.ctx.device)
        taken = self.link.gather(self.stopwatch.seconds())
        self.stopwatch = None
        return idleness(self.schedule, span, taken)

    def measured(self) -> dict[str, float]:
        found = {"link_bytes": self.link.most(self._sent, self.ctx.device)}
        found |= medians([self.watched() for _ in range(ROUNDS)])
        chunks = self.stages // self.link.world
        found["bubble_formula"] = schedules.bubble_formula(self.link.world, self.schedule.micro_batches, chunks)
        return found | self.kept()


class _OneStage(nn.Module):
    """A part of one stage, as torch's schedule calls it."""

    def __init__(self, part: Part, stage: int) -> None:
        super().__init__()
        self.part, self.stage = part, stage

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(self.stage, x)
        return y


class TorchSchedule(Staged):
    """torch's own. It finds shapes by a first pass; its messages are not on our link."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        super().__init__(workload, ctx, workload.ranks)
        rank, module = self.link.rank, _OneStage(self.model, self.link.rank)
        stage = PipelineStage(module, rank, self.stages, ctx.device, group=self.link.group)
        self.steps = Schedule1F1B(stage, workload.micro_batches, loss_fn=self.loss, scale_grads=False)

    def forward_backward(self) -> dict[str, Tensor]:
        given = (self.tokens[:, :-1],) if self.link.rank == 0 else ()
        last = self.link.rank == self.stages - 1
        self.steps.step(*given, target=self.tokens[:, 1:] if last else None, return_outputs=False)
        return self.collected()


def baseline(workload: Workload, ctx: Context) -> TrainCase:
    """The whole batch at once."""
    return Pipeline(workload, ctx, "baseline")


def optimized(workload: Workload, ctx: Context) -> TrainCase:
    """1F1B."""
    return Pipeline(workload, ctx, "optimized")


def gpipe(workload: Workload, ctx: Context) -> TrainCase:
    """All forwards, then all backwards."""
    return Pipeline(workload, ctx, "gpipe")


def interleaved(workload: Workload, ctx: Context) -> TrainCase:
    """1F1B with several stages a rank."""
    return Pipeline(workload, ctx, "interleaved")


def interleaves(workload: Workload) -> str | None:
    """Why stages cannot be interleaved."""
    if workload.chunks < 2:
        return "stages are interleaved from 2 chunks a rank"
    try:
        schedule_of(workload, "interleaved")
        cut(workload, workload.ranks * workload.chunks)
    except ValueError as err:
        return str(err)
    return None


def torch_runs(workload: Workload) -> str | None:
    """Why torch's schedule cannot be run."""
    if workload.micro_batches < workload.ranks:
        return f"torch's 1F1B wants a micro-batch a stage: {workload.micro_batches} are fewer than {workload.ranks}"
    return None


def predict(workload: Workload) -> float:
    """Steps of stages that take as long as their FLOPs say, by the two schedules."""
    costs = stage_costs(workload, [len(layers) for layers in cut(workload, workload.ranks)])

    def step(variant: str) -> float:
        schedule = schedule_of(workload, variant)
        share = {stage: cost / schedule.micro_batches for stage, cost in enumerate(costs)}
        return schedules.makespan(schedule, lambda one: schedules.in_step(one) * share[one.stage])

    return step("baseline") / step("optimized")


def work(workload: Workload) -> Work:
    """The step of the whole batch by 1F1B."""
    return Work(
        flops=shared.train_flops(workload),
        bytes=shared.weight_traffic(workload),
        link_bytes=link_bytes(workload, "optimized"),
        messages=2 if workload.ranks > 2 else 1,
        collective="send_recv",
        items=workload.batch * workload.seq,
        unit="tokens",
        reasons={
            "flops": "6 a weight and token, attention causal",
            "bytes": "weights, gradients and moments, each on one rank, once a step; no activations",
            "link_bytes": "a rank between two others sends the residual stream on and its gradient back",
            "messages": "one each way; micro-batches are there to keep ranks at work meanwhile",
        },
    )


PAIR = Pair(
    name="pipeline_parallel",
    kind="step",
    layer="system",
    relieves="compute",
    claim=Claim(
        latency="lower",
        throughput="higher",
        memory="lower",
        communication="same",
        cost="ranks wait for (p-1)/(m+p-1) of a step, and a micro-batch passes all stages one after another as before",
    ),
    inputs=inputs,
    oracle=Alone,
    variants={
        "baseline": Variant(baseline, requires=("ranks>=2",)),
        "optimized": Variant(optimized, requires=("ranks>=2",)),
        "gpipe": Variant(gpipe, requires=("ranks>=2",)),
        "interleaved": Variant(interleaved, requires=("ranks>=2",), supports=interleaves),
        "torch_pipelining": Variant(TorchSchedule, peer="torch", requires=("ranks>=2",), supports=torch_runs),
    },
    work=work,
    tolerance=Tolerance(rule="ranks"),
    predict=predict,
    check_runs=5,
)
