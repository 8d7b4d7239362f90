"""The decoder as a GPU serves it: the same weights, its small operations fused and its matrix-vector products our own.

A decode step of one sequence reads every weight once and does almost nothing else, so what counts is that nothing is
launched that need not be: queries, keys and values from one product, gate and up from one, the residual added inside
the norm, the rotation inside the cache write. At batch 1 the library's product does not read as fast as the memory
gives (31.7 of 28 µs for 4096 to 14336 in bfloat16 on an H200); for larger batches it does, and is used.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from impls.model.decoder import Decoder, Parts, keep_unrotated, replace_linears, rms_norm
from impls.model.fuse import fuse_projections
from kernels.add_rms_norm import MAX_COLUMNS, add_rms_norm_forward
from kernels.matvec import matvec
from kernels.swiglu import swiglu_forward


def fused_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum and its norm in one pass; the first layer has nothing to add."""
    if delta is None or x.shape[-1] > MAX_COLUMNS:
        return rms_norm(x, delta, weight, eps)
    out, summed, _ = add_rms_norm_forward(x, delta, weight, eps)
    return out, summed


class VectorLinear(nn.Module):
    """A linear layer without bias that takes one row by our own product, and more rows by the library's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        if x.numel() == self.in_features and x.is_contiguous():
            out: Tensor = matvec(x.view(-1), self.weight)
            return out.view(*x.shape[:-1], self.out_features)
        return nn.functional.linear(x, self.weight)


_made: weakref.WeakKeyDictionary[Decoder, Decoder] = weakref.WeakKeyDictionary()


@torch.no_grad()
def fast_decoder(model: Decoder) -> Decoder:
    """The fused twin of a model, made once for each: engines of one process share it.

    What is not stacked (output projections, embeddings, norms) is the model's own memory; the stacked projections are
    copies.

    Raises:
        ValueError: the model's sublayers were replaced.
        ModelError: a projection is not a plain linear layer.
    """
    twin = _made.get(model)
    if twin is None:
        from impls.serving.runner import with_parts

        twin = with_parts(model, Parts(norm=fused_norm, rotate=keep_unrotated, gate=swiglu_forward))
        fuse_projections(twin)
        replace_linears(twin, lambda name, linear: None if linear.bias is not None else VectorLinear(linear))
        _made[model] = twin
    return twin
