"""One matrix product for the projections that share an input: queries with keys and values, gate with up.

At a few rows a product takes as long as its weights take to read, and each launch costs a fixed time beside: two
products where five were.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from impls.model.decoder import Decoder, FeedForward, SelfAttention
from impls.model.errors import ModelError


class FusedSelfAttention(SelfAttention):
    """`SelfAttention` whose three projections are one."""

    def __init__(self, plain: SelfAttention) -> None:
        nn.Module.__init__(self)
        self.layer, self.head_dim, self.rotate = plain.layer, plain.head_dim, plain.rotate
        self.qkv_proj, self.widths = _stack(plain, ("q_proj", "k_proj", "v_proj"))
        self.o_proj = plain.o_proj

    def project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv_proj(x_BSD).split(self.widths, dim=-1)
        return q, k, v


class FusedFeedForward(FeedForward):
    """`FeedForward` whose gate and up projections are one."""

    def __init__(self, plain: FeedForward) -> None:
        nn.Module.__init__(self)
        self.gate = plain.gate
        self.gate_up_proj, self.widths = _stack(plain, ("gate_proj", "up_proj"))
        self.down_proj = plain.down_proj

    def project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.gate_up_proj(x_BSD).split(self.widths, dim=-1)
        return gate, up


def fuse_projections(model: Decoder) -> Decoder:
    """Stack the projections of a loaded model in place, layer by layer; the old ones of a layer are freed at once.

    The result of each output is the same sum over the same products; the order in which a library adds them may change
    with the shape.

    Raises:
        ModelError: a projection is not a plain linear layer (fuse first, then quantize or shard).
    """
    for layer in model.layers:
        if type(layer.self_attn) is SelfAttention:
            layer.self_attn = FusedSelfAttention(layer.self_attn)
        if type(layer.mlp) is FeedForward:
            layer.mlp = FusedFeedForward(layer.mlp)
    return model


def _stack(owner: nn.Module, names: tuple[str, ...]) -> tuple[nn.Linear, list[int]]:
    """One linear layer that computes the outputs of several after one another, and their widths."""
    linears = []
    for name in names:
        linear = getattr(owner, name)
        if type(linear) is not nn.Linear:
            raise ModelError(f"{name} is a {type(linear).__name__}, not a plain linear layer: fuse before replacing it")
        linears.append(linear)
    widths = [linear.out_features for linear in linears]
    first = linears[0]
    with torch.device("meta"):
        stacked = nn.Linear(first.in_features, sum(widths), bias=first.bias is not None)
    with torch.no_grad():
        stacked.weight = nn.Parameter(
            torch.cat([linear.weight for linear in linears]), requires_grad=first.weight.requires_grad
        )
        if first.bias is not None:
            stacked.bias = nn.Parameter(
                torch.cat([linear.bias for linear in linears]), requires_grad=first.bias.requires_grad
            )
    # The plain sublayer is about to be dropped; letting go of its weights here keeps the peak at one layer.
    for name in names:
        delattr(owner, name)
    return stacked.train(owner.training), widths
