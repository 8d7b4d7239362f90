"""LayerNorm, dropout and residual add in one pass each way.

    normed = (x - mean) * rstd * weight + bias,        rstd = 1 / sqrt(variance + eps), one a row
    out    = residual + normed * keep / (1 - p)

Bytes through device memory, per element of e bytes (p > 0, mask m = 1 byte an element where it is stored):

    forward    plain  layer_norm (2e) + dropout (2e + m) + add (3e): 7e + m
               fused  read x and residual, write out: 3e
    backward   plain  dropout (2e + m) + layer_norm (3e, and two reductions that read 2e again): 7e + m
               fused  read grad_out and x, write grad_x: 3e; the gradient of residual is grad_out itself

Dropout. The mask is a function of (seed, row, column) and is made again in the backward instead of being stored
(kernels/dropout_mask.py): Philox-4x32-7, eight neighbouring elements a call. The rate is p to the nearest multiple of
2⁻¹⁶, exactly, and the scale is the reciprocal of that keep rate.

Arithmetic binds as soon as it is not counted: at the speed of an H200's memory its schedulers issue 41 instructions for
an element of bfloat16 each way, and half of that must suffice, since an instruction also waits. Forward and backward
take 20 to 21 and 25 (21 where a thread has 32 elements): 3.5 and 2.6 of them are Philox's (the backward makes once what
depends on columns alone), 2.5 the choice by the draw, one for each bfloat16 number widened, the rest the formula's.

Design. Tiles of whole rows are held in registers, so a row is read once. In the forward a program takes one tile: all
its loads are issued at the start, the mask is made while they are on their way, and the programs that are resident
hide each other's latency. The backward is persistent, with the weight and its two sums in registers, and the next tile
is on its way to shared memory while the present one is computed; each program writes one partial row of both sums, no
atomics, and two programs a multiprocessor wait at barriers in turn. Loads carry no cache hints: on Hopper evict-first
loads are several percent slower.

Sums along a row cost a barrier each, so both of a row are taken at once. The forward's are those of x - x₀ and
(x - x₀)², x₀ the row's first element: variance = E[(x - x₀)²] - E[x - x₀]², which cancels no more than
1 + ((mean - x₀) / deviation)² allows, a handful for a row of the kind that is normalised and never more than the row's
length, which costs about a rounding of float16. float32 rows take mean and variance in two passes over registers.

Sources: Ba, Kiros and Hinton, "Layer Normalization", 2016, section 3; Srivastava et al., "Dropout", 2014, section
10; Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011, section 3.3 and table 2 (Philox, 7 rounds).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from kernels._layer_norm_dropout_add import backward_kernel, forward_kernel
from kernels._rows import (
    as_rows,
    check_beside,
    check_float,
    check_like,
    check_vector,
    check_width,
    multiprocessors,
    on_device_of,
)
from kernels._tiles import sum_rows
from kernels.dropout_mask import GROUP, ROUNDS, check_rows, check_seed, drop_threshold, keep_scale

MAX_COLUMNS = 16_384
_SHARED_BYTES = 200 * 1024  # of the 227 KiB that a program can have


class Launch(NamedTuple):
    """The shape of one launch, by row length; the one place to tune."""

    tile_rows: int
    block: int  # columns padded to a power of two, at least one Philox group
    warps: int
    registers: int  # a thread
    chunks: int = 1  # that a row is cut in: block / chunks / 256 warps share a row
    stages: int = 1  # of the backward: 0 the next tile in registers; else in hand, one that is freed, and on their way
    programs: int = 1  # of the backward, a multiprocessor


#: What `python3 -m benchmarks.launch_shapes layer_norm_dropout_add` found best on an H200, for 16 bits by block.
_FORWARD = {
    1024: Launch(1, 1024, 1, 96),
    4096: Launch(1, 4096, 4, 96),
    8192: Launch(1, 8192, 8, 80),
}
_BACKWARD = {
    1024: Launch(1, 1024, 2, 128, 1, 3, 8),
    4096: Launch(1, 4096, 8, 128, 1, 3, 2),
    8192: Launch(1, 8192, 16, 128, 1, 4),
}


def launch_shape(columns: int, itemsize: int, *, backward: bool) -> Launch:
    """What was measured, and for other rows what was expected before that.

    A forward of 4,096 elements has 96 registers a thread and five resident programs, one of 8,192 has 80 and three:
    measured ahead of fewer programs with more registers, though at 8,192 a few values then live outside them.

    Forward: 64 bytes of a row a thread, which takes the fewest instructions.

    Backward: two programs a multiprocessor, tiles of 4,096 elements for 256 threads; where a tile has several rows a
    warp stays on one. Rows past 4,096 elements take one program of 512 threads. Rows past 8,192 elements spill in the
    backward, where the sums alone fill half of the registers, and in the forward of float32.
    """
    block = max(GROUP, triton.next_power_of_2(columns))
    measured = (_BACKWARD if backward else _FORWARD).get(block)
    if measured is not None and itemsize == 2:
        return measured
    if backward:
        tile_rows = max(1, 4096 // block)
        programs = 2 if block <= 4096 else 1
        chunks = 2 if 1 < tile_rows <= 8 and itemsize == 2 else 1
        stages = 3 if programs * 2 * 2 * tile_rows * block * itemsize <= _SHARED_BYTES else 1
        return Launch(tile_rows, block, 16 // programs, 128, chunks, stages, programs)
    tile_rows = max(1, 1024 // block)
    return Launch(tile_rows, block, min(16, max(1, tile_rows * block * itemsize // 2048)), 128)


def in_pairs(launch: Launch) -> bool:
    """Whether every thread has an even number of a tile's elements, and of a row's."""
    return launch.block >= 64 * launch.warps


def one_pass(dtype: torch.dtype) -> bool:
    """Whether the forward takes both sums of a row at once."""
    return dtype != torch.float32


def layer_norm_dropout_add_forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    p: float,
    seed: int,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual + dropout(layer_norm(x)).

    x, residual   (..., columns), float32, float16 or bfloat16, evenly strided rows of 1 to 16,384 elements
    weight, bias  (columns,), contiguous, the dtype of x or float32
    p             the rate of dropping, taken to the nearest multiple of 2⁻¹⁶
    seed          0 to 2**63 - 1; the same seed gives the same mask

    Returns out (like x, contiguous), mean and rstd (rows,) in float32. Raises ValueError naming the argument at fault.
    """
    check_float("x", x)
    check_like("residual", residual, "x", x)
    x_rows, residual_rows = as_rows("x", x), as_rows("residual", residual)
    rows, columns = x_rows.shape
    check_width("x", columns, MAX_COLUMNS)
    check_rows(rows)
    check_vector("weight", weight, columns, "x", x, dtypes=(torch.float32,))
    check_vector("bias", bias, columns, "x", x, dtypes=(torch.float32,))
    threshold = drop_threshold(p)
    check_seed(seed)

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    if rows == 0:
        return out, mean, rstd
    launch = launch_shape(columns, x.element_size(), backward=False)
    grid = (triton.cdiv(rows, launch.tile_rows),)
    with on_device_of(x):
        forward_kernel[grid](
            x_rows,
            residual_rows,
            weight,
            bias,
            out,
            mean,
            rstd,
            rows,
            x_rows.stride(0),
            residual_rows.stride(0),
            eps,
            seed,
            threshold,
            keep_scale(p),
            DROP=threshold > 0,
            COLUMNS=columns,
            BLOCK=launch.block,
            ROWS=launch.tile_rows,
            CHUNKS=launch.chunks,
            EVEN=rows % launch.tile_rows == 0,
            ONE_PASS=one_pass(x.dtype),
            PAIRS=in_pairs(launch),
            ROUNDS=ROUNDS,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )
    return out, mean, rstd


def layer_norm_dropout_add_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    p: float,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients (grad_x like x; grad_weight and grad_bias in the dtype of weight); residual's is grad_out itself.

    Arguments as the forward took and returned them, with the same p and seed.
    """
    check_float("x", x)
    check_like("grad_out", grad_out, "x", x)
    x_rows, grad_rows = as_rows("x", x), as_rows("grad_out", grad_out)
    rows, columns = x_rows.shape
    check_width("x", columns, MAX_COLUMNS)
    check_rows(rows)
    check_vector("weight", weight, columns, "x", x, dtypes=(torch.float32,))
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        if tuple(statistic.shape) != (rows,) or statistic.dtype != torch.float32:
            raise ValueError(f"{name}: {statistic.dtype} of {tuple(statistic.shape)}; it must be float32 of ({rows},)")
        check_beside(name, statistic, "x", x, dtypes=(torch.float32,))
    threshold = drop_threshold(p)
    check_seed(seed)

    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows == 0:
        return grad_x, torch.zeros_like(weight), torch.zeros_like(weight)
    launch = launch_shape(columns, x.element_size(), backward=True)
    grid = (min(triton.cdiv(rows, launch.tile_rows), launch.programs * multiprocessors(x.device)),)
    partial = torch.empty((grid[0], 2 * columns), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        backward_kernel[grid](
            grad_rows,
            x_rows,
            weight,
            mean,
            rstd,
            grad_x,
            partial,
            rows,
            grad_rows.stride(0),
            x_rows.stride(0),
            seed,
            threshold,
            keep_scale(p),
            DROP=threshold > 0,
            COLUMNS=columns,
            BLOCK=launch.block,
            ROWS=launch.tile_rows,
            CHUNKS=launch.chunks,
            EVEN=rows % launch.tile_rows == 0,
            PAIRS=in_pairs(launch),
            ROUNDS=ROUNDS,
            STAGES=launch.stages,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )
        grad_weight, grad_bias = sum_rows(partial, weight.dtype).split(columns)
    return grad_x, grad_weight, grad_bias


class _LayerNormDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        p: float,
        seed: int,
        eps: float,
    ) -> torch.Tensor:
        out, mean, rstd = layer_norm_dropout_add_forward(x, residual, weight, bias, p, seed, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.draw = (p, seed)
        ctx.bias_dtype = bias.dtype
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x, grad_weight, grad_bias = layer_norm_dropout_add_backward(
            grad_out.contiguous(), *ctx.saved_tensors, *ctx.draw
        )
        return grad_x, grad_out, grad_weight, grad_bias.to(ctx.bias_dtype), None, None, None


def layer_norm_dropout_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    p: float,
    seed: int,
    eps: float = 1e-5,
) -> torch.Tensor:
    """residual + dropout(layer_norm(x)), differentiable once; arguments as `layer_norm_dropout_add_forward`."""
    out: torch.Tensor = _LayerNormDropoutAdd.apply(x, residual, weight, bias, p, seed, eps)
    return out
