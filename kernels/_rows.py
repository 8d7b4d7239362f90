"""What the row-wise kernels share: checks of their arguments, two-dimensional views, and the shape of a launch.

A row-wise kernel sees every tensor as (rows, columns) with unit column stride and any row stride. The checks
raise ValueError in terms of the caller's argument: its name, what it is, and what is supported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True when the kernels of this process run in Triton's interpreter, on CPU tensors."""

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_INTERPRETED_MULTIPROCESSORS = 3  # few and odd: a persistent loop then runs several uneven turns on tiny inputs


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless `tensor` is float32, float16 or bfloat16 on a device where kernels run."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name}: dtype {tensor.dtype} is not supported; use float32, float16 or bfloat16")
    check_device(name, tensor)


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the kernels of this process can run on the device of `tensor`."""
    if tensor.device.type != "cuda" and not (INTERPRETED and tensor.device.type == "cpu"):
        raise ValueError(
            f"{name}: is on {tensor.device}; the kernel needs a CUDA tensor "
            "(or TRITON_INTERPRET=1 in the environment before import, for CPU tensors)"
        )


def check_like(
    name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor, *, dtypes: Sequence[torch.dtype] = ()
) -> None:
    """Raise ValueError unless `tensor` has the shape and device of `other`, and its dtype or one of `dtypes`."""
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name}: shape {tuple(tensor.shape)} differs from {other_name}'s {tuple(other.shape)}; they must agree"
        )
    check_beside(name, tensor, other_name, other, dtypes=dtypes)


def check_vector(
    name: str,
    tensor: torch.Tensor,
    length: int,
    other_name: str,
    other: torch.Tensor,
    *,
    dtypes: Sequence[torch.dtype] = (),
) -> None:
    """Raise ValueError unless `tensor` is a contiguous vector of `length` beside `other` (device and dtype)."""
    if tuple(tensor.shape) != (length,):
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}; it must be ({length},) to go with {other_name}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: stride {tensor.stride()}; it must be contiguous, call .contiguous() first")
    check_beside(name, tensor, other_name, other, dtypes=dtypes)


def check_beside(
    name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor, *, dtypes: Sequence[torch.dtype] = ()
) -> None:
    """Raise ValueError unless `tensor` lies on the device of `other` in its dtype or one of `dtypes`."""
    allowed = (other.dtype, *dtypes)
    if tensor.dtype not in allowed:
        names = " or ".join(sorted({str(dtype) for dtype in allowed}))
        raise ValueError(f"{name}: dtype {tensor.dtype} does not go with {other_name}; use {names}")
    if tensor.device != other.device:
        raise ValueError(f"{name}: is on {tensor.device}, but {other_name} is on {other.device}")


def as_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """View `tensor` (..., columns) as (rows, columns) with unit column stride, without copying.

    Raises ValueError when that needs a copy: a hidden copy would move bytes that nobody counts.
    """
    if tensor.ndim == 0:
        raise ValueError(f"{name}: is a scalar; it needs at least one dimension")
    columns = tensor.shape[-1]
    if columns > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise ValueError(
            f"{name}: its last dimension has stride {tensor.stride(-1)}, only 1 is supported; call .contiguous() first"
        )
    rows = 1
    for size in tensor.shape[:-1]:
        rows *= size
    try:
        return tensor.view(rows, columns)
    except RuntimeError:
        raise ValueError(
            f"{name}: strides {tensor.stride()} of shape {tuple(tensor.shape)} do not flatten into evenly spaced "
            "rows; call .contiguous() first"
        ) from None


def check_width(name: str, columns: int, limit: int) -> None:
    """Raise ValueError unless a row has between 1 and `limit` columns."""
    if not 1 <= columns <= limit:
        raise ValueError(f"{name}: rows of {columns} elements are not supported; use 1 to {limit}")


@lru_cache(maxsize=64)
def _cuda_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def multiprocessors(device: torch.device) -> int:
    """How many streaming multiprocessors a persistent grid on `device` is made for."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return _cuda_multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the device of `tensor` current: Triton launches on the current device, not on its arguments'."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def as_lines(**tensors: torch.Tensor) -> list[torch.Tensor]:
    """Two-dimensional views for a kernel that works element by element: one long row where all are contiguous.

    Raises ValueError as `as_rows`.
    """
    rows = [as_rows(name, tensor) for name, tensor in tensors.items()]
    if all(view.is_contiguous() for view in rows):
        return [view.view(1, -1) for view in rows]
    return rows
