"""Mixed precision: a training step in float32, against products in 16 bits with float32 weights behind them.

Micikevicius et al. 2018, "Mixed Precision Training", section 3; Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep
Learning Training"; Zamirai et al. 2020, "Revisiting BFloat16 Training", section 4.

    baseline      everything in float32
    optimized     torch.autocast to bfloat16: products and attention in bfloat16, the residual stream, norms, loss,
                  weights, gradients and moments in float32 (section 3.1)
    float16       autocast to float16 with the loss scaled, so that small gradients do not become zero (section 3.2):
                  the scale halves and the step is left out where a gradient is inf, and doubles after some good steps
    stochastic    bfloat16 alone: weights, gradients and moments; the update is rounded at random, right on average
    kahan         bfloat16 alone, and a second bfloat16 number a weight keeps what rounding dropped
    tf32          everything kept in float32, products rounded to 10 bits: one line of torch

Predicted on an H200: products at 680 TFLOP/s instead of float32's 67 of the datasheet; beside them the bytes of passes
over activations, where float32 norms stay and the gate and the rotation halve, the casts of the weights (6 a weight),
and AdamW's 28 bytes a weight, which stays.

Memory of model states a weight: 4 + 4 + 8 bytes in float32; 2 more while autocast keeps its copies; bfloat16 alone
2 + 2 + 4, with Kahan's numbers 10 in all. Of activations the norms' stay, the others' halve.

The learning rate falls like one over the width (Yang et al. 2022, "Tensor Programs V", table 3, hidden and output
weights under Adam): AdamW's first steps move each weight by the rate, whatever its gradient, and a product adds up as
many of those moves as the model is wide. At one rate for all widths a wide model's loss jumps about after the first
step, and whoever leaves out or rounds a step away then has another curve.

How far it is right. The oracle is the step in float64. ``grad.NAME`` are the gradients of the first step, within 1/16
of their own size: 16 bits cannot be right to a float32 bound, and rounding grows with the layers. A test holds the
gradients of ``optimized`` to twice the error of a model that is bfloat16 altogether. ``fall`` is how far the loss has
come down after each of some steps: an update that is missing or wrong shows there. A step that float16 leaves out is
made up for by another before losses are compared. ``loss_gap`` in the record is the largest distance of the loss curve
from float32's, and stands beside ``loss_spread``, how far float32's own curves of several seeds lie from it. The tokens
follow a Zipf law, so that there is something to learn; the model is random.
"""

# Shapes: B rows, S positions, T tokens, V vocabulary.

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.pair import Claim, Context, Inputs, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.fusion._count import COPY, PRODUCTS
from impls.parallel import shared
from impls.training import checkpointed_trunk as trunks
from impls.training.activation_bytes import counts_of
from impls.training.bfloat16_adamw import BFloat16AdamW, Rounding

STEPS = 5
CURVE, SEEDS = 10, 3
#: The learning rate of a model of ``RATE_WIDTH``; :func:`adamw` gives that of another.
RATE, RATE_WIDTH = 1e-3, 64
#: Steps that float16 may take besides to make up for those that it left out.
MAX_MORE = 64
#: float32 outside the matrix units, by the H200's datasheet.
FLOAT32 = 67e12


def adamw(width: int) -> dict[str, Any]:
    """The optimizer's settings for a model of that width."""
    return {**shared.ADAMW, "lr": RATE * RATE_WIDTH / width}


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """``tokens`` (B, S+1) by a Zipf law, the last of each row only a target, and initial weights as ``weight.NAME``."""
    config = shared.model_config(workload)
    shares = 1 / torch.arange(2, config.vocab_size + 2, dtype=torch.float64)
    count = workload.batch * (workload.seq + 1)
    drawn = torch.multinomial(shares, count, replacement=True, generator=ctx.generator(1))
    tokens = drawn.view(workload.batch, workload.seq + 1).to(ctx.device)
    return {**shared.draw_weights(config, ctx), "tokens": tokens}


class Float32:
    """The plain way, and what all ways share: steps of AdamW on one batch, the loss of each."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        self.workload, self.ctx = workload, ctx
        self.model = shared.empty_model(shared.model_config(workload), ctx)
        self.params = dict(self.model.named_parameters())
        self.losses: deque[Tensor] = deque(maxlen=CURVE)
        self.optimizer: Any = None
        self._inputs: Inputs | None = None
        self._counters: dict[str, float] = {}

    def load(self, inputs: Inputs) -> None:
        """Set the initial weights, forget the optimizer's state, take the batch."""
        self._inputs = inputs
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(inputs[f"weight.{name}"])
        self.unload()
        self.restart()
        self.tokens: Tensor = inputs["tokens"]
        self.losses.clear()

    def run(self) -> None:
        """One step."""
        self.release()
        self.losses.append(self.backward())
        self.update()

    def backward(self) -> Tensor:
        """Leaves the gradients of the mean loss in the weights, and gives the loss."""
        with self.precision():
            logits = self.logits()
        loss = shared.summed_loss(logits, self.tokens[:, 1:]) / float(self.tokens[:, 1:].numel())
        self.differentiate(loss)
        return loss.detach()

    def release(self) -> None:
        """Free the gradients of the last step."""
        for param in self.params.values():
            param.grad = None

    def unload(self) -> None:
        """Give gradients and moments back; :meth:`load` starts anew. All ways beside the oracle would not fit."""
        self.release()
        self.optimizer = None

    # -- what a way may do otherwise ---------------------------------------------------------------------------------

    def logits(self) -> Tensor:
        """The model's output (B, S, V)."""
        logits: Tensor = self.model(self.tokens[:, :-1])
        return logits

    def precision(self) -> Any:
        """In what the model's forward computes."""
        return nullcontext()

    def differentiate(self, loss: Tensor) -> None:
        """Run backward."""
        loss.backward()

    def restart(self) -> None:
        """Forget what the optimizer knows."""
        self.optimizer = torch.optim.AdamW(self.params.values(), fused=True, **adamw(self.workload.width))

    def update(self) -> None:
        """The weights of the next step."""
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        """What backward left, in the scale of the loss."""
        found = {}
        for name, param in self.params.items():
            assert param.grad is not None, name
            found[name] = param.grad.to(torch.promote_types(param.dtype, torch.float32))
        return found

    # -- the outcome -------------------------------------------------------------------------------------------------

    def result(self) -> Mapping[str, Tensor]:
        """``losses`` of the steps since the weights were set, how far they have fallen, and ``grad.NAME`` of the first
        step, computed once more."""
        assert self._inputs is not None
        losses = self.losses_of_updates()
        out = {"losses": losses, "fall": losses[0] - losses[1:]}
        self.load(self._inputs)
        self.backward()
        out |= {f"grad.{name}": grad for name, grad in self.gradients().items()}
        self.load(self._inputs)
        return out

    def losses_of_updates(self) -> Tensor:
        """The loss before each update of the weights since they were set, as many as steps were run."""
        return torch.stack(list(self.losses))

    def poison(self) -> None:
        """Overwrites what the next steps must write."""
        with torch.no_grad():
            for param in self.params.values():
                param.fill_(torch.nan)
        self.losses.clear()

    def counters(self) -> Mapping[str, float]:
        """``loss_gap``, the largest distance of the loss over some steps from float32's, and ``loss_spread``, the
        largest between float32's own with other initial weights."""
        if not self._counters:
            assert self._inputs is not None
            plain, *others = reference(self.workload, self.ctx, self._inputs)
            own = curve(self, self._inputs)
            far = (abs(a - b) for other in others for a, b in zip(other, plain, strict=True))
            self._counters = {
                "loss_gap": max(abs(a - b) for a, b in zip(own, plain, strict=True)),
                "loss_spread": max(far),
            }
        return self._counters


def curve(case: Float32, inputs: Inputs) -> tuple[float, ...]:
    """The loss of each of the first steps."""
    case.load(inputs)
    for _ in range(CURVE):
        case.run()
    losses = tuple(case.losses_of_updates().tolist())
    case.load(inputs)
    return losses


_REFERENCES: dict[tuple[str, int, str], list[tuple[float, ...]]] = {}


def reference(workload: Workload, ctx: Context, inputs: Inputs) -> list[tuple[float, ...]]:
    """float32's loss curves on the tokens of ``inputs``: from its weights, and from those of other seeds."""
    key = (workload.workload_id, inputs.seed, str(ctx.device))
    if key not in _REFERENCES:
        ctx = replace(ctx, dtype=torch.float32)
        case = Float32(workload, ctx)
        found = [curve(case, inputs)]
        config = shared.model_config(workload)
        for number in range(1, SEEDS):
            weights = shared.draw_weights(config, replace(ctx, seed=inputs.seed + 7919 * number))
            found.append(curve(case, Inputs({**weights, "tokens": inputs["tokens"]}, inputs.seed)))
        _REFERENCES.clear()
        _REFERENCES[key] = found
    return _REFERENCES[key]


class Autocast(Float32):
    """Products and attention in 16 bits."""

    narrow = torch.bfloat16

    def precision(self) -> Any:
        return torch.autocast(self.ctx.device.type, dtype=self.narrow)


class ScaledFloat16(Autocast):
    """Besides, the loss is scaled. torch's scaler leaves weights, moments and count of steps as they are where a
    gradient is not finite."""

    narrow = torch.float16
    init_scale, growth_interval = 2.0**16, 2000

    def restart(self) -> None:
        super().restart()
        kind = self.ctx.device.type
        self.scaler = torch.amp.GradScaler(kind, init_scale=self.init_scale, growth_interval=self.growth_interval)
        # The optimizer's count of steps before the first and after each; a step left out is not counted.
        self.counts: deque[Tensor] = deque([torch.zeros((), device=self.ctx.device)], maxlen=CURVE + 1)

    def differentiate(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self) -> None:
        super().run()
        first = next(iter(self.params.values()))
        self.counts.append(self.optimizer.state[first]["step"].clone() if self.optimizer.state else self.counts[-1])

    def losses_of_updates(self) -> Tensor:
        """A step left out is run again at the lower scale, so that losses stand beside those of the same update; NaN
        for those whose gradients do not become finite."""
        wanted = len(self.losses)
        counted = torch.stack(list(self.counts)).diff() > 0
        kept = [loss for loss, taken in zip(self.losses, counted.tolist(), strict=True) if taken]
        for _ in range(MAX_MORE):
            if len(kept) == wanted:
                break
            self.run()
            if self.counts[-1] > self.counts[-2]:
                kept.append(self.losses[-1])
        missing = [torch.full_like(self.losses[-1], torch.nan)] * (wanted - len(kept))
        return torch.stack(kept + missing)

    def gradients(self) -> dict[str, Tensor]:
        return {name: grad / self.scaler.get_scale() for name, grad in super().gradients().items()}

    def counters(self) -> Mapping[str, float]:
        """Besides those of every way ``loss_scale``, where the scale stands after those steps: each halving was a step
        left out."""
        if not self._counters:
            found = dict(super().counters())
            assert self._inputs is not None
            for _ in range(CURVE):
                self.run()
            self._counters = {**found, "loss_scale": float(self.scaler.get_scale())}
            self.load(self._inputs)
        return self._counters


class BFloat16(Float32):
    """No float32 behind the weights."""

    def __init__(self, workload: Workload, ctx: Context, rounding: Rounding) -> None:
        super().__init__(workload, replace(ctx, dtype=torch.bfloat16))
        self.rounding = rounding

    def restart(self) -> None:
        assert self._inputs is not None
        generator = torch.Generator(self.ctx.device).manual_seed(self._inputs.seed)
        self.optimizer = BFloat16AdamW(self.params.values(), self.rounding, generator, **adamw(self.workload.width))
        # Weights that all start on bfloat16's grid would all stand still until updates add up to half a step of it.
        for dropped, (name, param) in zip(self.optimizer.dropped, self.params.items(), strict=False):
            dropped.copy_(self._inputs[f"weight.{name}"] - param.detach().float())


class TF32(Float32):
    """Products of float32 numbers rounded to 10 bits on their way in."""

    @contextmanager
    def rounded(self) -> Iterator[None]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def backward(self) -> Tensor:
        with self.rounded():
            return super().backward()


class Float64(Float32):
    """The oracle; each layer is computed again in backward, so that it fits beside the others."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, replace(ctx, dtype=torch.float64))

    def logits(self) -> Tensor:
        logits: Tensor = self.model.lm_head(trunks.trunk(self.model, self.tokens[:, :-1], trunks.recompute))
        return logits


def work(workload: Workload) -> Work:
    """The step, whatever it computes in."""
    return Work(
        flops=shared.train_flops(workload),
        bytes=shared.weight_traffic(workload),
        items=workload.batch * workload.seq,
        unit="tokens",
        reasons={
            "flops": "6 a weight and token, attention causal",
            "bytes": "weights, gradients and moments; no activations",
        },
    )


def predict(workload: Workload) -> float:
    """Float32's time over autocast's on an H200: the stream's passes stay and its norms' outputs are cast, what is
    between the products halves, and the weights are cast once. Backward's passes count twice forward's, and a logit's
    ten in float32 (softmax, its gradient and the products' reads)."""
    wide = counts_of(workload.replace(dtype="float32", chunk=workload.batch * workload.seq))
    narrow = replace(wide, size=2)
    weights = shared.model_config(workload).parameters
    casts = 2 * (4 + 2) * wide.width
    layers, logits = 3 * wide.layers * wide.tokens, wide.tokens * wide.vocab
    plain = layers * wide.passes(False) + 40 * logits + 28 * weights
    stream = wide.stream_passes(False) + casts
    mixed = layers * (stream + narrow.inner_passes) + (40 + 2 * 6) * logits + (28 + 6) * weights
    flops = shared.train_flops(workload)
    return float((flops / FLOAT32 + plain / COPY) / (flops / PRODUCTS + mixed / COPY))


def _alone(rounding: Rounding) -> Callable[[Workload, Context], Float32]:
    return functools.partial(BFloat16, rounding=rounding)


PAIR = Pair(
    name="mixed_precision",
    kind="step",
    layer="graph",
    relieves="compute",
    claim=Claim(
        latency="lower",
        throughput="higher",
        memory="lower",
        cost="gradients carry 8 bits (bfloat16) or 11 (float16): right within a bound, not to float32",
    ),
    inputs=inputs,
    oracle=Float64,
    variants={
        "baseline": Float32,
        "optimized": Variant(Autocast, compute_dtype="bfloat16"),
        "float16": Variant(ScaledFloat16, compute_dtype="float16"),
        "stochastic": Variant(_alone("stochastic"), compute_dtype="bfloat16"),
        "kahan": Variant(_alone("kahan"), compute_dtype="bfloat16"),
        "tf32": Variant(TF32, peer="torch", requires=("capability>=8.0",), compute_dtype="tf32"),
    },
    work=work,
    tolerance=Tolerance(rule="lossy", bound=2**-4),
    predict=predict,
    check_runs=STEPS,
)
