"""Cross entropy of a large vocabulary: loss without probabilities, and the gradient over the logits in place.

    lse_i  = log sum_j exp(x_ij) = m_i + log p_i        m_i = max_j x_ij, p_i = sum_j exp(x_ij - m_i)
    loss_i = (1 - s) * (lse_i - x_it) + s * (lse_i - mean_j x_ij)          s the label smoothing, t the target of row i
    grad   = scale_i * (exp(x_ij - lse_i) - (1 - s) * [j = t] - s / V)     scale_i 0 where the target is ignored

Bytes through device memory, per logit of e bytes:

    forward    plain  upcast (e + 4), log-softmax (4 + 4), gather: e + 12
               fused  read: 1e
    backward   plain  the gather's gradient (4), log-softmax's (8 + 4), downcast (4 + e): e + 20
               fused  read and write in place: 2e
    both at once (`cross_entropy_gradient_`): the row is read for its sum and read again for its gradient while the
    L2 holds it: between 2e and 3e

The plain way also holds two float32 copies of the logits, 8 bytes a logit; the fused way holds two float32 a row.

Design. The loss: one program a row, whose pass is the online softmax of `row_statistics`, with no barrier between
loads; ignored rows are not read. m and p stay apart to the end: their sum would be rounded to a unit of m, and where
logits lie far from zero that is far more than the loss and the probabilities can lose. The gradient where both are
known needs nothing of its neighbours: one program a piece of a row, loaded whole at its start. Both at once: one
program a row, whose second pass walks backwards and writes where it read. The mean is taken on the device, so nothing
waits for the host. Offsets are 64 bits wide between rows.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3; Szegedy et al.,
"Rethinking the Inception Architecture", 2016, section 7 (label smoothing).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from kernels._cross_entropy import backward_kernel, loss_and_gradient_kernel, loss_kernel, total_kernel
from kernels._rows import check_beside, check_float, check_width, on_device_of

MAX_COLUMNS = 2**20
REDUCTIONS = ("mean", "sum", "none")


class Launch(NamedTuple):
    """The shape of a launch of one program a row."""

    lanes: int
    vector: int  # elements a lane: 16 bytes
    unroll: int  # vectors a lane a turn
    warps: int
    ahead: bool = True  # the next turn's loads before this turn's arithmetic
    registers: int | None = None  # a thread at most

    def constants(self) -> dict[str, Any]:
        return {
            "LANES": self.lanes,
            "VECTOR": self.vector,
            "UNROLL": self.unroll,
            "AHEAD": self.ahead,
            "num_warps": self.warps,
            "maxnreg": self.registers,
        }


def launch_shape(columns: int, itemsize: int, *, gradient: bool) -> Launch:
    """Shapes by vocabulary, of the loss alone or with its gradient.

    The loss wants many narrow programs: their rows end at different times, so loads are always in flight. With the
    gradient the rows in hand must stay in the L2 between their two reads: fewer and wider programs.
    """
    kibibytes = columns * itemsize / 1024
    if gradient:
        warps, unroll = (16, 1) if kibibytes > 128 else (8, 2) if kibibytes > 32 else (2, 2)
    else:
        warps, unroll = (4, 2) if kibibytes > 128 else (2, 2) if kibibytes > 8 else (1, 1)
    return Launch(32 * warps, 16 // itemsize, unroll, warps)


def backward_shape(columns: int, itemsize: int) -> tuple[int, int]:
    """Columns and warps of a program that writes the gradient of one piece of a row: two 16-byte accesses a thread."""
    warps = 8 if columns * itemsize > 4096 else 2
    return 1024 * warps // itemsize, warps


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

    Returns loss (0-dimensional, or (rows,) for "none"), norm (rows, 2), what the backward needs of each row (its
    maximum, and the reciprocal of its sum of exponentials less that), and count (how many rows count), all float32.
    The mean over no row is NaN, as torch's. Raises ValueError naming the argument that is not supported.
    """
    logits, target = _check(logits, target, label_smoothing, reduction)
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    norm = torch.empty((rows, 2), dtype=torch.float32, device=logits.device)
    total = torch.empty((), dtype=torch.float32, device=logits.device)
    count = torch.empty_like(total)
    with on_device_of(logits):
        if rows:
            loss_kernel[(rows,)](
                logits,
                target,
                losses,
                norm,
                logits.stride(0),
                ignore_index,
                label_smoothing,
                SMOOTHED=label_smoothing > 0.0,
                COLUMNS=columns,
                **launch_shape(columns, logits.element_size(), gradient=False).constants(),
            )
        total_kernel[(1,)](
            losses, target, total, count, rows, ignore_index, MEAN=reduction == "mean", BLOCK=8192, num_warps=32
        )
    return losses if reduction == "none" else total, norm, count


def cross_entropy_backward(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    norm: torch.Tensor,
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
    for name, tensor, wanted in (("norm", norm, (rows, 2)), ("count", count, ())):
        if tuple(tensor.shape) != wanted or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: {tensor.dtype} of {tuple(tensor.shape)}; it must be contiguous float32 of {wanted}"
            )
    grad = logits if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if rows == 0:
        return grad
    block, warps = backward_shape(columns, logits.element_size())
    with on_device_of(logits):
        backward_kernel[(rows * triton.cdiv(columns, block),)](
            logits,
            grad,
            target,
            norm,
            grad_loss,
            count,
            logits.stride(0),
            grad.stride(0),
            grad_loss.stride(0) if reduction == "none" else 0,
            ignore_index,
            label_smoothing,
            MEAN=reduction == "mean",
            COLUMNS=columns,
            BLOCK=block,
            num_warps=warps,
        )
    return grad


def cross_entropy_gradient_(
    logits: torch.Tensor,
    target: torch.Tensor,
    losses: torch.Tensor,
    scale: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    own: torch.Tensor | None = None,
) -> None:
    """Overwrite the logits with scale times their gradient, and fill `losses` (rows,) with each row's loss.

    scale is a float32 scalar on the device (one over the count, for the mean). For callers that make the logits
    themselves and need them no more: one program reads a row twice while the caches hold it, and writes it once.
    With `own` (rows,) float32 the gradient is zero at each row's target, and own holds that element, unrounded: it is
    most of the gradient, and exact sums of it are cheap (see linear_cross_entropy).
    """
    logits, target = _check(logits, target, label_smoothing, "sum")
    rows, columns = logits.shape
    if tuple(losses.shape) != (rows,) or losses.dtype != torch.float32 or not losses.is_contiguous():
        raise ValueError(f"losses: {losses.dtype} of {tuple(losses.shape)}; it must be contiguous float32 of ({rows},)")
    if own is not None and (tuple(own.shape) != (rows,) or own.dtype != torch.float32 or not own.is_contiguous()):
        raise ValueError(f"own: {own.dtype} of {tuple(own.shape)}; it must be contiguous float32 of ({rows},)")
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"scale: {scale.dtype} of {tuple(scale.shape)}; it must be one float32")
    if rows == 0:
        return
    with on_device_of(logits):
        loss_and_gradient_kernel[(rows,)](
            logits,
            target,
            losses,
            losses if own is None else own,
            scale,
            logits.stride(0),
            ignore_index,
            label_smoothing,
            SMOOTHED=label_smoothing > 0.0,
            APART=own is not None,
            COLUMNS=columns,
            **launch_shape(columns, logits.element_size(), gradient=True).constants(),
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
        loss, norm, count = cross_entropy_forward(logits, target, ignore_index, label_smoothing, reduction)
        ctx.save_for_backward(logits, target, norm, count)
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
