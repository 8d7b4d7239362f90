"""Cross entropy of a linear layer without its logits: loss and both gradients, a chunk of tokens at a time.

    loss = cross_entropy(hidden @ weight.T, target)

Memory beside the two gradients, for N tokens, vocabulary V and e bytes an element:

    plain  logits (e N V), their float32 copy and log-softmax (8 N V), their gradient (e N V)
    fused  the logits of one chunk: e * chunk * V, at most LOGITS_BYTES; 4 bytes a token for the losses

Work: three products of 2 N V H operations, forward and backward, the same as the plain way: nothing is computed again,
because the gradient of a chunk is taken while its logits are there. The elementwise part moves, per logit: written by
the product (1e), overwritten with the gradient (2e to 3e, see cross_entropy), read by two products (2e).

Design. cuBLAS makes the products; one Triton kernel turns a chunk of logits into its losses and, in place, its
gradient. The chunks are as few and as equal as the memory allows, so that the products stay large and no short one
comes last. The gradient is that of a loss of weight one; the backward multiplies by the incoming gradient on the
device, and its kernel returns at once where that is exactly one, as it is for a plain `loss.backward()`.

Accumulation. A token's own target has most of its gradient, up to -1 beside probabilities that are small: rounded with
the rest it would be off by the rounding of 1 / count, the same way for every token, and once more for every chunk that
is added to grad_weight. So the products take the gradient without it, and it is added at the end, summed in float32
and rounded once (`target_sums`; some 0.1 ms). What the products leave is small, and so are its roundings: cuBLAS
accumulates within a chunk in float32; between chunks the sum is kept in the dtype of weight by default, while a float32
sum would take 2 GiB at a vocabulary of 128,256 and a width of 4,096. `accumulate=torch.float32` keeps it for many
chunks or where memory allows.

Sources: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, section 3.2 (chunks of tokens);
Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024 (the memory argument).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels._rows import check_beside, check_float, check_width, on_device_of
from kernels.cross_entropy import MAX_COLUMNS, check_labels, cross_entropy_forward, cross_entropy_gradient_
from kernels.target_sums import add_at_rows_, add_by_target_

LOGITS_BYTES = 2**29
_BLOCK = 4096
REDUCTIONS = ("mean", "sum")


@triton.jit
def _scale_kernel(tensor_ptr, scale_ptr, count, BLOCK: tl.constexpr):
    """Multiply in place, unless the factor is one."""
    scale = tl.load(scale_ptr)
    if scale != 1.0:
        offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(tensor_ptr + offset, mask=offset < count).to(tl.float32) * scale
        tl.store(tensor_ptr + offset, value.to(tensor_ptr.dtype.element_ty), mask=offset < count)


def scale_(tensor: torch.Tensor, scale: torch.Tensor) -> None:
    """Multiply a contiguous tensor in place by a float32 scalar on its device; a factor of one costs a launch alone."""
    count = tensor.numel()
    if count:
        with on_device_of(tensor):
            _scale_kernel[(triton.cdiv(count, _BLOCK),)](tensor, scale, count, BLOCK=_BLOCK, num_warps=8)


def chunk_rows(rows: int, columns: int, itemsize: int, logits_bytes: int = LOGITS_BYTES) -> int:
    """Tokens a chunk: the fewest chunks whose logits fit, as equal as they come, in multiples of 128 where possible."""
    most = max(1, logits_bytes // (columns * itemsize))
    chunks = max(1, triton.cdiv(rows, most))
    equal = triton.cdiv(rows, chunks)
    rounded = triton.cdiv(equal, 128) * 128
    return max(1, min(rounded, most) if rounded <= most else equal)


def _product_into(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, where total may be float32 beside narrower factors."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
    elif left.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), out=total)


def _check_products(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, label_smoothing: float, reduction: str
) -> None:
    check_float("hidden", hidden)
    check_beside("weight", weight, "hidden", hidden)
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"weight: shape {tuple(weight.shape)} does not go with hidden's {tuple(hidden.shape)}; they must be "
            "(vocabulary, width) and (tokens, width)"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: {reduction!r} is not supported; use 'mean' or 'sum'")
    check_width("weight", weight.shape[0], MAX_COLUMNS)
    check_labels(target, hidden.shape[0], "hidden", hidden, label_smoothing, reduction)


def linear_cross_entropy_forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    logits_bytes: int = LOGITS_BYTES,
) -> torch.Tensor:
    """The loss alone, in chunks: nothing is kept for a backward. Arguments as `linear_cross_entropy_gradients`."""
    _check_products(hidden, weight, target, label_smoothing, reduction)
    rows, columns = hidden.shape[0], weight.shape[0]
    size = chunk_rows(rows, columns, hidden.element_size(), logits_bytes)
    logits = torch.empty((min(size, rows), columns), dtype=hidden.dtype, device=hidden.device)
    losses = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        part = torch.mm(hidden[start:stop], weight.T, out=logits[: stop - start])
        losses[start:stop] = cross_entropy_forward(part, target[start:stop], ignore_index, label_smoothing, "none")[0]
    return _total(losses, target, ignore_index, reduction)


def _total(losses: torch.Tensor, target: torch.Tensor, ignore_index: int, reduction: str) -> torch.Tensor:
    """Sum or mean of the losses of all tokens, taken in float64: the sum of many is coarser than each of them."""
    total = losses.sum(dtype=torch.float64)
    if reduction == "mean":
        total = total / (target != ignore_index).sum()
    return total.float()


def linear_cross_entropy_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    accumulate: torch.dtype | None = None,
    logits_bytes: int = LOGITS_BYTES,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The loss and its gradients in one go.

    hidden        (tokens, width), float32, float16 or bfloat16
    weight        (vocabulary, width), the dtype of hidden
    target        (tokens,), int64 or int32; `ignore_index` counts for nothing
    reduction     "mean" (over the targets that count) or "sum"
    accumulate    the dtype in which grad_weight is summed over chunks; None takes that of weight
    logits_bytes  the most that a chunk's logits may take
    needs         whether grad_hidden and grad_weight are wanted

    Returns loss (float32, 0-dimensional), grad_hidden and grad_weight like hidden and weight. Raises ValueError naming
    the argument that is not supported.
    """
    _check_products(hidden, weight, target, label_smoothing, reduction)
    if accumulate not in (None, weight.dtype, torch.float32):
        raise ValueError(f"accumulate: {accumulate} is not supported; use None, {weight.dtype} or torch.float32")
    rows, columns = hidden.shape[0], weight.shape[0]
    size = chunk_rows(rows, columns, hidden.element_size(), logits_bytes)
    logits = torch.empty((min(size, rows), columns), dtype=hidden.dtype, device=hidden.device)
    losses = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    own = torch.empty_like(losses)
    scale = torch.ones((), dtype=torch.float32, device=hidden.device)
    if reduction == "mean":
        scale = scale / (target != ignore_index).sum()
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else None
    total = None
    if needs[1]:
        total = torch.empty(weight.shape, dtype=accumulate or weight.dtype, device=weight.device)
        if rows == 0 or total.dtype != hidden.dtype:
            total.zero_()
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        part = torch.mm(hidden[start:stop], weight.T, out=logits[: stop - start])
        cross_entropy_gradient_(
            part, target[start:stop], losses[start:stop], scale, ignore_index, label_smoothing, own[start:stop]
        )
        if grad_hidden is not None:
            torch.mm(part, weight, out=grad_hidden[start:stop])
        if total is not None:
            if start == 0 and total.dtype == part.dtype:
                torch.mm(part.T, hidden[start:stop], out=total)
            else:
                _product_into(total, part.T, hidden[start:stop])
    target = target.contiguous()
    if grad_hidden is not None:
        add_at_rows_(grad_hidden, own, weight, target)
    if total is not None:
        add_by_target_(total, own, hidden, target)
    loss = _total(losses, target, ignore_index, reduction)
    return loss, grad_hidden, None if total is None else total.to(weight.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        ignore_index: int,
        label_smoothing: float,
        reduction: str,
        accumulate: torch.dtype | None,
        logits_bytes: int,
    ) -> torch.Tensor:
        options = (ignore_index, label_smoothing, reduction)
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        if not any(needs):
            return linear_cross_entropy_forward(hidden, weight, target, *options, logits_bytes)
        loss, *grads = linear_cross_entropy_gradients(hidden, weight, target, *options, accumulate, logits_bytes, needs)
        ctx.grads = grads
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("linear_cross_entropy: its gradients were handed out by an earlier backward")
        grads, ctx.grads = ctx.grads, None
        for grad in grads:
            if grad is not None:
                scale_(grad, grad_loss)
        return grads[0], grads[1], None, None, None, None, None, None


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    accumulate: torch.dtype | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> torch.Tensor:
    """Differentiable once; arguments as `linear_cross_entropy_gradients`.

    The gradients are computed in the forward, when either is needed, and handed out by the first backward; a second
    one raises RuntimeError.
    """
    loss: torch.Tensor = _LinearCrossEntropy.apply(
        hidden, weight, target, ignore_index, label_smoothing, reduction, accumulate, logits_bytes
    )
    return loss
