"""What the ranks of a pipeline hold and share: a cut of the decoder into stages, one rank's part of it, messages from
rank to rank, and what a rank keeps for backward while it runs.

Layers are cut by what they cost, since the last stage has the head as well: that is as much as V / (4 D + 3 F) layers
(products of a token; attention over S positions adds to a layer), and one stage that is slower than the others makes
all wait for it. The embedding is a look-up and costs nothing here.
"""

# Shapes: b rows of a micro-batch, S positions, D model width, F feed-forward width, V vocabulary.

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.pair import Context
from harness.workload import Workload
from impls.model.config import ModelConfig
from impls.model.decoder import CausalAttention, Decoder
from impls.parallel import shared
from impls.parallel.link import Handle, Link
from impls.parallel.pipeline_schedule import Compute, Schedule, makespan
from impls.parallel.shared import TrainCase


def stage_costs(workload: Workload, sizes: Sequence[int]) -> list[float]:
    """Model FLOPs a token of the forward of stages of so many layers."""
    config = shared.model_config(workload)
    per_layer = shared.train_flops(workload.replace(layers=2)) - shared.train_flops(workload.replace(layers=1))
    layer = per_layer / 3 / (workload.batch * workload.seq)
    costs = [size * layer for size in sizes]
    costs[-1] += 2 * config.vocab_size * config.hidden_size
    return costs


def cut(workload: Workload, stages: int) -> list[range]:
    """The layers of each stage, so that the costliest stage costs least; every stage has one at least.

    Raises:
        ValueError: fewer layers than stages.
    """
    if workload.layers < stages:
        raise ValueError(f"{workload.layers} layers do not make {stages} stages: each needs a layer")
    sizes = [1] * stages
    for _ in range(workload.layers - stages):
        costs = stage_costs(workload, sizes)
        sizes[costs.index(min(costs))] += 1
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


class Part(nn.Module):
    """The stages that one rank holds, uninitialised; parameters have the names that they have in the whole decoder."""

    def __init__(self, config: ModelConfig, cuts: Sequence[range], stages: Sequence[int], ctx: Context) -> None:
        super().__init__()
        with torch.device("meta"):
            whole = Decoder(config)
        self.cuts, self.last = cuts, len(cuts) - 1
        self.layers = nn.ModuleDict({str(layer): whole.layers[layer] for stage in stages for layer in cuts[stage]})
        if 0 in stages:
            self.embed_tokens = whole.embed_tokens
        if self.last in stages:
            self.norm, self.lm_head = whole.norm, whole.lm_head
        self.to_empty(device=ctx.device).to(ctx.dtype)
        self.frequencies = whole.frequencies.to(ctx.device)

    def hidden(self, stage: int, x: Tensor) -> Tensor:
        """From tokens (b, S) or the residual stream (b, S, D) to the residual stream after the stage's layers, which
        the last stage normalizes."""
        batch, seq = x.shape[:2]
        angles = torch.arange(seq, device=x.device).expand(batch, seq).unsqueeze(-1).float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(x) if stage == 0 else x
        delta = None
        for layer in self.cuts[stage]:
            x, delta = self.layers[str(layer)](x, delta, cos, sin, CausalAttention())
        assert delta is not None
        y: Tensor = x + delta if stage < self.last else self.norm(x, delta)[0]
        return y

    def forward(self, stage: int, x: Tensor) -> Tensor:
        """As :meth:`hidden`, after the last stage logits (b, S, V)."""
        x = self.hidden(stage, x)
        if stage < self.last:
            return x
        logits: Tensor = self.lm_head(x)
        return logits


def stage_of(name: str, cuts: Sequence[range]) -> int:
    """The stage that holds the parameter of that name."""
    if not name.startswith("layers."):
        return 0 if name.startswith("embed_tokens.") else len(cuts) - 1
    layer = int(name.split(".")[1])
    return next(stage for stage, layers in enumerate(cuts) if layer in layers)


class _Once:
    """Messages in flight and their buffers. A receive that gloo has waited for must not be waited for again."""

    def __init__(self, works: Sequence[Any], buffers: Sequence[Tensor]) -> None:
        self._works, self._buffers = list(works), list(buffers)

    def wait(self) -> None:
        while self._works:
            self._works.pop(0).wait()
        self._buffers.clear()


class Wire(Link):
    """A link on which several messages to and from several ranks start together."""

    def post(self, messages: Iterable[tuple[Tensor, int, bool]]) -> Handle:
        """Start messages, each a tensor, the other rank, and whether it goes there (or comes from there). Muted,
        zeros come.

        Raises:
            ValueError: CUDA tensors over gloo, which cannot send them.
        """
        every = list(messages)
        if self.muted:
            for x, _, leaves in every:
                if not leaves:
                    x.zero_()
            return _Once([], [])
        if any(x.is_cuda for x, _, _ in every) and dist.get_backend(self.group) == "gloo":
            raise ValueError("gloo sends no CUDA tensors from rank to rank: give each rank a GPU of its own (NCCL)")
        self._count(self.world * sum(x.nbytes for x, _, leaves in every if leaves))
        ops = [
            dist.P2POp(dist.isend if leaves else dist.irecv, x, dist.get_global_rank(self.group, other), self.group)
            for x, other, leaves in every
        ]
        works = [work for work in dist.batch_isend_irecv(ops) if work is not None]
        return _Once(works, [x for x, _, _ in every])

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """x of that rank on every rank, in place. Not counted: for results."""
        dist.broadcast(x, src=dist.get_global_rank(self.group, source), group=self.group)
        return x

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Not counted."""
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, value, group=self.group)
        return every


class Kept:
    """Bytes of all distinct storages that autograd keeps for backward, now and at most; those of ``besides`` do not
    count. A storage counts whole, once, until the last graph that keeps a view of it is gone."""

    def __init__(self, besides: Iterable[Tensor]) -> None:
        self.now = self.most = 0
        self._besides = {x.untyped_storage().data_ptr() for x in besides}
        self._views: Counter[int] = Counter()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what forward passes keep meanwhile."""
        with torch.autograd.graph.saved_tensors_hooks(lambda x: _Held(self, x), lambda held: held.x):
            yield

    def take(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage.data_ptr() in self._besides:
            return
        if not self._views[storage.data_ptr()]:
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
        self._views[storage.data_ptr()] += 1

    def drop(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage.data_ptr() in self._besides:
            return
        self._views[storage.data_ptr()] -= 1
        if not self._views[storage.data_ptr()]:
            self.now -= storage.nbytes()


class _Held:
    def __init__(self, kept: Kept, x: Tensor) -> None:
        self.kept, self.x = kept, x.detach()  # with its history it would keep the graph that keeps it
        kept.take(self.x)

    def __del__(self) -> None:
        self.kept.drop(self.x)


class Stopwatch:
    """How long each computation takes: on a GPU between events on its stream, which wait for what the stream waits."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._marks: dict[Compute, tuple[Any, Any]] = {}

    @contextmanager
    def time(self, one: Compute) -> Iterator[None]:
        start = self._mark()
        yield
        self._marks[one] = (start, self._mark())

    def seconds(self) -> dict[Compute, float]:
        """By computation; the device must be done."""
        if self.on_gpu:
            return {one: start.elapsed_time(end) / 1e3 for one, (start, end) in self._marks.items()}
        return {one: end - start for one, (start, end) in self._marks.items()}

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def idleness(schedule: Schedule, span: float, taken: Sequence[Mapping[Compute, float]]) -> dict[str, float]:
    """What ranks did in a step that took ``span`` seconds, of which rank r computed ``taken[r]``.

    ``bubble`` is the share in which ranks do not compute, on average; ``compute_s`` the seconds in which the busiest
    rank does, and ``imbalance`` the share of them that ranks have less to do on average; ``exposed_comm`` by how much
    the step is longer than the same computations in the schedule's order, had messages taken no time.
    """
    busy = [sum(mine.values()) for mine in taken]
    every = {one: seconds for mine in taken for one, seconds in mine.items()}
    mean = statistics.fmean(busy)
    return {
        "bubble": 1 - mean / span,
        "imbalance": 1 - mean / max(busy),
        "compute_s": max(busy),
        "exposed_comm": max(0.0, span - makespan(schedule, lambda one: every[one])),
        "pipeline_s": span,
    }


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over rounds."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def wide_sums(params: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Lets gradients of many micro-batches be summed in the masters' dtype. The function gives the sums since its last
    call, by name.

    Raises (the function):
        RuntimeError: a parameter that no backward came to.
    """
    sums: dict[str, Tensor] = {}

    def collector(name: str) -> Callable[[Tensor], None]:
        def collect(param: Tensor) -> None:
            assert param.grad is not None
            grad = param.grad.to(masters[name].dtype)
            param.grad = None
            sums[name] = sums[name].add_(grad) if name in sums else grad

        return collect

    for name, param in params.items():
        param.register_post_accumulate_grad_hook(collector(name))

    def take() -> dict[str, Tensor]:
        found = {name: sums[name] for name in params if name in sums}
        sums.clear()
        if missing := sorted(set(params) - set(found)):
            raise RuntimeError(f"the step left no gradient for {', '.join(missing)}")
        return found

    return take


class Staged(TrainCase):
    """What all ways share: a rank's stages, its gradients' sums, results from all ranks, what is kept for backward."""

    link: Wire
    model: Part

    def __init__(self, workload: Workload, ctx: Context, stages: int) -> None:
        link = Wire()
        config = shared.model_config(workload)
        self.stages, self.cuts = stages, cut(workload, stages)
        part = Part(config, self.cuts, range(link.rank, stages, link.world), ctx)
        super().__init__(workload, ctx, part, link)
        self.collected = wide_sums(self.params, self.masters)
        with torch.device("meta"):
            self.shapes = {name: param.shape for name, param in Decoder(config).named_parameters()}
        link.barrier()  # NCCL wants all ranks at a group's first messages

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's share of the mean over all tokens of the batch."""
        return shared.summed_loss(logits, targets) / float(self.workload.batch * self.workload.seq)

    def owner(self, name: str) -> int:
        """The rank that holds a parameter."""
        return stage_of(name, self.cuts) % self.link.world

    def hidden(self) -> Tensor:
        x = self.tokens[:, :-1]
        shape = (*x.shape, self.workload.width)
        for stage in range(self.stages):
            source = stage % self.link.world
            y = self.model.hidden(stage, x) if source == self.link.rank else torch.empty(0)
            x = self._from(source, y, shape, self.ctx.dtype)
        return x

    def result(self) -> Mapping[str, Tensor]:
        """As every training step's, each parameter and gradient from the rank that holds it."""
        out = {}
        wide = next(iter(self.masters.values())).dtype
        for name, shape in self.shapes.items():
            grad = param = torch.empty(0)
            if name in self.masters:
                master = self.masters[name]
                assert master.grad is not None, name
                grad, param = master.grad, master.detach()
            out[f"grad.{name}"] = self._from(self.owner(name), grad, shape, wide)
            out[f"param.{name}"] = self._from(self.owner(name), param, shape, wide)
        with torch.no_grad():
            out["hidden"] = self.hidden()
        return out

    def _from(self, source: int, x: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
        """x of that rank on every rank."""
        if source != self.link.rank:
            x = torch.empty(shape, dtype=dtype, device=self.ctx.device)
        return self.link.broadcast(x.contiguous(), source)

    def kept(self) -> dict[str, float]:
        """``activation_bytes`` that the fullest rank keeps for backward at most, and ``activation_bytes_rank0`` …"""
        kept = Kept([*self.params.values(), self.tokens])
        self.release()
        with kept.watch():
            self.forward_backward()
        every = self.link.gather(float(kept.most))
        return {"activation_bytes": max(every)} | {f"activation_bytes_rank{r}": x for r, x in enumerate(every)}

    def measured(self) -> dict[str, float]:
        """What a step's own figures are."""
        return self.kept()

    def counters(self) -> Mapping[str, float]:
        """Besides :meth:`kept`, of our own schedules ``link_bytes``, ``bubble``, ``bubble_formula`` and what else
        :func:`impls.parallel.pipeline_stage.idleness` tells of forward and backward, without the optimizer's step."""
        if not self._counters:
            assert self._inputs is not None
            self._counters = self.measured()
            self.load(self._inputs)
        return self._counters
