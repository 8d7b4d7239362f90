"""ZeRO: every rank keeps all weights, gradients and optimizer state, against every rank keeps its part of them.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 3 to 5 and 7.
All ways are data parallel: every rank computes some rows of the batch with the whole model.

    baseline    all-reduce of gradient buckets during backward, the whole AdamW step on every rank (section 3.1)
    stage1      each rank keeps the moments, and in 16 bits the float32 weights, of its part of every bucket (P_os):
                reduce-scatter of gradients, AdamW on the own part, all-gather of weights
    optimized   stage 2: besides, a bucket's gradients live until they are summed, then the own part only (P_os+g)
    stage3      weights too (P_os+g+p): a layer is gathered before its forward and again before its backward, one
                layer ahead, and freed after use
    fsdp2       torch's own ``fully_shard`` of each layer and of the rest

Memory of a rank for model states (section 3.1; section 5, figure 1), P numbers of e bytes, in w bytes at least float32.
Gradients are summed in w bytes here where the paper has 2, and K = 2w for the moments, in 16 bits w more for weights:

    baseline   (e + w + K) P          stage1  (e + w) P + K P/N
    optimized  e P + (w + K) P/N      stage3  (e + w + K) P/N          float32: e and own weights are one

Beside that for a moment: buckets of gradients being filled and sent, in stage 3 two layers' weights, and activations,
which are those of the baseline. The paper's 2, 2 and K = 12 in 16 bits are (2 + 4 + 12) bytes here.

Bytes over the link a step and rank (section 7), for P padded so that units divide over ranks:

    baseline   (N-1)/N · 2w P         stages 1 and 2   (N-1)/N · (w + e) P       stage3  (N-1)/N · (w + 2e) P

In float32 that is 2P, 2P and 3P numbers, as in the paper. In 16 bits gradients travel in float32 and weights do not:
4P, 3P and 4P numbers of 2 bytes. Stage 3 gathers every unit twice, as the paper counts it; the embedding's backward
would need no weights, and the head's follows its forward at once. A tied embedding is gathered at both of its uses and
stays from the second on: twice as well.

Predicted: memory as above. The step is not shorter: the same products and bytes, and the all-gather after the step is
hidden by nothing but the next bucket's AdamW. What it saves is AdamW's traffic, of which 1/N is left; that shows only
where rows are few. One batch a step: under accumulation stage 2 would sum every micro-batch's gradients over ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.pair import Claim, Context, Inputs, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.model.decoder import Decoder
from impls.parallel import shared
from impls.parallel.buckets import Buckets, wide
from impls.parallel.data_parallel import DataParallel
from impls.parallel.link import Link, gather_rows
from impls.parallel.shared import ITEMSIZE, TrainCase, adamw, wide_size
from impls.parallel.zero_units import (
    Travel,
    Unit,
    adopt,
    bucket_bytes,
    config_of,
    held_bytes,
    link_bytes,
    meta_decoder,
    state_formula,
    units_of,
)

STEPS = 5


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """``tokens`` (B, S+1) and initial weights as ``weight.NAME``; every rank gets all of them.

    Raises:
        ValueError: fewer rows than ranks.
    """
    if workload.batch < workload.ranks:
        raise ValueError(f"{workload.batch} rows are too few for {workload.ranks} ranks: each needs a row")
    config = config_of(workload)
    shape = (workload.batch, workload.seq + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=ctx.generator(1)).to(ctx.device)
    return {**shared.draw_weights(config, ctx), "tokens": tokens}


def whole_decoder(workload: Workload, ctx: Context) -> Decoder:
    """All of the model, uninitialised."""
    model = shared.empty_model(config_of(workload), ctx)
    if model.config.tie_word_embeddings:  # moving it off the meta device has made two of the one
        model.lm_head.weight = model.embed_tokens.weight
    return model


class Alone(shared.OneProcess):
    """The oracle: the whole step in one process."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        TrainCase.__init__(self, workload, ctx, whole_decoder(workload, ctx), None)
        self.losses: deque[Tensor] = deque(maxlen=STEPS)

    def load(self, inputs: Inputs) -> None:
        super().load(inputs)
        self.losses.clear()

    def forward_backward(self) -> dict[str, Tensor]:
        logits = self.model(self.tokens[:, :-1])
        loss = shared.summed_loss(logits, self.tokens[:, 1:]) / logits.shape[:-1].numel()
        loss.backward()
        self.losses.append(loss.detach())
        return self.own_grads()

    def result(self) -> Mapping[str, Tensor]:
        """As every training step's, and the ``losses`` of the last steps."""
        return {**super().result(), "losses": torch.stack(list(self.losses))}


class Zero(DataParallel):
    """What all ways share: this rank's rows, the losses, the bytes that it keeps."""

    variant = ""

    def __init__(self, workload: Workload, ctx: Context, model: torch.nn.Module) -> None:
        TrainCase.__init__(self, workload, ctx, model, Link())  # DataParallel's own model has no tied embeddings
        self.rows = shared.split_sizes(workload.batch, self.link.world)
        self.losses: deque[Tensor] = deque(maxlen=STEPS)

    def load(self, inputs: Inputs) -> None:
        super().load(inputs)
        self.losses.clear()

    def backward(self) -> None:
        """Forward, and backward of this rank's share of the loss."""
        loss = self.loss(self.tokens)
        loss.backward()
        self.losses.append(loss.detach())

    def result(self) -> Mapping[str, Tensor]:
        """As every training step's, and the ``losses`` of the last steps, of all rows."""
        mine = torch.stack(list(self.losses)).unsqueeze(0)
        return {**super().result(), "losses": gather_rows(self.link, mine, [1] * self.link.world).sum(0)}

    def held(self) -> float:
        """``state_bytes``: weights, gradients and optimizer state that the fullest rank keeps after a step, found by a
        walk over all tensors of the case."""
        assert self._inputs is not None
        self.load(self._inputs)
        self.run()
        found = held_bytes(self, self._inputs.values())
        self.load(self._inputs)
        return self.link.most(found, self.ctx.device)

    def counters(self) -> Mapping[str, float]:
        """Besides those of every data-parallel step ``state_bytes`` (:meth:`held`) and ``state_formula``, what the
        paper's formula says of it."""
        if "state_bytes" not in self._counters:
            found = dict(super().counters())
            found |= {"state_bytes": self.held(), "state_formula": state_formula(self.workload, self.variant)}
            self._counters = found
        return self._counters


class Replicas(Zero):
    """The plain way."""

    variant = "baseline"

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, ctx, whole_decoder(workload, ctx))
        self.buckets = Buckets(list(self.params.values()), self.link, bucket_bytes(workload), overlap=True)

    def forward_backward(self) -> dict[str, Tensor]:
        self.buckets.start()
        self.backward()
        sums = self.buckets.finish()
        return {name: sums[param] for name, param in self.params.items()}

    def communicate(self) -> None:
        self.buckets.communicate()

    def close(self) -> None:
        self.buckets.close()


class Sharded(Zero):
    """Stages 1 and 2: units are buckets, weights are whole on every rank."""

    def __init__(self, workload: Workload, ctx: Context, variant: str, stage: int) -> None:
        model = meta_decoder(workload, ctx.dtype)
        super().__init__(workload, ctx, model)
        self.variant, self.masters = variant, {}
        groups = units_of(workload, variant)
        self.units = [Unit({n: self.params[n] for n in names}, self.link, ctx.device, stage) for names in groups]
        adopt(model, self.units)
        self.params = dict(model.named_parameters())
        model.frequencies = model.frequencies.to(ctx.device)
        self._sent_last: Unit | None = None
        for unit in self.units:
            unit.full = self.send

    def load(self, inputs: Inputs) -> None:
        """Set the initial weights, forget the optimizer's state, take the batch."""
        self._inputs = inputs
        with torch.no_grad():
            for unit in self.units:
                unit.load({name: inputs[f"weight.{name}"] for name in unit.shapes})
        self.optimizers = [torch.optim.AdamW([unit.master], **adamw(self.ctx.dtype)) for unit in self.units]
        self.release()
        self.tokens = self.own_tokens(inputs["tokens"])
        self.losses.clear()

    def send(self, unit: Unit) -> None:
        """Backward has made all gradients of the unit: sum them while it goes on. One message is on its way at a time,
        so that no more than it and the unit being filled are kept."""
        if self._sent_last is not None:
            self._sent_last.settle()
        unit.scatter()
        self._sent_last = unit

    def run(self) -> None:
        """One step; a unit's new weights travel while AdamW makes the next one's. In stage 3 they travel when used."""
        self.link.reset()
        self.release()
        self.backward()
        before: Unit | None = None
        for unit, optimizer in zip(self.units, self.optimizers, strict=True):
            unit.settle()
            optimizer.step()
            unit.stepped()
            if unit.stage < 3:
                unit.start()
                if before is not None:
                    before.gather()
                before = unit
        if before is not None:
            before.gather()
        self._sent_last = None
        if not self.link.muted:
            self._sent = self.link.sent

    def release(self) -> None:
        """Free the gradients of the last step."""
        for unit in self.units:
            unit.master.grad = None

    def result(self) -> Mapping[str, Tensor]:
        """``hidden`` of the batch after the step, ``grad.NAME`` and ``param.NAME`` whole, and the ``losses``."""
        out: dict[str, Tensor] = dict(super().result())
        for unit in self.units:
            if unit.master.grad is None:
                raise RuntimeError(f"the step left no gradient for {', '.join(unit.shapes)}")
            out |= {f"grad.{name}": x for name, x in unit.whole(unit.master.grad).items()}
            out |= {f"param.{name}": x for name, x in unit.whole(unit.master).items()}
        return out

    def communicate(self) -> None:
        for unit in self.units:
            unit.communicate()


class ShardedWeights(Sharded):
    """Stage 3: units are layers, and their weights are whole only while they are used."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, ctx, "stage3", 3)
        model = self.model
        assert isinstance(model, Decoder)
        embed, *layers, head = self.units
        uses: list[tuple[Unit, torch.nn.Module, torch.nn.Module]] = [(embed, model.embed_tokens, model.embed_tokens)]
        uses += [(unit, layer, layer) for unit, layer in zip(layers, model.layers, strict=True)]
        if model.config.tie_word_embeddings:
            uses += [(head, model.norm, model.norm), (embed, model.lm_head, model.lm_head)]
        else:
            uses += [(head, model.norm, model.lm_head)]
        self.travel = Travel(uses)

    def send(self, unit: Unit) -> None:
        super().send(unit)
        unit.free()

    def hidden(self) -> Tensor:
        states = super().hidden()
        self.travel.end()  # the head came and was not used
        return states


class FullyShard(Zero):
    """torch's own. In 16 bits it keeps float32 shards and casts what it gathers. Its bytes are not counted here."""

    variant = "fsdp2"

    def __init__(self, workload: Workload, ctx: Context) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        if ctx.mesh is None:
            raise ValueError("fully_shard needs a mesh: start several ranks (--ranks N)")
        model = whole_decoder(workload, replace(ctx, dtype=wide(ctx.dtype)))
        policy = MixedPrecisionPolicy(param_dtype=ctx.dtype, reduce_dtype=wide(ctx.dtype))
        for part in (*model.layers, model):
            fully_shard(part, mesh=ctx.mesh, mp_policy=policy)
        register_fsdp_forward_method(model, "hidden")
        super().__init__(workload, ctx, model)

    def load(self, inputs: Inputs) -> None:
        """As every training step's, each weight cut as its parameter is."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        weights = {}
        for name, param in self.params.items():
            assert isinstance(param, DTensor)
            whole = inputs[f"weight.{name}"].to(param.dtype)
            weights[f"weight.{name}"] = distribute_tensor(whole, param.device_mesh, param.placements)
        super().load(Inputs({**weights, "tokens": inputs["tokens"]}, inputs.seed))
        self._inputs = inputs

    def loss(self, tokens: Tensor) -> Tensor:
        """It averages over ranks where ours sum."""
        return super().loss(tokens) * self.link.world

    def forward_backward(self) -> dict[str, Tensor]:
        self.backward()
        self.losses.append(self.losses.pop() / self.link.world)
        return self.own_grads()

    def hidden(self) -> Tensor:
        states = super().hidden()
        assert isinstance(self.model, Decoder)
        # The rest of the model waits, whole, for a backward that does not come; the next weights would not be seen.
        self.model.reshard()  # type: ignore[operator]
        return states

    def _whole(self, name: str, part: Any) -> Tensor:
        whole: Tensor = part.full_tensor()
        return whole

    def counters(self) -> Mapping[str, float]:
        """``state_bytes``; its messages are not on our link."""
        if not self._counters:
            self._counters = {"state_bytes": self.held()}
        return self._counters


def stage1(workload: Workload, ctx: Context) -> TrainCase:
    """Optimizer state sharded."""
    return Sharded(workload, ctx, "stage1", 1)


def optimized(workload: Workload, ctx: Context) -> TrainCase:
    """Optimizer state and gradients sharded."""
    return Sharded(workload, ctx, "optimized", 2)


def work(workload: Workload) -> Work:
    """The step of the whole batch by stage 2."""
    size, wide_bytes = ITEMSIZE[workload.dtype], wide_size(workload.dtype)
    own_weights = size if size == wide_bytes else 2 * wide_bytes
    gradients = 3 * size + 2 * wide_bytes
    return Work(
        flops=shared.train_flops(workload),
        bytes=float(config_of(workload).parameters * (workload.ranks * gradients + own_weights + 4 * wide_bytes)),
        link_bytes=link_bytes(workload, "optimized"),
        messages=2,
        collective="all_reduce",
        items=workload.batch * workload.seq,
        unit="tokens",
        reasons={
            "flops": "6 a weight and token, attention causal",
            "bytes": "each rank's weights and gradients, and moments once in all; no activations",
            "link_bytes": "(N-1)/N of the gradients, in at least float32, and of the weights",
            "messages": "one of gradients, one of weights; buckets are there to hide them",
        },
    )


PAIR = Pair(
    name="zero",
    kind="step",
    layer="system",
    relieves="capacity",
    claim=Claim(
        latency="same",
        memory="lower",
        communication="same",
        cost="new weights travel after the step; in stage 3 half as much again does, and waits before every layer",
    ),
    inputs=inputs,
    oracle=Alone,
    variants={
        "baseline": Variant(Replicas, requires=("ranks>=2",)),
        "optimized": Variant(optimized, requires=("ranks>=2",)),
        "stage1": Variant(stage1, requires=("ranks>=2",)),
        "stage3": Variant(ShardedWeights, requires=("ranks>=2",)),
        "fsdp2": Variant(FullyShard, peer="torch", requires=("ranks>=2",)),
    },
    work=work,
    tolerance=Tolerance(rule="ranks"),
    check_runs=STEPS,
)
