"""Activation checkpointing: keep all that forward computes for backward, against make the cheap part of it again.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4; Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 5.

    baseline            keep everything
    optimized           of each layer keep its input and the outputs of products and of attention, and make norms and
                        the gate again, which are large to keep and cheap to make: two autograd functions a layer, whose
                        backward makes them on its way (:mod:`impls.training.lean_layer`), on a GPU in fused kernels
    gate_up_again       besides, keep neither gate nor up: two of seven products again, for most of what was left
    selective_eager     the optimized choice by torch's selective checkpointing: its policy is asked in Python
    selective_compile   the same policy in torch's compiler, which asks when it compiles
    full                keep each layer's input and compute the layer again
    every_other         ``full`` for the first, third, ... layer, everything of the others
    offload             torch's save_on_cpu: everything in pinned host memory, there and back over the host link
    torch_compile       each layer compiled: what is between the products is fused, and of it the compiler's partition
                        of forward and backward keeps what is dear to make again and makes the rest again, unasked
    torch_compile_half  the same with torch's knob for it, ``activation_memory_budget``, at half

Bytes a token and layer in 16 bits, for D model, Q query, G key and F feed-forward width and H heads (the count of each
term, the paper's equation 1 for this decoder, is in :mod:`impls.training.activation_bytes`):

    baseline         16D + 4Q + 4G + 8F + 4H + 8       Llama-3-8B's layer 196 KiB
    selective_eager   4D + 4Q + 4G + 4F + 4H           92 KiB, and 8 bytes more for optimized with kernels
    gate_up_again     4D + 4Q + 4G + 4H + 8            36 KiB
    full              2D                               8 KiB

The paper's selective recomputation makes attention's core again, whose scores are large. A flash kernel keeps no
scores and makes them again itself; what is left of attention, 2Q + 4H bytes a token, would cost 2·S·Q operations to
make again, about S a byte, where a norm costs a few: it is kept.

To a step's peak comes what the layer that backward is at makes again: with ``full`` all of a layer's activations, once;
with ``optimized`` a product's input, which lies where its gradient was, and gradients where gate and up were.
``peak_formula`` counts that, and stands beside ``peak_bytes`` in the record, as ``saved_formula`` beside
``saved_bytes``, what is kept at the end of forward.

Predicted time over the baseline's, products and attention on one side, passes on the other:

    optimized        no operation of a product more, and fewer bytes than the baseline: fused, a layer's passes there
                     and back move 40D + 8(Q + G) + 18F bytes a token, 4D + 2F of them outputs made again, where the
                     baseline's eager ones move several times that. So it is faster, though it keeps half: against an
                     eager baseline most of the gain is fusion's. What says whether keeping less costs anything is
                     torch_compile, fused too: within a few percent of its time is expected, with less memory
    gate_up_again    besides, 4DF operations a token and layer
    selective_eager  no operation of a product more; the passes of a forward again (:meth:`Counts.passes`). But torch
                     asks the policy about each operation in forward and again in backward: at the few thousand tokens
                     of ``1b_4k`` a GPU waits for the host all the time, the step takes longer than ``full``, and
                     ``every_other`` keeps as little for less. Not predicted
    full             besides, a layer's products but the last, whose output no gradient needs: operations are up to 4/3
                     of the baseline's by Chen's count, 1.24 in Llama-3-8B's layers without attention
    offload          bytes over the host link twice; torch sends what each operation saves, weights and repeats too, on
                     the same stream as the kernels

The step is forward, mean cross entropy, backward; no optimizer, which would add the same to all. Gradients lie in
buffers that are there before the step, as they do when they are summed over micro-batches, and the head with its loss
goes chunk by chunk: so the peak is that of activations, and neither hides behind logits. The model has no dropout;
where a layer draws random numbers, torch's ways draw the same again.
"""

# Shapes: B rows, S positions, D model width, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.pair import Claim, Context, Inputs, Pair, Variant, Work
from harness.workload import Workload
from impls.model.decoder import Attend
from impls.parallel import shared
from impls.training import checkpointed_trunk as trunks
from impls.training import lean_layer
from impls.training.activation_bytes import Counts, counts_of
from impls.training.lean_passes import Fused, Passes, passes_for
from impls.training.live_bytes import live_bytes


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """``tokens`` (B, S+1), the last of each row only a target, and the weights as ``weight.NAME``."""
    return shared.train_inputs(workload, ctx)


class Step:
    """One training step without an optimizer: the gradient of the mean loss over all tokens, in every weight's buffer.

    way: name of the variant, for the counts. run_layer: how the trunk runs a layer.
    """

    def __init__(
        self,
        workload: Workload,
        ctx: Context,
        way: str,
        run_layer: trunks.RunLayer,
        attend: Attend | None = None,
    ) -> None:
        self.workload, self.way = workload, way
        self.device = ctx.device
        self.run_layer, self.attend = run_layer, attend
        self.model = shared.empty_model(shared.model_config(workload), ctx)
        self.params = dict(self.model.named_parameters())
        for param in self.params.values():
            param.grad = torch.zeros_like(param)
        self.tokens = torch.empty(0, dtype=torch.long)
        self.loss = torch.zeros(())
        self._counters: dict[str, float] = {}

    def load(self, inputs: Inputs) -> None:
        """Set the weights and take the batch."""
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(inputs[f"weight.{name}"])
        self.tokens = inputs["tokens"]

    def run(self) -> None:
        """One step."""
        self.zero()
        hidden = self.forward()
        hidden.backward(self.head(hidden))

    def zero(self) -> None:
        """Gradients are added to what is in the buffers."""
        torch._foreach_zero_([param.grad for param in self.params.values() if param.grad is not None])

    def forward(self) -> Tensor:
        """The hidden states (B, S, D), with all that backward will need."""
        with self.keeping():
            return trunks.trunk(self.model, self.tokens[:, :-1], self.run_layer, self.attend)

    def keeping(self) -> AbstractContextManager[Any]:
        """Where the tensors that autograd saves are kept."""
        return nullcontext()

    def head(self, hidden: Tensor) -> Tensor:
        """The loss, and its gradient for the hidden states: of each chunk of tokens forward and backward at once."""
        flat, targets = hidden.detach().flatten(0, 1), self.tokens[:, 1:].flatten()
        gradient = torch.empty_like(flat)
        losses = []
        pieces = (x.split(self.workload.chunk) for x in (flat, targets, gradient))
        for states, target, out in zip(*pieces, strict=True):
            leaf = states.detach().requires_grad_()
            losses.append(self._chunk_loss(leaf, target, len(flat)))
            assert leaf.grad is not None
            out.copy_(leaf.grad)
        self.loss = torch.stack(losses).sum()
        return gradient.view_as(hidden)

    def _chunk_loss(self, states: Tensor, target: Tensor, tokens: int) -> Tensor:
        loss = shared.summed_loss(self.model.lm_head(states), target) / tokens
        loss.backward()
        return loss.detach()

    def result(self) -> Mapping[str, Tensor]:
        """``loss`` and ``grad.NAME`` of every weight."""
        out = {"loss": self.loss}
        for name, param in self.params.items():
            assert param.grad is not None
            out[f"grad.{name}"] = param.grad
        return out

    def poison(self) -> None:
        """Overwrites what the next step must write."""
        self.loss = torch.full_like(self.loss, torch.nan)
        for param in self.params.values():
            assert param.grad is not None
            param.grad.fill_(torch.nan)

    def counts(self) -> Counts:
        """What is predicted of this workload."""
        return counts_of(self.workload)

    def counters(self) -> Mapping[str, float]:
        """Bytes kept at the end of forward and at a step's peak, each beside what the count says; operations done
        again; and the predicted factor in time."""
        if not self._counters:
            self.zero()
            with live_bytes(self.device) as live:
                hidden = self.forward()
                saved = live.now
                hidden.backward(self.head(hidden))
                peak = live.peak
            counts = self.counts()
            self._counters = {
                "saved_bytes": float(saved),
                "saved_formula": counts.saved(self.way),
                "peak_bytes": float(peak),
                "peak_formula": counts.peak(self.way),
                "recomputed_flops": counts.recomputed_flops(self.way),
                "time_factor_predicted": counts.time_factor(self.way),
            }
        return self._counters


class Offloaded(Step):
    """Everything that autograd saves of the layers goes to the host; pinned where the device can copy from it."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, ctx, "offload", trunks.keep)
        self.sent = 0

    def keeping(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")

    def counters(self) -> Mapping[str, float]:
        """Besides those of every step the bytes sent to the host, counted by a walk over what autograd saves, and
        beside them what the count says."""
        sent = 0

        def count(x: Tensor) -> Tensor:
            nonlocal sent
            sent += x.numel() * x.element_size()
            return x

        if not self._counters:
            with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
                trunks.trunk(self.model, self.tokens[:, :-1], self.run_layer, self.attend)
            formula = counts_of(self.workload).to_host()
            self._counters = {**super().counters(), "host_bytes": float(sent), "host_formula": formula}
        return self._counters


class Lean(Step):
    """Layers that keep the outputs of products and of attention, by autograd functions of their own.

    again: make gate and up again too. passes: what lies between the products; by default what the device runs best.
    """

    def __init__(self, workload: Workload, ctx: Context, again: bool = False, passes: Passes | None = None) -> None:
        super().__init__(workload, ctx, "gate_up_again" if again else "optimized", trunks.keep)
        self.again, self.passes = again, passes or passes_for(ctx.device, ctx.dtype)

    def forward(self) -> Tensor:
        return lean_layer.trunk(self.model, self.tokens[:, :-1], self.passes, self.again)

    def counts(self) -> Counts:
        return counts_of(self.workload, fused=isinstance(self.passes, Fused))


class Compiled(Step):
    """Layers through torch's compiler, by :func:`impls.training.checkpointed_trunk.compiled`."""

    def __init__(
        self, workload: Workload, ctx: Context, run_layer: trunks.RunLayer = trunks.keep, budget: float | None = None
    ) -> None:
        super().__init__(workload, ctx, "baseline", run_layer)
        self.run_layer = trunks.compiled(self.model, run_layer, budget)

    def counters(self) -> Mapping[str, float]:
        """What is kept and the peak, where an allocator counts; what the compiler keeps is its own choice and has no
        formula. Counted operation by operation, as on a CPU, torch runs a layer as if it were not compiled."""
        if self.device.type != "cuda":
            return {}
        return {name: value for name, value in super().counters().items() if name in ("saved_bytes", "peak_bytes")}


def gate_up_again(workload: Workload, ctx: Context) -> Step:
    """:class:`Lean`, and the two largest products twice."""
    return Lean(workload, ctx, again=True)


def selective_compile(workload: Workload, ctx: Context) -> Step:
    """The selective policy for torch's compiler."""
    return Compiled(workload, ctx, trunks.selective_in_graph)


def half_compile(workload: Workload, ctx: Context) -> Step:
    """torch's compiler, told to keep half."""
    return Compiled(workload, ctx, budget=0.5)


def _way(name: str, run_layer: trunks.RunLayer) -> Callable[[Workload, Context], Step]:
    return lambda workload, ctx: Step(workload, ctx, name, run_layer)


class RepeatedKeys:
    """Causal attention on keys and values repeated for their queries: in wide, torch's kernels without scores know no
    groups."""

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        group = q_BSHE.shape[2] // k_BSKE.shape[2]
        k_BSHE, v_BSHE = (x.repeat_interleave(group, dim=2) for x in (k_BSKE, v_BSKE))
        q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BSHE, v_BSHE))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def oracle(workload: Workload, ctx: Context) -> Step:
    """The step in float64, of 16 bits in float32; each layer is computed again, so that it fits beside the others."""
    wide = torch.float32 if ctx.dtype.itemsize < 4 else torch.float64
    return Step(workload, replace(ctx, dtype=wide), "full", trunks.recompute, RepeatedKeys())


def work(workload: Workload) -> Work:
    """The model's own operations; what is computed again is not counted."""
    counts = counts_of(workload)
    weights = shared.model_config(workload).parameters
    return Work(
        flops=counts.flops,
        bytes=3 * counts.size * weights,
        items=counts.tokens,
        unit="tokens",
        reasons={
            "flops": "6 a weight and token, attention causal; recomputation not counted",
            "bytes": "weights read forward and backward, gradients written; no activations",
        },
    )


def predict(workload: Workload) -> float:
    """The baseline's time over the optimized one's with kernels, which move less than is made again."""
    return 1 / counts_of(workload).time_factor("optimized")


PAIR = Pair(
    name="activation_checkpointing",
    kind="step",
    layer="system",
    relieves="capacity",
    claim=Claim(
        memory="lower",
        cost="what is not kept is made again: norms and the gate a second time, at the price of two passes where a "
        "kernel's backward makes them on its way, of a forward's where torch's operations do",
    ),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": _way("baseline", trunks.keep),
        "optimized": Lean,
        "gate_up_again": gate_up_again,
        "selective_eager": _way("selective_eager", trunks.selective),
        "selective_compile": Variant(selective_compile, requires=("compiler",), compiled=True),
        "full": Variant(_way("full", trunks.recompute), peer="torch"),
        "every_other": _way("every_other", trunks.every_other),
        "offload": Variant(Offloaded, peer="torch", requires=("cuda",)),
        "torch_compile": Variant(Compiled, peer="torch", requires=("compiler",), compiled=True),
        "torch_compile_half": Variant(half_compile, peer="torch", requires=("compiler",), compiled=True),
    },
    work=work,
    predict=predict,
)
