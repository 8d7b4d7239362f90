"""The Triton kernels of `kernels.cross_entropy`: the loss, its sum, and the gradient with and without the loss."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._online import row_statistics


@triton.jit
def loss_kernel(
    logits_ptr,
    target_ptr,
    loss_ptr,
    norm_ptr,
    stride,
    ignore_index,
    smoothing,
    SMOOTHED: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The loss of one row, its maximum and the reciprocal of its sum of exponentials less that, read once."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(norm_ptr + 2 * row, 0.0)
        tl.store(norm_ptr + 2 * row + 1, 0.0)
    else:
        logits_row = logits_ptr + row * stride
        right = _logit_of(logits_row, target, COLUMNS)
        base = _base_of(logits_row, SMOOTHED)
        maximum, power, total = row_statistics(logits_row, COLUMNS, LANES, VECTOR, UNROLL, AHEAD, SMOOTHED, base)
        tl.store(loss_ptr + row, _loss_of(maximum, power, base, total, right, smoothing, SMOOTHED, COLUMNS))
        tl.store(norm_ptr + 2 * row, maximum)
        tl.store(norm_ptr + 2 * row + 1, 1.0 / power)


@triton.jit
def _logit_of(logits_row, target, COLUMNS: tl.constexpr):
    """The logit of the target; NaN where the target is no column of the row."""
    inside = (target >= 0) & (target < COLUMNS)
    return tl.load(logits_row + target, mask=inside, other=float("nan")).to(tl.float32)


@triton.jit
def _base_of(logits_row, SMOOTHED: tl.constexpr):
    """What a row's sum is taken less of, so that its mean is right far from zero too: its first logit, if finite."""
    base = 0.0
    if SMOOTHED:
        first = tl.load(logits_row).to(tl.float32)
        base = tl.where(tl.abs(first) < float("inf"), first, 0.0)
    return base


@triton.jit
def _loss_of(maximum, power, base, total, right, smoothing, SMOOTHED: tl.constexpr, COLUMNS: tl.constexpr):
    # Differences of logits first: maximum + log(power) would round to a unit of the maximum, however small the loss.
    loss = maximum - right
    if SMOOTHED:
        loss = (1.0 - smoothing) * loss + smoothing * ((maximum - base) - total / COLUMNS)
    return loss + tl.log(power)


@triton.jit
def _gradient_of(x, column, maximum, inverse, target, scale, smoothing, COLUMNS: tl.constexpr, APART: tl.constexpr):
    """scale * (softmax - smoothed target); with APART zero at the target, whose element is kept elsewhere."""
    share = tl.exp(x.to(tl.float32) - maximum) * inverse - smoothing / COLUMNS
    return scale * tl.where(column == target, 0.0 if APART else share - (1.0 - smoothing), share)


@triton.jit
def backward_kernel(
    logits_ptr,
    grad_ptr,
    target_ptr,
    norm_ptr,
    scale_ptr,
    count_ptr,
    stride,
    grad_stride,
    scale_stride,
    ignore_index,
    smoothing,
    MEAN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of one piece of a row whose norm is known, perhaps where the logits were."""
    PIECES: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    column = (tl.program_id(0) % PIECES) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < COLUMNS
    grad_here = grad_ptr + row * grad_stride + column
    target = tl.load(target_ptr + row).to(tl.int64)
    if target == ignore_index:
        zeros = tl.zeros((BLOCK,), dtype=grad_ptr.dtype.element_ty)
        tl.store(grad_here, zeros, mask=in_row)
    else:
        x = tl.load(logits_ptr + row * stride + column, mask=in_row, other=0.0)
        maximum = tl.load(norm_ptr + 2 * row)
        inverse = tl.load(norm_ptr + 2 * row + 1)
        scale = tl.load(scale_ptr + row * scale_stride)
        if MEAN:
            scale /= tl.load(count_ptr)
        grad = _gradient_of(x, column, maximum, inverse, target, scale, smoothing, COLUMNS, False)
        tl.store(grad_here, grad.to(grad_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def loss_and_gradient_kernel(
    logits_ptr,
    target_ptr,
    loss_ptr,
    own_ptr,
    scale_ptr,
    stride,
    ignore_index,
    smoothing,
    SMOOTHED: tl.constexpr,
    APART: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The loss of one row, then its gradient over it, from the end of the row: what the caches saw last.

    With APART the gradient is zero at the target, whose own element goes to own_ptr, unrounded.
    """
    BLOCK: tl.constexpr = UNROLL * LANES * VECTOR
    FULL: tl.constexpr = COLUMNS // BLOCK
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits_ptr + row * stride
    offset = tl.arange(0, BLOCK)
    element = logits_ptr.dtype.element_ty
    target = tl.load(target_ptr + row).to(tl.int64)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if APART:
            tl.store(own_ptr + row, 0.0)
        zeros = tl.zeros((BLOCK,), dtype=element)
        for turn in range(FULL + 1):
            column = turn * BLOCK + offset
            tl.store(logits_row + column, zeros, mask=column < COLUMNS, eviction_policy="evict_first")
    else:
        scale = tl.load(scale_ptr)
        # Before the row is read: the barriers that follow keep every write of the gradient behind this load.
        right = _logit_of(logits_row, target, COLUMNS)
        base = _base_of(logits_row, SMOOTHED)
        maximum, power, total = row_statistics(logits_row, COLUMNS, LANES, VECTOR, UNROLL, AHEAD, SMOOTHED, base)
        inverse = 1.0 / power
        tl.store(loss_ptr + row, _loss_of(maximum, power, base, total, right, smoothing, SMOOTHED, COLUMNS))
        if APART:
            own = scale * (tl.exp(right - maximum) * inverse - smoothing / COLUMNS - (1.0 - smoothing))
            tl.store(own_ptr + row, tl.where((target >= 0) & (target < COLUMNS), own, 0.0))
        if FULL > 0:
            x_next = tl.load(logits_row + (FULL - 1) * BLOCK + offset, eviction_policy="evict_first")
        if FULL * BLOCK < COLUMNS:
            column = FULL * BLOCK + offset
            x = tl.load(logits_row + column, mask=column < COLUMNS, other=0.0, eviction_policy="evict_first")
            grad = _gradient_of(x, column, maximum, inverse, target, scale, smoothing, COLUMNS, APART)
            tl.store(logits_row + column, grad.to(element), mask=column < COLUMNS, eviction_policy="evict_first")
        if FULL > 0:
            for turn in range(1, FULL):
                x = x_next
                x_next = tl.load(logits_row + (FULL - 1 - turn) * BLOCK + offset, eviction_policy="evict_first")
                column = (FULL - turn) * BLOCK + offset
                grad = _gradient_of(x, column, maximum, inverse, target, scale, smoothing, COLUMNS, APART)
                tl.store(logits_row + column, grad.to(element), eviction_policy="evict_first")
            grad = _gradient_of(x_next, offset, maximum, inverse, target, scale, smoothing, COLUMNS, APART)
            tl.store(logits_row + offset, grad.to(element), eviction_policy="evict_first")


@triton.jit
def total_kernel(loss_ptr, target_ptr, out_ptr, count_ptr, rows, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Sum or mean of the losses, and how many targets count, in one program, a fixed order and float64."""
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    row = tl.arange(0, BLOCK)
    start = tl.program_id(0)
    while start < rows:
        mask = start + row < rows
        loss = tl.load(loss_ptr + start + row, mask=mask, other=0.0)
        target = tl.load(target_ptr + start + row, mask=mask, other=0).to(tl.int64)
        total += loss.to(tl.float64)
        count += (mask & (target != ignore_index)).to(tl.int32)
        start += BLOCK
    counted = tl.sum(count, axis=0)
    loss = tl.sum(total, axis=0)
    if MEAN:
        loss /= counted.to(tl.float64)
    tl.store(out_ptr, loss.to(tl.float32))
    tl.store(count_ptr, counted.to(tl.float32))
