"""A linear layer of few tokens whose weights are stored in 8 or 4 bits and widened on their way to the product.

    out[m, n] = Σ_g scales[g, n] · Σ_{k in group g} x[m, k] · q[n, k]

q are whole numbers, int8 or int4, and one scale serves a group of G inputs of one output channel, or the whole channel:
the symmetric form of GPTQ (Frantar et al., 2023), AWQ (Lin et al., 2024, section 3) and Marlin (Frantar et al., 2024).

Bytes: N · K for int8, N · K / 2 for int4, and 2 / G a weight for 16-bit scales; tokens and results are below 2 % up to
M = 16. At 4.16 TB/s 14336 by 4096 takes 14.1 µs in int8 and 7.3 µs in int4 with groups of 128.

Design. Weights are the rows of the product and tokens its columns (``turned``): 16 columns are the tensor cores' least,
and the widened weights go from registers into the product without a way through shared memory. Whole numbers up to 8
bits are exact in bfloat16, so nothing is rounded before the product; the float32 sum of a group meets its scale once,
not every weight. Loads of the next tiles are in flight (``num_stages``). A scale is two bytes, which no asynchronous
copy takes: a program asks for those of all its groups at the start, into the L2, and loads each a group ahead. From
memory, a small tile would wait for every group's scale longer than it works on the group.

Widening must cost less than the loads, and conversion instructions, sixteen a clock and multiprocessor, would not: the
bits are placed into the mantissa of a number whose unit is one and that number is taken off again, two weights at once
(Kim et al., 2022, "Who Says Elephants Can't Run", section 3; Marlin's section on dequantization). For that a word of 16
bits holds weights that are far apart: the same field of neighbouring words is a run of neighbouring inputs, and words
come from shared memory into the product's own layout as 16-bit operands do.

Where rows alone do not fill the chip the inputs are split; every split writes its part in float32 and a second kernel
adds them in order, so that the result is the same to the bit from run to run. Each tile of rows reads all its tokens
from the L2, and a step over a block has some hundred instructions that no weight pays for: both ask for tall tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels._rows import INTERPRETED, check_beside, check_float, multiprocessors, on_device_of
from kernels._weight_only import BLOCK, MAX_SPLITS, add_parts, block_of, check_numbers, fields_of, widen


class Launch(NamedTuple):
    """The shape of one launch; the one place to tune."""

    rows: int  # output channels a program
    tokens: int  # a program
    warps: int
    stages: int  # tiles in flight
    splits: int  # programs that share the inputs of one tile
    bit_tricks: bool = True  # widen by hand where the dtype has a way


def launch_shape(tokens: int, rows: int, columns: int, bits: int, itemsize: int, slots: int) -> Launch:
    """Small tiles while tokens are next to nothing, then tall ones: every tile reads all its tokens from the L2.

    slots: multiprocessors. Up to four tokens, tiles of 32 rows: of 14336 rows three a multiprocessor, with no second
    kernel, and some 30 KiB in flight there, more than latency times bandwidth. Beyond that a tile of 128 rows has as
    many bytes of int4 as 32 tokens have; its inputs are split until a multiprocessor has two. Float32 takes what fits.
    """
    if itemsize == 4:
        return Launch(64, 16 if tokens <= 16 else 32, 4, 2, _splits(64, 2, tokens, rows, columns, bits, slots))
    if tokens <= 4:
        return Launch(32, 16, 2, 6 if bits == 4 else 5, _splits(32, 3, tokens, rows, columns, bits, slots))
    if tokens <= 16:
        return Launch(128, 16, 4, 5, _splits(128, 2, tokens, rows, columns, bits, slots))
    if tokens <= 64:
        padded = triton.next_power_of_2(tokens)
        return Launch(128, padded, 8, 4, _splits(128, 1, tokens, rows, columns, bits, slots))
    return Launch(128, 128, 8, 4, 1)


def _splits(tile: int, programs: int, tokens: int, rows: int, columns: int, bits: int, slots: int) -> int:
    """Enough for that many programs a multiprocessor, unless the parts would be a quarter of the weights' bytes.

    A part is written and read, 8 bytes a number, and mostly stays in the L2. None is shorter than four blocks.
    """
    wanted = triton.cdiv(programs * slots, max(1, triton.cdiv(rows, tile)))
    afford = int(0.25 * columns * bits / 8 / (8 * max(1, tokens)))
    return max(1, min(wanted, MAX_SPLITS, columns // (4 * BLOCK), afford))


@triton.jit
def _into_l2(scales_ptr, rows, first_row, first, last, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Asks for ROWS scales of the groups from `first` to `last`, one request for each 32 bytes; waits for nothing."""
    A_SECTOR: tl.constexpr = 256 // scales_ptr.dtype.element_ty.primitive_bitwidth
    row = first_row + tl.arange(0, ROWS // A_SECTOR) * A_SECTOR
    for group in tl.range(first, last + 1, AT_ONCE):
        groups = group + tl.arange(0, AT_ONCE)
        wanted = (groups <= last)[:, None] & (row < rows)[None, :]
        place = scales_ptr + groups.to(tl.int64)[:, None] * rows + row[None, :]
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r", [place.to(tl.int64), wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "blocks", "share"])
def weight_only_kernel(
    x_ptr, weight_ptr, scales_ptr, out_ptr, tokens, rows, columns, x_stride, blocks, share,
    BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_A_GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr, BIT_TRICKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS output channels for TOKENS tokens over `share` blocks of inputs.

    BLOCKS_A_GROUP: blocks that share a scale, 0 when the channel has one scale. EVEN: the last block is whole. WIDE:
    the product is taken in float32, for the interpreter.
    """
    dtype: tl.constexpr = tl.float32 if WIDE else x_ptr.dtype.element_ty
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    start = split * share
    stop = tl.minimum(blocks, start + share)

    PARTS: tl.constexpr = 16 // BITS
    LANES: tl.constexpr = BLOCK // PARTS
    lane = tl.arange(0, LANES)
    real_row = row < rows
    real_token = token < tokens
    weight = weight_ptr + row.to(tl.int64)[:, None] * (blocks * LANES) + lane[None, :]
    x = x_ptr + token.to(tl.int64)[None, :] * x_stride + lane[:, None]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    if BLOCKS_A_GROUP == 0:
        scale = tl.load(scales_ptr + row, mask=real_row, other=0.0).to(tl.float32)
    else:
        first_group = start // BLOCKS_A_GROUP
        if not WIDE:
            _into_l2(scales_ptr, rows, tl.program_id(1) * ROWS, first_group, (stop - 1) // BLOCKS_A_GROUP, ROWS, 32)
        scale = tl.load(scales_ptr + first_group.to(tl.int64) * rows + row, mask=real_row, other=0.0)

    for block in tl.range(start, stop):
        if BLOCKS_A_GROUP:
            present = scale
            following = tl.minimum(block + 1, blocks - 1) // BLOCKS_A_GROUP
            scale = tl.load(scales_ptr + following.to(tl.int64) * rows + row, mask=real_row, other=0.0)
        packed = tl.load(weight + block * LANES, mask=real_row[:, None], other=0)
        part = tl.zeros([ROWS, TOKENS], tl.float32) if BLOCKS_A_GROUP else acc
        for place in tl.static_range(PARTS):
            first = block * BLOCK + place * LANES
            if EVEN:
                piece = tl.load(x + first, mask=real_token[None, :], other=0.0)
            else:
                piece = tl.load(x + first, mask=real_token[None, :] & (first + lane < columns)[:, None], other=0.0)
            piece = piece.to(dtype)
            q = widen(packed, place, piece, BITS, BIT_TRICKS)
            part = tl.dot(q, piece, part, input_precision="ieee" if EXACT else "tf32")
        if BLOCKS_A_GROUP:
            acc += part * present.to(tl.float32)[:, None]
        else:
            acc = part
    if BLOCKS_A_GROUP == 0:
        acc *= scale[:, None]
    place_out = (split * tokens + token).to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(out_ptr + place_out, acc.to(out_ptr.dtype.element_ty), mask=real_row[:, None] & real_token[None, :])


def pack(q_NK: torch.Tensor, bits: int, group: int | None) -> torch.Tensor:
    """Whole numbers (N, K) as the kernel reads them: int16 words of 16 / bits numbers each, (N, words).

    Inputs are taken in blocks of B, the last one filled with zeros. Word j of a block holds, in field i from its lowest
    bits on, input j + i · B · bits / 16 in two's complement.

    Raises:
        ValueError: another dtype or shape, a number outside the range, bits or group that the kernel does not know.
    """
    check_numbers(q_NK, bits)
    fields, block = fields_of(bits), block_of(group)
    rows, blocks = q_NK.shape[0], triton.cdiv(q_NK.shape[1], block)
    padded = torch.nn.functional.pad(q_NK, (0, -q_NK.shape[1] % block))
    parts = padded.view(rows, blocks, fields, block // fields)
    words = torch.zeros_like(parts[:, :, 0], dtype=torch.int16)
    for place in range(fields):
        words |= (parts[:, :, place].to(torch.int16) & (2**bits - 1)) << (bits * place)
    return words.reshape(rows, blocks * (block // fields))


def unpack(packed: torch.Tensor, columns: int, bits: int, group: int | None) -> torch.Tensor:
    """The whole numbers (N, K) int8 that :func:`pack` was given."""
    fields, block = fields_of(bits), block_of(group)
    rows, blocks = packed.shape[0], triton.cdiv(columns, block)
    up = torch.arange(16 - bits, -1, -bits, dtype=torch.int16, device=packed.device)[:, None]
    numbers = (packed.view(rows, blocks, 1, block // fields) << up) >> (16 - bits)
    return numbers.to(torch.int8).reshape(rows, blocks * block)[:, :columns]


def weight_only_matmul(
    x_MK: torch.Tensor,
    packed: torch.Tensor,
    scales_GN: torch.Tensor,
    *,
    bits: int,
    group: int | None,
    splits: int | None = None,
) -> torch.Tensor:
    """x times the transposed weights that ``packed`` and ``scales`` stand for, (M, N), summed in float32.

    Args:
        x_MK: tokens, float32, float16 or bfloat16; rows contiguous, any stride between them.
        packed: what :func:`pack` gives, contiguous.
        scales_GN: a scale for each group of inputs and each output channel, contiguous, x's dtype or float32; one row
            when ``group`` is None.
        bits: 8 or 4.
        group: inputs a scale, 64 or a multiple of 128; the last group may be short. None: one scale a channel.
        splits: programs that share the inputs of one tile; chosen for the chip when None.

    Raises:
        ValueError: a shape, stride, dtype or device outside what is said here; the argument is named.
    """
    check_float("x", x_MK)
    if x_MK.ndim != 2 or (x_MK.shape[1] > 1 and x_MK.stride(1) != 1):
        raise ValueError(f"x: shape {tuple(x_MK.shape)}, strides {x_MK.stride()}; (tokens, inputs), rows contiguous")
    tokens, columns = x_MK.shape
    block, rows = _check_weight(x_MK, packed, scales_GN, bits, group)
    shape = launch_shape(tokens, rows, columns, bits, x_MK.element_size(), multiprocessors(x_MK.device))
    chosen = shape.splits if splits is None else splits
    if not 1 <= chosen <= MAX_SPLITS:
        raise ValueError(f"splits: {chosen} is not between 1 and {MAX_SPLITS}")
    out = torch.empty(tokens, rows, dtype=x_MK.dtype, device=x_MK.device)
    if not out.numel():
        return out
    if not columns:
        return out.zero_()
    blocks = triton.cdiv(columns, block)
    share = triton.cdiv(blocks, chosen)
    chosen = triton.cdiv(blocks, share)  # none without a block of its own
    target = out
    if chosen > 1:
        target = torch.empty(chosen, tokens, rows, dtype=torch.float32, device=x_MK.device)
    grid = (triton.cdiv(tokens, shape.tokens), triton.cdiv(rows, shape.rows), chosen)
    with on_device_of(x_MK):
        weight_only_kernel[grid](
            x_MK, packed, scales_GN, target,
            tokens, rows, columns, x_MK.stride(0), blocks, share,
            BITS=bits, BLOCK=block, BLOCKS_A_GROUP=0 if group is None else group // block,
            ROWS=shape.rows, TOKENS=shape.tokens, EVEN=columns % block == 0, EXACT=x_MK.dtype == torch.float32,
            BIT_TRICKS=shape.bit_tricks and x_MK.element_size() == 2 and not INTERPRETED, WIDE=INTERPRETED,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        if chosen > 1:
            add_parts(target, out)
    return out


def _check_weight(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: int, group: int | None
) -> tuple[int, int]:
    """Inputs a block, and output channels."""
    columns = x.shape[1]
    fields, block = fields_of(bits), block_of(group)
    wanted = triton.cdiv(columns, block) * (block // fields)
    if packed.ndim != 2 or packed.dtype != torch.int16 or packed.shape[1] != wanted or not packed.is_contiguous():
        raise ValueError(
            f"packed: {packed.dtype} {tuple(packed.shape)}, strides {packed.stride()}; {columns} inputs in {bits} bits "
            f"are int16 words, (outputs, {wanted}), contiguous, as pack() makes them"
        )
    if packed.device != x.device:
        raise ValueError(f"packed: is on {packed.device}, but x is on {x.device}")
    groups = 1 if group is None else triton.cdiv(columns, group)
    if tuple(scales.shape) != (groups, packed.shape[0]) or not scales.is_contiguous():
        raise ValueError(
            f"scales: shape {tuple(scales.shape)}, strides {scales.stride()}; it must be contiguous, "
            f"({groups}, {packed.shape[0]})"
        )
    check_beside("scales", scales, "x", x, dtypes=(torch.float32,))
    return block, packed.shape[0]
