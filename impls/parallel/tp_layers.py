"""The pieces of tensor parallelism: Megatron's f and g, linears cut by columns and rows, a vocabulary in parts.

Shoeybi et al. 2019, "Megatron-LM", section 3 (f and g, figure 3; the vocabulary, last paragraphs), and Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2 (sequence parallelism: their g
and g-bar become a gather and a reduce-scatter, and a linear's input is saved in parts).

Shapes: T tokens, t tokens of this rank, I and O features in and out, o and i this rank's, V vocabulary, v this rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from impls.parallel.buckets import wide
from impls.parallel.link import Link
from impls.parallel.shared import split_sizes

Tensor = torch.Tensor


class CopyIn(torch.autograd.Function):
    """f: identity forward; backward sums the gradient over ranks, since each used the same input in its own way."""

    @staticmethod
    def forward(ctx: Any, link: Link, x: Tensor) -> Tensor:
        ctx.link = link
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.link.all_reduce(grad).wait()
        return None, grad


class SumOut(torch.autograd.Function):
    """g: sums partial results over ranks; identity backward."""

    @staticmethod
    def forward(ctx: Any, link: Link, x: Tensor) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        link.all_reduce(out).wait()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


class GatherOut(torch.autograd.Function):
    """Every rank's columns side by side, (…, o) to (…, O); backward keeps one's own. Shorter parts are padded."""

    @staticmethod
    def forward(ctx: Any, link: Link, x: Tensor, total: int) -> Tensor:
        sizes = split_sizes(total, link.world)
        ctx.begin, ctx.size = sum(sizes[: link.rank]), sizes[link.rank]
        part = x if sizes[link.rank] == sizes[0] else F.pad(x, (0, sizes[0] - sizes[link.rank]))
        rows = part.reshape(-1, sizes[0])
        gathered = rows.new_empty(link.world * rows.shape[0], sizes[0])
        link.all_gather(gathered, rows.contiguous()).wait()
        parts = gathered.view(link.world, *x.shape[:-1], sizes[0]).unbind(0)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, grad.narrow(-1, ctx.begin, ctx.size), None


class ColumnLinears(torch.autograd.Function):
    """f and the linears after it, in one: x (…, I) and weights (o, I) each. Backward computes the weights' gradients
    while the input's gradient is on the link."""

    @staticmethod
    def forward(ctx: Any, link: Link, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grad_x = _input_grad(grads, weights)
        sent = ctx.link.all_reduce(grad_x)
        grad_weights = [_weight_grad(grad, x) for grad in grads]
        sent.wait()
        return None, grad_x, *grad_weights


class GatheredLinears(torch.autograd.Function):
    """With sequence parallelism: gather x (t, I) to (T, I), then the linears. Saved is x in parts: backward gathers it
    once more while it computes the input's gradient, which is then reduce-scattered beside the weights' gradients."""

    @staticmethod
    def forward(ctx: Any, link: Link, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        ctx.save_for_backward(x, *weights)
        whole = _gathered_like(link, x)
        link.all_gather(whole, x.contiguous()).wait()
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        whole = _gathered_like(ctx.link, x)
        gathered = ctx.link.all_gather(whole, x.contiguous())
        grad_whole = _input_grad(grads, weights)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        gathered.wait()
        sent = ctx.link.reduce_scatter(grad_x, grad_whole)
        grad_weights = [_weight_grad(grad, whole) for grad in grads]
        sent.wait()
        return None, grad_x, *grad_weights


class ScatterSum(torch.autograd.Function):
    """g-bar: reduce-scatter of partial results (T, O) to (t, O); backward gathers."""

    @staticmethod
    def forward(ctx: Any, link: Link, x: Tensor) -> Tensor:
        ctx.link = link
        out = x.new_empty(x.shape[0] // link.world, *x.shape[1:])
        link.reduce_scatter(out, x.contiguous()).wait()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        whole = _gathered_like(ctx.link, grad)
        ctx.link.all_gather(whole, grad.contiguous()).wait()
        return None, whole


def _gathered_like(link: Link, x: Tensor) -> Tensor:
    return x.new_empty(link.world * x.shape[0], *x.shape[1:])


def _input_grad(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total += grad @ weight
    return total


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).T @ x.flatten(0, -2)


def vocab_embedding(link: Link, tokens: Tensor, weight_vD: Tensor, total: int) -> Tensor:
    """This rank's partial embedding (…, D): rows of words that other ranks hold are zero. Sum it over ranks."""
    begin = sum(split_sizes(total, link.world)[: link.rank])
    local = tokens - begin
    elsewhere = (local < 0) | (local >= weight_vD.shape[0])
    rows = F.embedding(local.masked_fill(elsewhere, 0), weight_vD)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


class VocabLoss(torch.autograd.Function):
    """Summed cross entropy of logits (T, v) whose vocabulary lies over the ranks, without ever gathering them.

    Two all-reduces of T and 2T numbers in the wide dtype: the largest logit, then the sum of exponentials together with
    the target's logit, which exactly one rank has.
    """

    @staticmethod
    def forward(ctx: Any, link: Link, logits_Tv: Tensor, targets_T: Tensor, total: int) -> Tensor:
        from torch.distributed import ReduceOp

        begin = sum(split_sizes(total, link.world)[: link.rank])
        logits = logits_Tv.to(wide(logits_Tv.dtype))
        largest_T = logits.amax(-1)
        link.all_reduce(largest_T, op=ReduceOp.MAX).wait()
        shifted = logits - largest_T.unsqueeze(-1)
        local_T = targets_T - begin
        elsewhere_T = (local_T < 0) | (local_T >= logits.shape[-1])
        local_T = local_T.masked_fill(elsewhere_T, 0)
        own_T = shifted.gather(-1, local_T.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere_T, 0)
        weights_Tv = shifted.exp_()
        sums_2T = torch.stack([weights_Tv.sum(-1), own_T])
        link.all_reduce(sums_2T).wait()
        ctx.save_for_backward(weights_Tv.div_(sums_2T[0].unsqueeze(-1)), local_T, elsewhere_T)
        ctx.dtype = logits_Tv.dtype
        return (sums_2T[0].log() - sums_2T[1]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        probabilities_Tv, local_T, elsewhere_T = ctx.saved_tensors
        grad_Tv = probabilities_Tv * grad
        hit_T = grad.expand_as(local_T).masked_fill(elsewhere_T, 0)
        grad_Tv.scatter_add_(-1, local_T.unsqueeze(-1), -hit_T.unsqueeze(-1))
        return None, grad_Tv.to(ctx.dtype), None, None


def copy_in(link: Link, x: Tensor) -> Tensor:
    """f (:class:`CopyIn`)."""
    return _tensor(CopyIn, link, x)


def sum_out(link: Link, x: Tensor) -> Tensor:
    """g (:class:`SumOut`)."""
    return _tensor(SumOut, link, x)


def gather_out(link: Link, x: Tensor, total: int) -> Tensor:
    """See :class:`GatherOut`."""
    return _tensor(GatherOut, link, x, total)


def scatter_sum(link: Link, x: Tensor) -> Tensor:
    """g-bar (:class:`ScatterSum`)."""
    return _tensor(ScatterSum, link, x)


def column_linears(link: Link, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """See :class:`ColumnLinears`."""
    return _tensors(ColumnLinears, link, x, *weights)


def gathered_linears(link: Link, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """See :class:`GatheredLinears`."""
    return _tensors(GatheredLinears, link, x, *weights)


def vocab_loss(link: Link, logits_Tv: Tensor, targets_T: Tensor, total: int) -> Tensor:
    """See :class:`VocabLoss`."""
    return _tensor(VocabLoss, link, logits_Tv, targets_T, total)


def _tensor(function: Any, *arguments: Any) -> Tensor:
    out: Tensor = function.apply(*arguments)
    return out


def _tensors(function: Any, *arguments: Any) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = function.apply(*arguments)
    return out


def loss_numbers(tokens: int) -> int:
    """How many numbers :class:`VocabLoss` all-reduces."""
    return 3 * tokens
