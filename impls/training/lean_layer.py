"""A decoder layer as two autograd functions that keep the outputs of products and of attention, and nothing else.

    y, x = norm(x + delta)            keeps x, and its root where the pass wants it
    q, k, v = rotated(y · W)          keeps nothing: attention keeps q, k, v, its output and log-sum-exp
    delta = attention(q, k, v) · W    autograd's own; the product keeps attention's output, which attention keeps too
    y, x = norm(x + delta)            keeps x and its root
    gate, up = y · W                  keeps gate and up, or makes them again too
    delta = (silu(gate) · up) · W     keeps nothing

That is the set that selective checkpointing keeps, without its machinery: torch's asks a policy in Python about every
operation of the layer, twice, and keeps what it was told; here the set is written down. y and the gate's product are
made again where backward needs them (:mod:`impls.training.lean_passes`).
"""

# Shapes: B rows, S positions, T = B·S tokens, D model width, E width of a head, H heads, F feed-forward width.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from impls.model.decoder import CausalAttention, Decoder, FeedForward, Layer, SelfAttention
from impls.training.lean_passes import Passes


def trunk(model: Decoder, tokens_BS: Tensor, passes: Passes, products_again: bool = False) -> Tensor:
    """``Decoder.hidden`` of a decoder whose parts are the plain ones, without biases, positions from 0 in every row.

    products_again: keep not even gate and up, the two largest of a layer's products.
    """
    positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
    cos, sin = passes.angles(*model.cos_sin(positions_BS))
    x_BSD: Tensor = model.embed_tokens(tokens_BS)
    delta_BSD: Tensor | None = None
    attend = CausalAttention()
    for layer in model.layers:
        assert isinstance(layer, Layer)
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention, SelfAttention)
        assert isinstance(mlp, FeedForward)
        norm = layer.input_layernorm
        weights = [_weight(linear) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
        x_BSD, q_BSHE, k_BSKE, v_BSKE = _projected(
            passes, norm.eps, attention.head_dim, x_BSD, delta_BSD, norm.weight, cos, sin, *weights
        )
        out_BSHE = attend(attention.layer, q_BSHE, k_BSKE, v_BSKE)
        delta_BSD = attention.o_proj(out_BSHE.flatten(-2))
        del q_BSHE, k_BSKE, v_BSKE, out_BSHE  # attention keeps them
        norm = layer.post_attention_layernorm
        weights = [_weight(linear) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
        x_BSD, delta_BSD = _fed_forward(passes, norm.eps, products_again, x_BSD, delta_BSD, norm.weight, *weights)
    y_BSD: Tensor = _normed(passes, model.norm.eps, x_BSD, delta_BSD, model.norm.weight)
    return y_BSD


def _weight(linear: nn.Module) -> Tensor:
    assert isinstance(linear, nn.Linear)
    assert "bias" not in dict(linear.named_parameters())
    return linear.weight


def _rows(x: Tensor) -> Tensor:
    """(..., N) as (T, N)."""
    return x.reshape(-1, x.shape[-1])


class _Projected(torch.autograd.Function):
    """Norm, the three projections, and the rotation."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: Passes,
        eps: float,
        head_dim: int,
        x_BSD: Tensor,
        delta_BSD: Tensor | None,
        weight_D: Tensor,
        cos: Tensor,
        sin: Tensor,
        *projections: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y_BSD, summed_BSD, root = passes.norm(x_BSD, delta_BSD, weight_D, eps)
        q_BSHE, k_BSKE, v_BSKE = (F.linear(y_BSD, w).unflatten(-1, (-1, head_dim)) for w in projections)
        q_BSHE, k_BSKE = passes.rotate(q_BSHE, k_BSKE, cos, sin)
        ctx.passes, ctx.eps = passes, eps
        ctx.save_for_backward(summed_BSD, root, weight_D, cos, sin, *projections)
        return summed_BSD, q_BSHE, k_BSKE, v_BSKE

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_summed: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor | None, ...]:
        passes: Passes = ctx.passes
        summed_BSD, root, weight_D, cos, sin, *projections = ctx.saved_tensors
        grad_q, grad_k = passes.rotate_back(grad_q, grad_k, cos, sin)
        rows = [_rows(grad.flatten(-2)) for grad in (grad_q, grad_k, grad_v)]
        del grad_q, grad_k, grad_v
        grad_y = _input_gradient(passes, rows, projections)
        y = _rows(passes.norm_again(summed_BSD, root, weight_D, ctx.eps))
        grad_projections = [grad.T @ y for grad in rows]
        del y, rows
        grad_x, grad_weight = passes.norm_back(
            grad_y.view_as(summed_BSD), grad_summed, summed_BSD, root, weight_D, ctx.eps
        )
        grad_delta = grad_x if ctx.needs_input_grad[4] else None  # of the first layer there is no delta
        return None, None, None, grad_x, grad_delta, grad_weight, None, None, *grad_projections


class _FeedForward(torch.autograd.Function):
    """Norm, gate and up, their product, and the projection back."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: Passes,
        eps: float,
        products_again: bool,
        x_BSD: Tensor,
        delta_BSD: Tensor,
        weight_D: Tensor,
        gate_proj: Tensor,
        up_proj: Tensor,
        down_proj: Tensor,
    ) -> tuple[Tensor, Tensor]:
        y_BSD, summed_BSD, root = passes.norm(x_BSD, delta_BSD, weight_D, eps)
        gate_BSF, up_BSF = F.linear(y_BSD, gate_proj), F.linear(y_BSD, up_proj)
        out_BSD = F.linear(passes.gate(gate_BSF, up_BSF), down_proj)
        ctx.passes, ctx.eps = passes, eps
        kept = () if products_again else (gate_BSF, up_BSF)
        ctx.save_for_backward(summed_BSD, root, weight_D, gate_proj, up_proj, down_proj, *kept)
        return summed_BSD, out_BSD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_summed: Tensor, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        passes: Passes = ctx.passes
        summed_BSD, root, weight_D, gate_proj, up_proj, down_proj, *kept = ctx.saved_tensors
        y = None
        if not kept:
            y = passes.norm_again(summed_BSD, root, weight_D, ctx.eps)
            kept = [F.linear(y, gate_proj), F.linear(y, up_proj)]
        grad = _rows(grad_out)
        grad_gate, grad_up, product = passes.gate_back((grad @ down_proj).view_as(kept[0]), *kept)
        del kept
        grad_down = grad.T @ _rows(product)
        del product
        rows = [_rows(grad_gate), _rows(grad_up)]
        del grad_gate, grad_up
        grad_y = _input_gradient(passes, rows, (gate_proj, up_proj))
        y = _rows(passes.norm_again(summed_BSD, root, weight_D, ctx.eps) if y is None else y)
        grad_gate_proj, grad_up_proj = (each.T @ y for each in rows)
        del y, rows
        grad_x, grad_weight = passes.norm_back(
            grad_y.view_as(summed_BSD), grad_summed, summed_BSD, root, weight_D, ctx.eps
        )
        return None, None, None, grad_x, grad_x, grad_weight, grad_gate_proj, grad_up_proj, grad_down


class _Normed(torch.autograd.Function):
    """The last norm."""

    @staticmethod
    def forward(
        ctx: Any, passes: Passes, eps: float, x_BSD: Tensor, delta_BSD: Tensor | None, weight_D: Tensor
    ) -> Tensor:
        y_BSD, summed_BSD, root = passes.norm(x_BSD, delta_BSD, weight_D, eps)
        ctx.passes, ctx.eps = passes, eps
        ctx.save_for_backward(summed_BSD, root, weight_D)
        return y_BSD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        summed_BSD, root, weight_D = ctx.saved_tensors
        passes: Passes = ctx.passes
        grad_x, grad_weight = passes.norm_back(grad.contiguous(), None, summed_BSD, root, weight_D, ctx.eps)
        grad_delta = grad_x if ctx.needs_input_grad[3] else None
        return None, None, grad_x, grad_delta, grad_weight


_projected: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _Projected.apply
_fed_forward: Callable[..., tuple[Tensor, Tensor]] = _FeedForward.apply
_normed: Callable[..., Tensor] = _Normed.apply


def _input_gradient(passes: Passes, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Of what several products read: the sum over them, last first, as autograd adds."""
    *others, last = zip(grads, weights, strict=True)
    total = last[0] @ last[1]
    for grad, weight in reversed(others):
        total = passes.add_product(total, grad, weight)
    return total
