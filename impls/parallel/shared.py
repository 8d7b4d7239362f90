"""What the training pairs of this family share: the model and its batch, one training step as a case, the counts.

The model is the suite's decoder with seeded weights; the step is forward, mean cross entropy over all tokens, backward,
AdamW (Loshchilov and Hutter 2019). All strategies compute that same step on the same batch, so that after some steps
outputs, gradients and parameters of N ranks must equal those of one. In 16 bits the optimizer keeps float32 weights and
gets float32 gradients (Micikevicius et al. 2018, "Mixed Precision Training", section 3.1).
"""

# Shapes: B rows of the global batch, S positions, T = B·S tokens, D model width, V vocabulary, N ranks.

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from harness.pair import Context, Inputs
from harness.workload import Workload
from impls.model.config import ModelConfig
from impls.model.decoder import Decoder, Parts
from impls.parallel.buckets import wide
from impls.parallel.link import Link, gather_rows

#: Touvron et al. 2023, "Llama 2", section 2.2.
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def adamw(dtype: torch.dtype) -> dict[str, Any]:
    """The optimizer's settings: of full training, or in 16 bits those of the first steps of a warm-up.

    Adam's first steps move every weight by the learning rate, whatever its gradient's size. At the full rate rounding
    noise in 16 bits turns into different weights: after five steps of twelve layers gradients were seen a tenth apart,
    which would hide a real fault; at the rate of a warm-up a twenty-fifth.
    """
    return ADAMW if dtype == wide(dtype) else {**ADAMW, "lr": ADAMW["lr"] / 100}


def wide_size(dtype: str) -> int:
    """Bytes of one number of :func:`wide`."""
    return max(4, ITEMSIZE[dtype])


def model_config(workload: Workload) -> ModelConfig:
    """The decoder that a training workload's dimensions describe; see :func:`config_of`."""
    return config_of(workload, workload.seq + 1)


def config_of(workload: Workload, positions: int) -> ModelConfig:
    """The decoder of ``layers``, ``width``, ``ffn``, ``heads``, ``kv_heads`` and ``vocab``.

    Raises:
        ValueError: heads that do not divide the width, or heads that key-value heads do not divide.
    """
    if workload.heads < 1 or workload.width % workload.heads:
        raise ValueError(f"{workload.heads} heads do not divide the model's width of {workload.width}")
    return ModelConfig(
        vocab_size=workload.vocab,
        hidden_size=workload.width,
        intermediate_size=workload.ffn,
        num_layers=workload.layers,
        num_heads=workload.heads,
        num_kv_heads=workload.kv_heads,
        head_dim=workload.width // workload.heads,
        max_position_embeddings=positions,
    )


def train_inputs(workload: Workload, ctx: Context) -> dict[str, Any]:
    """``tokens`` (B, S+1), the last of each row only a target, and the initial weights as ``weight.NAME``."""
    config = model_config(workload)
    values = draw_weights(config, ctx)
    shape = (workload.batch, workload.seq + 1)
    values["tokens"] = torch.randint(0, config.vocab_size, shape, generator=ctx.generator(1)).to(ctx.device)
    return values


def draw_weights(config: ModelConfig, ctx: Context) -> dict[str, Any]:
    """Whole seeded weights as ``weight.NAME``: matrices of variance 1 / fan-in, norms around 1 so that none is idle."""
    with torch.device("meta"):
        shapes = {name: tuple(param.shape) for name, param in Decoder(config).named_parameters()}
    values: dict[str, Any] = {}
    for salt, (name, size) in enumerate(shapes.items(), start=2):
        is_norm = len(size) == 1
        drawn = ctx.randn(*size, scale=0.1 if is_norm else size[-1] ** -0.5, salt=salt)
        values[f"weight.{name}"] = drawn + 1 if is_norm else drawn
    return values


def empty_model(config: ModelConfig, ctx: Context, parts: Parts | None = None) -> Decoder:
    """The decoder with uninitialised parameters; :meth:`TrainCase.load` fills them."""
    with torch.device("meta"):
        model = Decoder(config, parts)
    return model.to_empty(device=ctx.device).to(ctx.dtype)


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits (…, V), summed over all positions, in the wide dtype."""
    flat = logits.flatten(0, -2)
    return F.cross_entropy(flat.to(wide(flat.dtype)), targets.flatten(), reduction="sum")


def split_sizes(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` sizes that differ by one at most, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def own_part(x: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    """This rank's part of x along ``dim``, cut by :func:`split_sizes`."""
    sizes = split_sizes(x.shape[dim], world)
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


class TrainCase:
    """One training step. Subclasses say what a rank holds and how it comes to its gradients.

    ``shards`` maps a parameter's name to the dimension along which ranks share it; the others are whole everywhere.
    """

    def __init__(self, workload: Workload, ctx: Context, model: torch.nn.Module, link: Link | None) -> None:
        self.workload, self.ctx, self.model, self.link = workload, ctx, model, link
        self.params: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self.masters: dict[str, torch.Tensor] = {
            name: param if param.dtype == wide(param.dtype) else torch.empty_like(param, dtype=wide(param.dtype))
            for name, param in self.params.items()
        }
        self.shards: dict[str, int] = {}
        self.tokens = torch.empty(0, dtype=torch.long)
        self._inputs: Inputs | None = None
        self._counters: dict[str, float] = {}
        self._sent = 0.0

    # -- what a strategy defines -------------------------------------------------------------------------------------

    def forward_backward(self) -> dict[str, torch.Tensor]:
        """The gradient of the mean loss over all tokens of the batch, by parameter, in the wide dtype."""
        raise NotImplementedError

    def hidden(self) -> torch.Tensor:
        """The model's last hidden states (B, S, D) on the whole batch, in the global view."""
        raise NotImplementedError

    def own_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """What this rank sees of the batch (B, S+1)."""
        return tokens

    # -- the case ----------------------------------------------------------------------------------------------------

    def load(self, inputs: Inputs) -> None:
        """Set the initial weights, forget the optimizer's state, take the batch."""
        self._inputs = inputs
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(self._own(name, inputs[f"weight.{name}"]))
                self.masters[name].copy_(param)
        self.optimizer = torch.optim.AdamW(self.masters.values(), **adamw(self.ctx.dtype))
        self.release()
        self.tokens = self.own_tokens(inputs["tokens"])

    def run(self) -> None:
        """One step."""
        if self.link is not None:
            self.link.reset()
        self.release()
        for name, grad in self.forward_backward().items():
            self.masters[name].grad = grad
        self.optimizer.step()
        self._round()
        if self.link is not None and not self.link.muted:
            self._sent = self.link.sent

    def release(self) -> None:
        """Free the gradients of the last step."""
        for name, master in self.masters.items():
            master.grad = self.params[name].grad = None

    def result(self) -> Mapping[str, torch.Tensor]:
        """``hidden`` of the batch after the step, ``grad.NAME`` and ``param.NAME``, all in the global view."""
        out = {}
        for name, master in self.masters.items():
            if master.grad is None:
                raise RuntimeError(f"the step left no gradient for {name}")
            out[f"grad.{name}"] = self._whole(name, master.grad)
            out[f"param.{name}"] = self._whole(name, master.detach())
        with torch.no_grad():
            out["hidden"] = self.hidden()
        return out

    def counters(self) -> Mapping[str, float]:
        """``link_bytes`` of a step on the busiest rank, and what of the step is communication (:func:`exposure`)."""
        if self.link is None:
            return {}
        if not self._counters:
            self._counters = {"link_bytes": self.link.most(self._sent, self.ctx.device)}
            self._counters |= exposure(self.run, self.quiet, self.link, self.ctx.device)
            assert self._inputs is not None
            self.load(self._inputs)
        return self._counters

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """The same step without communication."""
        assert self.link is not None
        with self.link.mute():
            yield

    def _round(self) -> None:
        """The weights that the model computes with, from those that the optimizer keeps."""
        with torch.no_grad():
            for name, param in self.params.items():
                if param is not self.masters[name]:
                    param.copy_(self.masters[name])

    def own_grads(self) -> dict[str, torch.Tensor]:
        """What backward left in the parameters, in the wide dtype."""
        grads = {}
        for name, param in self.params.items():
            assert param.grad is not None, name
            grads[name] = param.grad.to(wide(param.dtype))
        return grads

    # -- shards ------------------------------------------------------------------------------------------------------

    def _own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        if name not in self.shards or self.link is None:
            return whole
        return own_part(whole, self.shards[name], self.link.rank, self.link.world)

    def _whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        if name not in self.shards or self.link is None:
            return part
        dim = self.shards[name]
        total = int(self._inputs[f"weight.{name}"].shape[dim]) if self._inputs is not None else 0
        rows = gather_rows(self.link, part.transpose(0, dim).contiguous(), split_sizes(total, self.link.world))
        return rows.transpose(0, dim).contiguous()


def exposure(
    run: Callable[[], None], quiet: Callable[[], Any], link: Link, device: torch.device, rounds: int = 5
) -> dict[str, float]:
    """Seconds, medians over alternating rounds, of the slowest rank: ``step_s`` with communication, ``compute_s``
    without, and ``exposed_comm``, by which the first is longer (0 when it is not)."""

    loud, still = [], []
    for _ in range(rounds):
        loud.append(fenced(run, link, device))
        with quiet():
            still.append(fenced(run, link, device))
    step, compute = statistics.median(loud), statistics.median(still)
    return {"step_s": step, "compute_s": compute, "exposed_comm": max(0.0, step - compute)}


def hidden_share(exposed: float, alone: float) -> float:
    """What of communication that takes ``alone`` seconds by itself a step hides, of which it waits for ``exposed``."""
    return max(0.0, 1 - exposed / alone) if alone > 0 else 0.0


def fenced(run: Callable[[], None], link: Link, device: torch.device) -> float:
    """Seconds of the slowest rank for one call, started together and waited for to its end."""
    _fence(device)
    link.barrier()
    start = time.perf_counter()
    run()
    _fence(device)
    return link.most(time.perf_counter() - start, device)


def _fence(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class OneProcess(TrainCase):
    """The oracle: the whole step in one process, no strategy at all."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, ctx, empty_model(model_config(workload), ctx), None)

    def forward_backward(self) -> dict[str, torch.Tensor]:
        logits = self.model(self.tokens[:, :-1])
        (summed_loss(logits, self.tokens[:, 1:]) / logits.shape[:-1].numel()).backward()
        return self.own_grads()

    def hidden(self) -> torch.Tensor:
        return plain_hidden(self.model, self.tokens[:, :-1])


def plain_hidden(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states (B, S, D) of a whole decoder."""
    from impls.model.decoder import CausalAttention

    assert isinstance(model, Decoder)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model.hidden(tokens, positions, CausalAttention())


def oracle(workload: Workload, ctx: Context) -> TrainCase:
    """The step of one process, in the workload's own dtype: against float32 a step in 16 bits is further off by its
    rounding than by a fault worth finding."""
    return OneProcess(workload, ctx)


def train_flops(workload: Workload) -> float:
    """Model FLOPs of a step: six for each weight of a product and token, and attention's two products, causal
    (counted as half), forward once and backward twice."""
    config = model_config(workload)
    tokens = workload.batch * workload.seq
    products = config.parameters - config.vocab_size * config.hidden_size - (2 * config.num_layers + 1) * workload.width
    attention = config.num_layers * workload.batch * 2 * workload.seq**2 * workload.width
    return float(6 * products * tokens + 3 * attention)


def weight_traffic(workload: Workload) -> float:
    """Least bytes of one copy of the weights in a step; activations are not counted.

    The weights are read forward and backward and written once, gradients are written and read once, AdamW reads and
    writes two moments, and in 16 bits its own weights too.
    """
    size, wide_ = ITEMSIZE[workload.dtype], wide_size(workload.dtype)
    own_weights = 1 * size if size == wide_ else 2 * wide_
    return float(model_config(workload).parameters * (3 * size + own_weights + 2 * wide_ + 4 * wide_))


def check_bytes(numbers: int, own: int, dtype: str) -> int:
    """Bytes that a check of a training step needs on the rank that judges (:mod:`harness.holding`), activations and
    ``hidden`` besides: the inputs, gradients and weights of one process and of the ranks, both whole and in the wide
    dtype, and the case, which in 16 bits has weights, gradients and moments in both.

    numbers: of the whole model. own: those that the judging rank keeps.
    """
    size, wide_ = ITEMSIZE[dtype], wide_size(dtype)
    case = 4 * wide_ + (2 * size if size < wide_ else 0)
    return numbers * (size + 4 * wide_) + own * case


def ring_bytes(ranks: int, buffers: int) -> float:
    """(N-1)/N of a number of bytes; the one place where counts are divided, as :class:`Link` does it."""
    return (ranks - 1) * buffers / ranks
