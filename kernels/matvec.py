"""A matrix times one vector: the linear layers of decode at batch 1.

    out[n] = Σ_k weight[n, k] · x[k]

Bytes: N · K · itemsize for the weight, read once; vector and result are below 0.1 %. At 4.16 TB/s a product of 14336 by
4096 in bfloat16 (117 MB) takes 28 µs. Two FLOPs an element: nothing but memory binds, and the aim is to keep enough
loads in flight at every moment of the launch, its ends included.

Design. A program takes a few rows and walks along them in wide tiles, the next tile's loads issued before the present
one is used; products stay in registers element by element, and are summed across threads once, at the end. Several
programs a multiprocessor are resident, so that one's end hides behind another's middle, and there are many more
programs than fit at once, so that the last ones are short. The order of summation is fixed: the result is the same to
the bit from run to run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels._rows import check_float, on_device_of


class Launch(NamedTuple):
    """The shape of one launch; the one place to tune."""

    rows: int  # of the weight, a program
    block: int  # columns a tile
    warps: int


def launch_shape(columns: int, itemsize: int) -> Launch:
    """Tiles of 8 KiB: four 16-byte loads a thread for the present tile and as many for the next."""
    block = max(16, min(1024 // itemsize, triton.next_power_of_2(columns)))
    return Launch(rows=max(1, 8192 // (block * itemsize)), block=block, warps=4)


@triton.jit
def matvec_kernel(
    x_ptr, weight_ptr, out_ptr, rows, columns, weight_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    real = row < rows
    start_of_row = weight_ptr + row[:, None] * weight_stride
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    inside = real[:, None] & (lane < columns)[None, :]
    following = tl.load(start_of_row + lane[None, :], mask=inside, other=0.0)
    for start in tl.range(0, columns, BLOCK):
        tile = following
        column = start + BLOCK + lane
        inside = real[:, None] & (column < columns)[None, :]
        following = tl.load(start_of_row + column[None, :], mask=inside, other=0.0)
        x = tl.load(x_ptr + start + lane, mask=start + lane < columns, other=0.0)
        acc += tile.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(out_ptr + row, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), mask=real)


def matvec(x_K: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """The product (N,), summed in float32, in the dtype of the arguments.

    Args:
        x_K: float32, float16 or bfloat16, contiguous.
        weight_NK: the same dtype; rows contiguous, any stride between them.

    Raises:
        ValueError: a shape, stride, dtype or device outside what is said here; the argument is named.
    """
    check_float("x", x_K)
    if x_K.ndim != 1 or not x_K.is_contiguous():
        raise ValueError(f"x: shape {tuple(x_K.shape)}, strides {x_K.stride()}; one contiguous vector is needed")
    if weight_NK.ndim != 2 or weight_NK.shape[1] != x_K.shape[0] or weight_NK.stride(1) != 1:
        raise ValueError(
            f"weight: shape {tuple(weight_NK.shape)}, strides {weight_NK.stride()}; contiguous rows of {x_K.shape[0]}"
        )
    if weight_NK.dtype != x_K.dtype or weight_NK.device != x_K.device:
        raise ValueError(f"weight: {weight_NK.dtype} on {weight_NK.device} does not go with x in {x_K.dtype}")
    rows, columns = weight_NK.shape
    out = torch.empty(rows, dtype=x_K.dtype, device=x_K.device)
    if rows:
        shape = launch_shape(columns, x_K.element_size())
        with on_device_of(x_K):
            matvec_kernel[(triton.cdiv(rows, shape.rows),)](
                x_K, weight_NK, out, rows, columns, weight_NK.stride(0),
                ROWS=shape.rows, BLOCK=shape.block, num_warps=shape.warps,
            )  # fmt: skip
    return out
