"""Activation checkpointing: keep all that forward computes for backward, against make the cheap part of it again.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4; Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 5.

    baseline      keep everything
    optimized     selective: of each layer keep the input and the outputs of products and of attention, and make norms,
                  rotation and the gate again: they are large to keep and cheap to make
    full          keep each layer's input and compute the layer again
    every_other   ``full`` for the first, third, ... layer, everything of the others
    offload       torch's save_on_cpu: everything in pinned host memory, there and back over the host link
    torch_compile each layer compiled: what is between the products is fused, and of it the compiler's partition of
                  forward and backward keeps what is dear to make again and makes the rest again, unasked

Bytes a token and layer in 16 bits, for D model, Q query, G key and F feed-forward width and H heads (the count of each
term, the paper's equation 1 for this decoder, is in :mod:`impls.training.activation_bytes`):

    baseline    16D + 4Q + 4G + 8F + 4H + 8       Llama-3-8B's layer 196 KiB
    optimized    4D + 4Q + 4G + 4F + 4H           92 KiB
    full         2D                               8 KiB

The paper's selective recomputation makes attention's core again, whose scores are large. A flash kernel keeps no
scores and makes them again itself; what is left of attention, 2Q + 4H bytes a token, would cost 2·S·Q operations to
make again, about S a byte, where a norm costs a few: it is kept.

To a step's peak comes the layer that backward is at: with ``full`` all of a layer's activations, once. ``peak_formula``
counts that, and stands beside ``peak_bytes`` in the record, as ``saved_formula`` beside ``saved_bytes``, what is kept
at the end of forward.

Predicted time over the baseline's, for the price is time: products and attention on one side, passes on the other.

    optimized     no operation of a product more; the passes of a forward again (:meth:`Counts.passes`). torch asks the
                  policy in Python, once an operation in forward and once when it is made again: where operations are
                  short the host cannot keep up, which is not predicted
    full          besides, a layer's products but the last, whose output no gradient needs: operations are up to 4/3 of
                  the baseline's by Chen's count, 1.24 in Llama-3-8B's layers without attention
    offload       bytes over the host link twice; torch sends what each operation saves, weights and repeats too, on the
                  same stream as the kernels

The step is forward, mean cross entropy, backward; no optimizer, which would add the same to all. Gradients lie in
buffers that are there before the step, as they do when they are summed over micro-batches, and the head with its loss
goes chunk by chunk: so the peak is that of activations, and neither hides behind logits. The model has no dropout;
where a layer draws random numbers, recomputation draws the same.
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
from impls.training.activation_bytes import counts_of
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
            counts = counts_of(self.workload)
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


class Compiled(Step):
    """Layers through torch's compiler."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, ctx, "baseline", trunks.keep)
        torch._dynamo.reset()
        self.run_layer = trunks.compiled(self.model)

    def counters(self) -> Mapping[str, float]:
        """What is kept and the peak; what the compiler keeps is its own choice and has no formula."""
        return {name: value for name, value in super().counters().items() if name in ("saved_bytes", "peak_bytes")}


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
    """The baseline's time over the optimized one's: below 1, the price of the memory."""
    return 1 / counts_of(workload).time_factor("optimized")


PAIR = Pair(
    name="activation_checkpointing",
    kind="step",
    layer="system",
    relieves="capacity",
    claim=Claim(
        latency="higher",
        memory="lower",
        cost="norms, rotation and the gate are computed twice: the same batch takes longer",
    ),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": _way("baseline", trunks.keep),
        "optimized": _way("optimized", trunks.selective),
        "full": Variant(_way("full", trunks.recompute), peer="torch"),
        "every_other": _way("every_other", trunks.every_other),
        "offload": Variant(Offloaded, peer="torch", requires=("cuda",)),
        "torch_compile": Variant(Compiled, peer="torch", requires=("compiler",), compiled=True),
    },
    work=work,
    predict=predict,
)
