"""The layers of a decoder, run so that backward keeps all, some, or hardly any of what forward computes."""

# Shapes: B rows, S positions, D model width, E width of a head.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from impls.model.decoder import Attend, CausalAttention, Decoder, FeedForward, Layer, SelfAttention

#: Runs one layer on (x_BSD, cos_BSE, sin_BSE, attend), and returns the residual stream and what is to be added to it.
RunLayer = Callable[[int, Layer, Tensor, Tensor, Tensor, Attend], tuple[Tensor, Tensor]]

_ATEN = torch.ops.aten
#: Products of matrices, and attention in each of the forms that a device may choose.
EXPENSIVE = (
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
)


def trunk(model: Decoder, tokens_BS: Tensor, run_layer: RunLayer, attend: Attend | None = None) -> Tensor:
    """``Decoder.hidden``, each layer run by ``run_layer``.

    The residual sum that the decoder's norm would make is made between the layers: the same sum, and a layer then has
    one input to keep instead of two.
    """
    attend = attend or CausalAttention()
    positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
    x_BSD = model.embed_tokens(tokens_BS)
    cos_BSE, sin_BSE = model.cos_sin(positions_BS)
    delta_BSD: Tensor | None = None
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        if delta_BSD is not None:
            x_BSD = x_BSD + delta_BSD
        x_BSD, delta_BSD = run_layer(number, layer, x_BSD, cos_BSE, sin_BSE, attend)
    y_BSD: Tensor = model.norm(x_BSD, delta_BSD)[0]
    return y_BSD


def keep(number: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
    """Keep everything that backward needs."""
    out: tuple[Tensor, Tensor] = layer(x, None, cos, sin, attend)
    return out


def recompute(number: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
    """Keep the layer's input; backward runs the layer's forward again first, up to the last value it needs.

    Random numbers are drawn the same again (dropout), which is the default of torch's checkpoint.
    """
    out: tuple[Tensor, Tensor] = checkpoint(layer, x, None, cos, sin, attend, use_reentrant=False)
    return out


def every_other(
    number: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend
) -> tuple[Tensor, Tensor]:
    """:func:`recompute` the first, third, ... layer, :func:`keep` the others."""
    return (recompute if number % 2 == 0 else keep)(number, layer, x, cos, sin, attend)


def compiled(model: Decoder, run_layer: RunLayer | None = None, budget: float | None = None) -> RunLayer:
    """:func:`keep`, or another way, through torch's compiler, which fuses what is between the products and by itself
    makes again in backward what is cheap to make. The layers' numbers, which attention without a cache has no use for,
    become one, so that the code of one layer serves all.

    budget: torch's own knob, the share of what this keeps that may be kept, from 1 (all) to 0 (the layer's input): the
        compiler chooses what to make again, by bytes and operations. None leaves it alone.
    """
    for layer in model.layers:
        assert isinstance(layer, Layer)
        assert isinstance(layer.self_attn, SelfAttention)
        layer.self_attn.layer = 0
    run = torch.compile(_apart(run_layer or keep), dynamic=False)
    if budget is None:
        return lambda number, *rest: run(0, *rest)

    def within(number: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            out: tuple[Tensor, Tensor] = run(0, layer, x, cos, sin, attend)
            return out

    return within


def _apart(run_layer: RunLayer) -> RunLayer:
    """The same function with code of its own: torch finds what it compiled by the code, and would take one budget's for
    another's."""
    assert isinstance(run_layer, FunctionType)
    code = run_layer.__code__.replace()
    return FunctionType(code, run_layer.__globals__, run_layer.__name__, run_layer.__defaults__, run_layer.__closure__)


def save_expensive(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy for a compiler, which drops what nobody reads, so the last product too."""
    return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def selective_in_graph(
    number: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend
) -> tuple[Tensor, Tensor]:
    """:func:`selective` for a compiler: the policy is asked when the graph is cut in forward and backward, and never
    again."""
    out: tuple[Tensor, Tensor] = checkpoint(
        layer,
        x,
        None,
        cos,
        sin,
        attend,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save_expensive),
    )
    return out


def selective(number: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
    """Keep the layer's input and what is expensive to make again; backward makes the rest again from these.

    The price is the host's: torch asks the policy in Python about each operation of the layer, in forward and again in
    backward, and stores and looks up what it keeps. A GPU that is done with an operation before waits for the next.
    """
    policy = save_products(layer)
    out: tuple[Tensor, Tensor] = checkpoint(
        layer,
        x,
        None,
        cos,
        sin,
        attend,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    return out


def save_products(layer: Layer) -> Callable[..., CheckpointPolicy]:
    """The policy: save the outputs of :data:`EXPENSIVE`, but not the last product's, which no gradient needs."""
    last = _weight_of_last_product(layer.mlp)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in EXPENSIVE:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if last is not None and any(isinstance(a, Tensor) and a.untyped_storage()._cdata == last for a in args):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return policy


def _weight_of_last_product(mlp: nn.Module) -> int | None:
    """Identity of the down projection's storage; None when the feed-forward was replaced by something else."""
    if not isinstance(mlp, FeedForward) or not isinstance(mlp.down_proj, nn.Linear):
        return None
    return int(mlp.down_proj.weight.untyped_storage()._cdata)
