"""Makes a case out of a plain function on tensors, so that an op's pair holds nothing but its mathematics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from harness.errors import UsageError
from harness.pair import Context, Inputs, Pair, Variant
from harness.workload import Workload

#: Salt of the generator that draws the gradients of outputs: far from what a pair's inputs use.
GRAD_SALT = 7_919


class OpCase:
    """A case over ``fn(**inputs)``; the workload's direction says what ``run`` does.

    ``forward`` runs without autograd; ``backward`` is timed alone, on what one forward saved in ``load``; ``both``
    runs a forward and its backward. The gradients of the outputs are drawn from the inputs' seed in the workload's
    dtype, so that every variant and the oracle get the same numbers.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        workload: Workload,
        ctx: Context,
        differentiable: tuple[str, ...] | None,
        upcast: bool,
    ) -> None:
        self.fn = fn
        self.direction = workload.direction
        self.ctx = ctx
        self.upcast = upcast
        self._chosen = differentiable
        self.buffers: dict[str, Any] = {}
        self._diff: tuple[str, ...] = ()
        self._outputs: dict[str, torch.Tensor] = {}
        self._grads: tuple[torch.Tensor, ...] = ()
        self._output_grads: list[torch.Tensor] = []
        self._seed = 0
        choice = getattr(fn, "choice", None)
        if callable(choice):
            self.choice = choice  # what a function that chooses (tiles, kernels) picked goes into the record

    def load(self, inputs: Inputs) -> None:
        """Copies the inputs into the case's own buffers; for a backward, runs the forward that it starts from."""
        self._outputs, self._grads, self._output_grads = {}, (), []
        self._seed = inputs.seed
        for name, value in inputs.items():
            self.buffers[name] = self._own(self.buffers.get(name), value)
        if self.direction == "forward":
            self._diff = ()
            return
        self._diff = self._differentiable(inputs)
        for name in self._diff:
            self.buffers[name].requires_grad_(True)
        if not self._diff:
            raise UsageError("no input to differentiate: name them in Pair(differentiable=...)")
        if self.direction == "backward":
            self._outputs = self._forward()
        self._ready_output_grads()

    def run(self) -> None:
        """The timed call."""
        if self.direction == "forward":
            with torch.no_grad():
                self._outputs = _named(self.fn(**self.buffers))
            return
        if self.direction == "both":
            self._grads = ()
            self._outputs = self._forward()
            if not self._output_grads:
                self._ready_output_grads()
        outputs = [v for v in self._outputs.values() if v.requires_grad]
        diff = [self.buffers[n] for n in self._diff]
        keep = self.direction == "backward"
        self._grads = torch.autograd.grad(outputs, diff, self._output_grads, retain_graph=keep)

    def result(self) -> dict[str, torch.Tensor]:
        """Outputs by name, and ``grad:<input>`` for each gradient."""
        out = {name: value.detach() for name, value in self._outputs.items()}
        out.update({f"grad:{n}": g for n, g in zip(self._diff, self._grads, strict=bool(self._grads))})
        return out

    def poison(self) -> None:
        """Fills the outputs of earlier calls with NaN and lets them go, so that stale memory cannot pass a check.

        ``load`` must follow: an output may share memory with an input.
        """
        for tensor in [*self._outputs.values(), *self._grads]:
            if tensor.is_floating_point() and tensor.numel():
                tensor.detach().fill_(float("nan"))
        self.release()

    def release(self) -> None:
        """Lets go of outputs and gradients, so that memory of earlier calls is not counted."""
        if self.direction != "backward":
            self._outputs = {}
        self._grads = ()

    def unload(self) -> None:
        """Lets go of all buffers; ``load`` brings them back."""
        self.buffers = {}
        self._outputs, self._grads, self._output_grads = {}, (), []

    def changed_inputs(self, inputs: Inputs) -> list[str]:
        """Names of the inputs that the last run overwrote."""
        return [
            name
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor) and not _same(self.buffers[name].detach(), self._cast(value))
        ]

    def _forward(self) -> dict[str, torch.Tensor]:
        return _named(self.fn(**self.buffers))

    def _ready_output_grads(self) -> None:
        if not self._outputs:
            return
        draw = Context(device=self.ctx.device, dtype=self.ctx.dtype, seed=self._seed)
        self._output_grads = []
        for index, value in enumerate(self._outputs.values()):
            if not value.requires_grad:
                continue
            grad = draw.randn(*value.shape, salt=GRAD_SALT + index) if value.ndim else torch.ones_like(value)
            self._output_grads.append(grad.to(device=value.device, dtype=value.dtype))

    def _differentiable(self, inputs: Inputs) -> tuple[str, ...]:
        if self._chosen is not None:
            return tuple(n for n in self._chosen if n in inputs)
        return tuple(n for n, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point())

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.double() if self.upcast and value.is_floating_point() else value

    def _own(self, buffer: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        source = self._cast(value)
        if isinstance(buffer, torch.Tensor) and buffer.shape == source.shape and buffer.stride() == source.stride():
            with torch.no_grad():
                buffer.copy_(source)
            return buffer
        own = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=source.device)
        return own.copy_(source)


def op_builder(pair: Pair, variant: Variant) -> Callable[[Workload, Context], Any]:
    """``build(workload, ctx)`` for an op's variant."""

    def build(workload: Workload, ctx: Context) -> Any:
        fn = variant.fn
        if variant.builds:
            fn = variant.fn(workload, ctx)
        if variant.compiled:
            torch._dynamo.reset()
            # A backward that is timed alone runs many times on one saved forward; a compiled one otherwise reuses the
            # saved tensors' memory for its results and refuses to run twice.
            torch._functorch.config.donated_buffer = workload.direction != "backward"
            fn = torch.compile(fn, dynamic=False)
        return OpCase(fn, workload, ctx, pair.differentiable, upcast=False)

    return build


def op_oracle(pair: Pair) -> Callable[[Workload, Context], OpCase]:
    """``build(workload, ctx)`` for an op's oracle: the pair's own function on float64 inputs."""

    def build(workload: Workload, ctx: Context) -> OpCase:
        return OpCase(pair.oracle, workload, ctx, pair.differentiable, upcast=True)

    return build


def _named(value: Any) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {"out": value}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return {f"out{i}": v for i, v in enumerate(value)}
    raise UsageError(f"an op returns a tensor, a mapping or a tuple of tensors, got {type(value).__name__}")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype == b.dtype and a.element_size() == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)  # 8-bit floats know few operations: bits are compared
    if a.is_floating_point():
        return torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5)) and torch.equal(a.isnan(), b.isnan())
    return torch.equal(a, b)
