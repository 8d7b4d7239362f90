"""What lies between a layer's products, forward and backward: in torch's operations, and in one Triton kernel each.

A layer that keeps only the outputs of products and of attention makes the inputs of its products again in backward.
Backward walks over the same tensors anyway, so a fused pass makes them on its way. Bytes that a token moves through
device memory, of e bytes a number, in widths of the model (D) and of the feed-forward (F):

    norm, backward   summed and its gradients in, the input's gradient out: 4eD; the output again: 2eD
    gate, backward   gradient, gate and up in, their gradients out: 5eF; the product again: eF

torch's operations are the decoder's own, run again under autograd: gradients are those of the plain layer to the bit,
and the memory within a pass is what autograd keeps there.
"""

# Shapes: B rows, S positions, D model width, E width of a head, H heads, F feed-forward width.

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch import Tensor

from impls.model import decoder


class Passes(Protocol):
    """The passes of a layer. ``root`` is what a norm's backward wants beside its input: one number a row, or None."""

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The decoder's (B, S, E), of positions from 0 in every row, as the rotation takes them."""
        ...

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """The normalized sum of x and delta, the sum, and its root."""
        ...

    def norm_again(self, summed: Tensor, root: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """The normalized sum."""
        ...

    def norm_back(
        self, grad: Tensor, grad_summed: Tensor | None, summed: Tensor, root: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the sum, ``grad_summed`` from its other uses included, and of the weight."""
        ...

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """May write over q and k."""
        ...

    def rotate_back(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of what was rotated."""
        ...

    def gate(self, gate: Tensor, up: Tensor) -> Tensor: ...

    def gate_back(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of gate and up, and the product again; may write over all that is given."""
        ...

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """total + left @ right; may write over total."""
        ...


class Plain:
    """The decoder's own operations."""

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos, sin

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor | None]:
        return *decoder.rms_norm(x, delta, weight, eps), None

    def norm_again(self, summed: Tensor, root: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return decoder.rms_norm(summed, None, weight, eps)[0]

    def norm_back(
        self, grad: Tensor, grad_summed: Tensor | None, summed: Tensor, root: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x, w = _leaf(summed), _leaf(weight)
            out = decoder.rms_norm(x, None, w, eps)[0]
        if grad_summed is None:
            grad_x, grad_w = torch.autograd.grad(out, (x, w), grad)
        else:
            grad_x, grad_w = torch.autograd.grad((out, x), (x, w), (grad, grad_summed))
        return grad_x, grad_w

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return decoder.rotate(q, k, cos, sin)

    def rotate_back(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():  # a rotation is linear: where it is taken makes no difference
            at = _leaf(q), _leaf(k)
            turned = decoder.rotate(*at, cos, sin)
        grad_q, grad_k = torch.autograd.grad(turned, at, (q, k))
        return grad_q, grad_k

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return decoder.swiglu(gate, up)

    def gate_back(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            at = _leaf(gate), _leaf(up)
            product = decoder.swiglu(*at)
        grad_gate, grad_up = torch.autograd.grad(product, at, grad)
        return grad_gate, grad_up, product.detach()

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return total + left @ right


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


class Fused:
    """One Triton kernel a pass. What a pass of backward reads for the last time it writes over."""

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor | None]:
        from kernels.add_rms_norm import add_rms_norm_forward

        out: tuple[Tensor, Tensor, Tensor] = add_rms_norm_forward(
            x, torch.zeros_like(weight).expand_as(x) if delta is None else delta, weight, eps
        )
        return out

    def norm_again(self, summed: Tensor, root: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        from kernels.recompute import normalize

        assert root is not None
        out: Tensor = normalize(summed, weight, root)
        return out

    def norm_back(
        self, grad: Tensor, grad_summed: Tensor | None, summed: Tensor, root: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        from kernels.add_rms_norm import add_rms_norm_backward

        assert root is not None
        passed = None if grad_summed is None else grad_summed.contiguous()
        out: tuple[Tensor, Tensor] = add_rms_norm_backward(grad.view_as(summed), passed, summed, weight, root)
        return out

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from kernels.rope import rope_forward

        out: tuple[Tensor, Tensor] = rope_forward(q, k, cos, sin)
        return out

    def rotate_back(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from kernels.rope import rope

        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))  # as attention's backward left them
        out: tuple[Tensor, Tensor] = rope(q, k, cos, -sin, inplace=False)
        return out

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        from kernels.swiglu import swiglu_forward

        out: Tensor = swiglu_forward(gate, up)
        return out

    def gate_back(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from kernels.recompute import swiglu_backward_again

        out: tuple[Tensor, Tensor, Tensor] = swiglu_backward_again(grad.view_as(gate), gate, up)
        return out

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return total.addmm_(left, right)


def passes_for(device: torch.device, dtype: torch.dtype) -> Passes:
    """Fused where Triton's kernels run on the device at full speed, in a dtype they know."""
    known = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return Fused() if device.type == "cuda" and known and importlib.util.find_spec("triton") else Plain()
