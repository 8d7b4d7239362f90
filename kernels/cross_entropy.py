"""Cross entropy of a large vocabulary: loss without probabilities, and the gradient over the logits in place.

    lse_i  = log sum_j exp(x_ij)
    loss_i = (1 - s) * (lse_i - x_it) + s * (lse_i - mean_j x_ij)          s the label smoothing, t the target of row i
    grad   = scale_i * (exp(x_ij - lse_i) - (1 - s) * [j = t] - s / V)     scale_i 0 where the target is ignored

Bytes through device memory, per logit of e bytes:

    forward    plain  upcast (e + 4), log-softmax (4 + 4), gather: e + 12
               fused  read: 1e
    backward   plain  log-softmax's gradient (8 + 4), downcast (4 + e): e + 16
               fused  read and write in place: 2e
    both at once (`cross_entropy_gradient_`): the row is read for its sum and read again for its gradient while the
    L2 holds it: between 2e and 3e

The plain way also holds two float32 copies of the logits, 8 bytes a logit; the fused way holds one float32 a row.

Design. One wide program a row at a time. Its first pass is the online softmax of `row_statistics`, with no barrier
between loads; ignored rows are not read. The second pass walks backwards and writes where it read. The mean is taken
on the device, so nothing waits for the host. Offsets are 64 bits wide between rows.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3; Szegedy et al.,
"Rethinking the Inception Architecture", 2016, section 7 (label smoothing).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels._rows import check_beside, check_float, check_width, multiprocessors, on_device_of
from kernels._online import row_statistics

MAX_COLUMNS = 2**20
REDUCTIONS = ("mean", "sum", "none")


@triton.jit
def _loss_kernel(
    logits_ptr,
    target_ptr,
    loss_ptr,
    lse_ptr,
    rows,
    stride,
    ignore_index,
    smoothing,
    SMOOTHED: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        target = tl.load(target_ptr + row).to(tl.int64)
        if target == ignore_index:
            tl.store(loss_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
        else:
            logits_row = logits_ptr + row * stride
            maximum, power, total = row_statistics(logits_row, COLUMNS, LANES, VECTOR, 1, True, SMOOTHED, True)
            lse = maximum + tl.log(power)
            loss = _loss_of(lse, total, logits_row, target, smoothing, SMOOTHED, COLUMNS)
            tl.store(loss_ptr + row, loss)
            tl.store(lse_ptr + row, lse)
        row += tl.num_programs(0)


@triton.jit
def _loss_of(lse, total, logits_row, target, smoothing, SMOOTHED: tl.constexpr, COLUMNS: tl.constexpr):
    """The loss of one row; NaN where the target is no column of it."""
    inside = (target >= 0) & (target < COLUMNS)
    right = tl.load(logits_row + target, mask=inside, other=float("nan")).to(tl.float32)
    loss = lse - right
    if SMOOTHED:
        loss = (1.0 - smoothing) * loss + smoothing * (lse - total / COLUMNS)
    return loss


@triton.jit
def _write_gradient(
    logits_row,
    grad_row,
    lse,
    target,
    scale,
    smoothing,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The second pass, from the end of the row: scale * (softmax - smoothed target)."""
    offset = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    TURNS: tl.constexpr = (COLUMNS + LANES * VECTOR - 1) // (LANES * VECTOR)
    back = offset + (TURNS - 1) * (LANES * VECTOR)
    x_next = tl.load(logits_row + back, mask=back < COLUMNS, other=0.0, eviction_policy="evict_first")
    spread = smoothing / COLUMNS
    for turn in range(TURNS):
        x = x_next.to(tl.float32)
        here = offset + (TURNS - 1 - turn) * (LANES * VECTOR)
        back = here - LANES * VECTOR
        x_next = tl.load(
            logits_row + back, mask=(back >= 0) & (back < COLUMNS), other=0.0, eviction_policy="evict_first"
        )
        share = tl.exp(x - lse) - spread
        share = tl.where(here == target, share - (1.0 - smoothing), share)
        grad = (scale * share).to(grad_row.dtype.element_ty)
        tl.store(grad_row + here, grad, mask=here < COLUMNS, eviction_policy="evict_first")


@triton.jit
def _write_zeros(grad_row, COLUMNS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    offset = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    zeros = tl.zeros((LANES, VECTOR), dtype=tl.float32).to(grad_row.dtype.element_ty)
    for turn in range((COLUMNS + LANES * VECTOR - 1) // (LANES * VECTOR)):
        here = offset + turn * (LANES * VECTOR)
        tl.store(grad_row + here, zeros, mask=here < COLUMNS, eviction_policy="evict_first")


@triton.jit
def _gradient_kernel(
    logits_ptr,
    grad_ptr,
    target_ptr,
    loss_ptr,
    lse_ptr,
    scale_ptr,
    count_ptr,
    rows,
    stride,
    grad_stride,
    scale_stride,
    ignore_index,
    smoothing,
    SMOOTHED: tl.constexpr,
    WITH_LOSS: tl.constexpr,
    MEAN: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        target = tl.load(target_ptr + row).to(tl.int64)
        logits_row = logits_ptr + row * stride
        grad_row = grad_ptr + row * grad_stride
        if target == ignore_index:
            if WITH_LOSS:
                tl.store(loss_ptr + row, 0.0)
            _write_zeros(grad_row, COLUMNS, LANES, VECTOR)
        else:
            scale = tl.load(scale_ptr + row * scale_stride).to(tl.float32)
            if MEAN:
                scale /= tl.load(count_ptr)
            if WITH_LOSS:
                maximum, power, total = row_statistics(logits_row, COLUMNS, LANES, VECTOR, 1, True, SMOOTHED, True)
                lse = maximum + tl.log(power)
                tl.store(loss_ptr + row, _loss_of(lse, total, logits_row, target, smoothing, SMOOTHED, COLUMNS))
            else:
                lse = tl.load(lse_ptr + row)
            _write_gradient(logits_row, grad_row, lse, target, scale, smoothing, COLUMNS, LANES, VECTOR)
        row += tl.num_programs(0)


@triton.jit
def _total_kernel(
    loss_ptr, target_ptr, out_ptr, count_ptr, rows, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum or mean of the losses, and how many targets count, in one program, a fixed order and float64."""
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    row = tl.arange(0, BLOCK)
    start = tl.program_id(0)
    while start < rows:
        mask = start + row < rows
        total += tl.load(loss_ptr + start + row, mask=mask, other=0.0).to(tl.float64)
        target = tl.load(target_ptr + start + row, mask=mask, other=0).to(tl.int64)
        count += (mask & (target != ignore_index)).to(tl.int32)
        start += BLOCK
    counted = tl.sum(count, axis=0)
    loss = tl.sum(total, axis=0)
    if MEAN:
        loss /= counted.to(tl.float64)
    tl.store(out_ptr, loss.to(tl.float32))
    tl.store(count_ptr, counted.to(tl.float32))


def _shape(columns: int, itemsize: int) -> dict[str, int]:
    """Lanes, elements a lane and warps by vocabulary: two 16-byte accesses for each of up to 512 threads."""
    vector = 16 // itemsize
    lanes = max(64, min(1024, triton.next_power_of_2(triton.cdiv(columns, vector))))
    return {"LANES": lanes, "VECTOR": vector, "num_warps": max(1, lanes // 64)}


def _programs(device: torch.device, warps: int, warps_resident: int) -> int:
    return multiprocessors(device) * max(1, warps_resident // warps)


def check_labels(
    target: torch.Tensor, rows: int, other_name: str, other: torch.Tensor, label_smoothing: float, reduction: str
) -> None:
    """Raise ValueError unless target is (rows,) class indices beside `other`, and both options are known."""
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target: dtype {target.dtype} is not supported; use int64 or int32 class indices")
    if tuple(target.shape) != (rows,):
        raise ValueError(f"target: shape {tuple(target.shape)}; it must be ({rows},) to go with {other_name}")
    if target.device != other.device:
        raise ValueError(f"target: is on {target.device}, but {other_name} is on {other.device}")
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing: {label_smoothing} is out of range; use 0 up to, not including, 1")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: {reduction!r} is not known; use 'mean', 'sum' or 'none'")


def _check(
    logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    check_float("logits", logits)
    if logits.ndim != 2:
        raise ValueError(f"logits: shape {tuple(logits.shape)}; it must be (rows, vocabulary): flatten it first")
    check_width("logits", logits.shape[1], MAX_COLUMNS)
    if logits.shape[1] > 1 and logits.stride(1) != 1 and logits.numel():
        raise ValueError(f"logits: its last dimension has stride {logits.stride(1)}, only 1 is supported")
    check_labels(target, logits.shape[0], "logits", logits, label_smoothing, reduction)
    return logits, target.contiguous()


def cross_entropy_forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, one read of the logits.

    logits  (rows, vocabulary), float32, float16 or bfloat16, any row stride, 1 to 2**20 columns
    target  (rows,), int64 or int32; rows whose target is `ignore_index` count for nothing and are not read; a target
            outside the vocabulary makes the loss NaN

    Returns loss (0-dimensional, or (rows,) for "none"), lse (rows,) and count (how many rows count), all float32. The
    mean over no row is NaN, as torch's. Raises ValueError naming the argument that is not supported.
    """
    logits, target = _check(logits, target, label_smoothing, reduction)
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    total = torch.empty((), dtype=torch.float32, device=logits.device)
    count = torch.empty_like(total)
    shape = _shape(columns, logits.element_size())
    with on_device_of(logits):
        if rows:
            _loss_kernel[(min(rows, _programs(logits.device, shape["num_warps"], 32)),)](
                logits,
                target,
                losses,
                lse,
                rows,
                logits.stride(0),
                ignore_index,
                label_smoothing,
                SMOOTHED=label_smoothing > 0.0,
                COLUMNS=columns,
                **shape,
            )
        _total_kernel[(1,)](
            losses, target, total, count, rows, ignore_index, MEAN=reduction == "mean", BLOCK=4096, num_warps=8
        )
    return losses if reduction == "none" else total, lse, count


def cross_entropy_backward(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    count: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    inplace: bool = False,
) -> torch.Tensor:
    """The gradient of the logits from that of the loss; with `inplace`, written over the logits and returned.

    grad_loss is 0-dimensional, or (rows,) for "none", float32; the rest as `cross_entropy_forward` took and returned.
    """
    logits, target = _check(logits, target, label_smoothing, reduction)
    rows, columns = logits.shape
    expected = (rows,) if reduction == "none" else ()
    check_beside("grad_loss", grad_loss, "logits", logits, dtypes=(torch.float32,))
    if tuple(grad_loss.shape) != expected:
        raise ValueError(f"grad_loss: shape {tuple(grad_loss.shape)}; it must be {expected} for {reduction!r}")
    for name, tensor, wanted in (("lse", lse, (rows,)), ("count", count, ())):
        if tuple(tensor.shape) != wanted or tensor.dtype != torch.float32:
            raise ValueError(f"{name}: {tensor.dtype} of {tuple(tensor.shape)}; it must be float32 of {wanted}")
    grad = logits if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if rows == 0:
        return grad
    shape = _shape(columns, logits.element_size())
    with on_device_of(logits):
        _gradient_kernel[(min(rows, _programs(logits.device, shape["num_warps"], 32)),)](
            logits,
            grad,
            target,
            lse,
            lse,
            grad_loss,
            count,
            rows,
            logits.stride(0),
            grad.stride(0),
            grad_loss.stride(0) if reduction == "none" else 0,
            ignore_index,
            label_smoothing,
            SMOOTHED=label_smoothing > 0.0,
            WITH_LOSS=False,
            MEAN=reduction == "mean",
            COLUMNS=columns,
            **shape,
        )
    return grad


def cross_entropy_gradient_(
    logits: torch.Tensor,
    target: torch.Tensor,
    losses: torch.Tensor,
    scale: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> None:
    """Overwrite the logits with scale times their gradient, and fill `losses` (rows,) with each row's loss.

    scale is a float32 scalar on the device (one over the count, for the mean). For callers that make the logits
    themselves and need them no more: one program reads a row twice while the caches hold it, and writes it once.
    """
    logits, target = _check(logits, target, label_smoothing, "sum")
    rows, columns = logits.shape
    if tuple(losses.shape) != (rows,) or losses.dtype != torch.float32 or not losses.is_contiguous():
        raise ValueError(f"losses: {losses.dtype} of {tuple(losses.shape)}; it must be contiguous float32 of ({rows},)")
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"scale: {scale.dtype} of {tuple(scale.shape)}; it must be one float32")
    if rows == 0:
        return
    shape = _shape(columns, logits.element_size())
    with on_device_of(logits):
        # Half the programs that fit: the rows in hand must stay in the L2 between the two reads.
        _gradient_kernel[(min(rows, _programs(logits.device, shape["num_warps"], 16)),)](
            logits,
            logits,
            target,
            losses,
            losses,
            scale,
            scale,
            rows,
            logits.stride(0),
            logits.stride(0),
            0,
            ignore_index,
            label_smoothing,
            SMOOTHED=label_smoothing > 0.0,
            WITH_LOSS=True,
            MEAN=False,
            COLUMNS=columns,
            **shape,
        )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignore_index: int,
        label_smoothing: float,
        reduction: str,
        inplace: bool,
    ) -> torch.Tensor:
        loss, lse, count = cross_entropy_forward(logits, target, ignore_index, label_smoothing, reduction)
        ctx.save_for_backward(logits, target, lse, count)
        ctx.options = (ignore_index, label_smoothing, reduction, inplace)
        ctx.spent = False
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                "cross_entropy: this backward already wrote the gradient over the logits; "
                "pass inplace=False to run it more than once"
            )
        ctx.spent = ctx.options[-1]
        logits, *rest = ctx.saved_tensors
        return cross_entropy_backward(grad_loss, logits.detach(), *rest, *ctx.options), None, None, None, None, None


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    inplace: bool = False,
) -> torch.Tensor:
    """Differentiable once; arguments as `cross_entropy_forward`.

    With `inplace` the backward writes the gradient over the logits, which saves their size in memory and may be done
    once: a second backward raises RuntimeError.
    """
    loss: torch.Tensor = _CrossEntropy.apply(logits, target, ignore_index, label_smoothing, reduction, inplace)
    return loss
