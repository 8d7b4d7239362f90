"""The product of :mod:`kernels.weight_only_matmul` for a few tokens, over weights stored in the order of the registers.

    out[m, n] = Σ_g scales[g, n] · Σ_{k in group g} x[m, k] · q[n, k]

Bytes are those said there. Nothing but memory binds here, and only while two things hold. *Enough is in flight:*
4.3 TB/s over some 800 ns are 26 KB a multiprocessor at every moment, so the launch has its programs resident at once,
and each thread asks for its next two or four 16-byte words before it uses the first. *Widening keeps up:* at two
instructions a weight, of which a multiprocessor issues 128 a clock over all threads, 14336 by 4096 takes some 4 µs of
the 7 and 14 that its bytes take in 4 and 8 bits.

Design. A tensor core's operand of 16 rows is spread over a warp in a fixed way (PTX, "Matrix fragments for mma.m16n8k16
with floating point type"), and which input stands where is free as long as weights and tokens agree. Weights are packed
once, so that 32 threads find theirs in 512 neighbouring bytes, 16 a thread, as Marlin does (Frantar et al., 2024,
section 3): one wide load gives 16 rows by 64 inputs in 4 bits or 32 in 8 bits, and after widening the registers *are*
the operand. Nothing goes through shared memory and no thread waits for another. Tokens come from the L1 in 16-byte
words, 8 neighbouring inputs a thread. A tensor core takes 8 tokens at the price of one.

The warps of a program take blocks of inputs in turn and the same 16 rows, and add their sums through shared memory
once, at the end. So 896 tiles of 16 rows, for 14336, fill the chip without a second kernel; where tiles are too few,
the inputs are split over programs too, and the parts are added in order as there. Either way the result is the same to
the bit from run to run. ``_fence`` keeps the loads of a step in front of its arithmetic: without it the compiler moves
each to its use, to save registers, and a warp has one or two requests in flight.
"""

# In the kernel's comments: g row of eight, t thread of four, p half of 64 inputs, m half of 16 rows, r half of an
# operand's inputs, h and e the rest of a thread's; a is the warp, n the token.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels._rows import INTERPRETED, check_beside, check_float, multiprocessors, on_device_of
from kernels._weight_only import MAX_SPLITS, add_parts, block_of, check_numbers, fields_of, widen

ROWS = 16  # of a tile: an operand of the tensor cores
WORDS = 256  # of 16 bits: what a warp loads at once
FEW_TOKENS = 16  # up to here it is ahead of the kernel over rows
_WARPS = 12  # a multiprocessor, at the least


class Launch(NamedTuple):
    """The shape of one launch; the one place to tune."""

    tokens: int  # a program, 8 or 16
    warps: int  # of one program; they share its inputs
    ahead: int  # blocks of inputs that a warp asks for at once
    tiles: int = 1  # of 16 rows a program, 1 or 2: its warps load tokens once for all of them
    splits: int = 1  # programs that share the inputs of one tile
    registers: int | None = None  # a thread, at most


def launch_shape(tokens: int, rows: int, blocks: int, slots: int) -> Launch:
    """Programs of as few warps as give each multiprocessor (of `slots`) a dozen, all of them resident at once.

    `python3 -m benchmarks.weight_only_shapes` found these on an H200 for 896 tiles (four warps) and 256 (eight), and
    for more than 8 tokens two tiles a program, which halves the tokens' reads; where tiles are few that is a guess. A
    second block asked for at once costs registers, and so programs, and loses. Fewer tiles than multiprocessors are
    split.
    """
    tiles = max(1, triton.cdiv(rows, ROWS))
    warps = 4
    while warps < 16 and 2 * warps <= blocks and tiles * warps < _WARPS * slots:
        warps *= 2
    warps = min(warps, triton.next_power_of_2(max(1, blocks)))
    splits = max(1, min(slots // tiles, blocks // (2 * warps), MAX_SPLITS))
    together = 2 if tokens > 8 and tiles >= 4 * slots else 1
    return Launch(8 if tokens <= 8 else 16, warps, 1, tiles=together, splits=splits)


def blocks_of(columns: int, group: int | None) -> int:
    """Blocks of inputs, the last one filled up."""
    return triton.cdiv(columns, block_of(group))


@triton.jit
def _fence():
    """No access to memory is moved across: this orders a warp's threads, and costs nothing while they run together."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _words(place, inside, EVEN: tl.constexpr):
    """A step's words, each used once; zeros for the warps that have no block."""
    if EVEN:
        words = tl.load(place, eviction_policy="evict_first")
    else:
        words = tl.load(place, mask=inside, other=0, eviction_policy="evict_first")
    return words


@triton.jit
def _scales(place, inside, EVEN: tl.constexpr):
    """Scales (WARPS, 16) of a block; zeros for the warps that have none."""
    return tl.load(place) if EVEN else tl.load(place, mask=inside, other=0.0)


@triton.jit
def _operand(words, like, BITS: tl.constexpr, WARPS: tl.constexpr, BIT_TRICKS: tl.constexpr):
    """Words (WARPS, 256) as the products' rows, (WARPS, 16, 64 in 4 bits or 32 in 8); no number changes its thread."""
    if BITS == 4:
        low = tl.join(widen(words, 0, like, BITS, BIT_TRICKS), widen(words, 1, like, BITS, BIT_TRICKS))
        high = tl.join(widen(words, 2, like, BITS, BIT_TRICKS), widen(words, 3, like, BITS, BIT_TRICKS))
        q = tl.join(low, high).reshape(WARPS, 8, 4, 2, 2, 2, 2, 2)  # a g t p m e r h
        q = q.permute(0, 4, 1, 3, 6, 2, 7, 5).reshape(WARPS, 16, 64)
    else:
        q = tl.join(widen(words, 0, like, BITS, BIT_TRICKS), widen(words, 1, like, BITS, BIT_TRICKS))
        q = q.reshape(WARPS, 8, 4, 2, 2, 2, 2)  # a g t h m e r
        q = q.permute(0, 4, 1, 6, 2, 3, 5).reshape(WARPS, 16, 32)
    return q


@triton.jit
def _below(upper, lower):
    """Two operands (WARPS, 16, inputs) as one of 32 rows."""
    q = tl.join(upper, lower).permute(0, 3, 1, 2)
    return q.reshape(upper.shape[0], 32, upper.shape[2])


@triton.jit
def _eight_tokens(x, column, end, EVEN: tl.constexpr, like, WARPS: tl.constexpr):
    """32 inputs of 8 tokens as the products' columns, (WARPS, 32, 8), in the order of :func:`_operand`."""
    piece = tl.load(x) if EVEN else tl.load(x, mask=column < end, other=0.0)
    piece = piece.to(like.dtype).reshape(WARPS, 8, 4, 2, 2, 2)  # a n t h r e
    return piece.permute(0, 4, 2, 3, 5, 1).reshape(WARPS, 32, 8)


@triton.jit
def _columns(x, column, end, STEP: tl.constexpr, EVEN: tl.constexpr, like, WARPS: tl.constexpr):
    """STEP inputs, 32 or 64, of 8 tokens."""
    piece = _eight_tokens(x, column, end, EVEN, like, WARPS)
    if STEP == 64:
        other = _eight_tokens(x + 32, column + 32, end, EVEN, like, WARPS)
        piece = tl.join(piece, other).permute(0, 3, 1, 2).reshape(WARPS, 64, 8)
    return piece


@triton.jit(do_not_specialize=["tokens", "blocks", "share"])
def weight_only_tiles_kernel(
    x_ptr, tiles_ptr, scales_ptr, out_ptr, tokens, rows, columns, x_stride, blocks, share,
    BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_A_GROUP: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
    AHEAD: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr, BIT_TRICKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """TILES times 16 output channels for TOKENS tokens over `share` blocks of inputs, WARPS blocks at a time.

    BLOCKS_A_GROUP: blocks that share a scale, 0 when the channel has one scale. EVEN: every step has whole blocks for
    all warps. WIDE: the product is taken in float32, for the interpreter.
    """
    STEP: tl.constexpr = 256 // BITS  # inputs
    STEPS: tl.constexpr = BLOCK // STEP
    like = tl.zeros([1], tl.float32 if WIDE else x_ptr.dtype.element_ty)
    ROWS: tl.constexpr = 16 * TILES
    first_row = tl.program_id(0) * ROWS
    first_token = tl.program_id(1) * TOKENS
    split = tl.program_id(2)
    start = split * share
    stop = tl.minimum(blocks, start + share)
    end = tl.minimum(columns, stop * BLOCK)
    warp = tl.arange(0, WARPS)
    eight = tl.arange(0, WARPS * 8) % 8  # a warp's tokens; together with its inputs one dimension, so that
    eighth = tl.arange(0, WARPS * 8) // 8  # the loads' own layout can be no other than the one that products take

    of_warp = warp[:, None] * (STEPS * 256) + tl.arange(0, 256)[None, :]
    tile = tl.program_id(0) * TILES
    words = tiles_ptr + of_warp + tile.to(tl.int64) * (blocks * STEPS * 256)
    below = tiles_ptr + of_warp + tl.minimum(tile + 1, (rows - 1) // 16).to(tl.int64) * (blocks * STEPS * 256)
    column = (eighth * BLOCK)[:, None] + tl.arange(0, 32)[None, :]
    x = x_ptr + column + tl.minimum(first_token + eight, tokens - 1).to(tl.int64)[:, None] * x_stride
    y = x_ptr + column + tl.minimum(first_token + 8 + eight, tokens - 1).to(tl.int64)[:, None] * x_stride
    row = tl.minimum(first_row + tl.arange(0, 16), rows - 1)
    row_below = tl.minimum(first_row + 16 + tl.arange(0, 16), rows - 1)
    acc = tl.zeros([WARPS, ROWS, TOKENS], tl.float32)

    for first in tl.range(start, stop, WARPS * AHEAD):
        loaded = ()
        scales = ()
        for ahead in tl.static_range(AHEAD):
            for step in tl.static_range(STEPS):
                place = first * (STEPS * 256) + (ahead * WARPS * STEPS + step) * 256
                inside = (first + ahead * WARPS + warp < stop)[:, None]
                loaded += (_words(words + place, inside, EVEN),)
                if TILES == 2:
                    loaded += (_words(below + place, inside, EVEN),)
        if BLOCKS_A_GROUP:
            for ahead in tl.static_range(AHEAD):
                block = first + ahead * WARPS + warp
                at = scales_ptr + (block // BLOCKS_A_GROUP).to(tl.int64)[:, None] * rows
                scales += (_scales(at + row[None, :], (block < stop)[:, None], EVEN),)
                if TILES == 2:
                    scales += (_scales(at + row_below[None, :], (block < stop)[:, None], EVEN),)
        if not WIDE:
            _fence()

        for ahead in tl.static_range(AHEAD):
            part = tl.zeros([WARPS, ROWS, TOKENS], tl.float32) if BLOCKS_A_GROUP else acc
            for step in tl.static_range(STEPS):
                q = _operand(loaded[(ahead * STEPS + step) * TILES], like, BITS, WARPS, BIT_TRICKS)
                if TILES == 2:
                    lower = loaded[(ahead * STEPS + step) * TILES + 1]
                    q = _below(q, _operand(lower, like, BITS, WARPS, BIT_TRICKS))
                at_column = first * BLOCK + (ahead * WARPS * BLOCK + step * STEP)
                piece = _columns(x + at_column, column + at_column, end, STEP, EVEN, like, WARPS)
                if TOKENS == 16:
                    more = _columns(y + at_column, column + at_column, end, STEP, EVEN, like, WARPS)
                    piece = tl.join(piece, more).permute(0, 1, 3, 2).reshape(WARPS, STEP, 16)
                part = tl.dot(q, piece, part, input_precision="ieee" if WIDE else "tf32")
            if BLOCKS_A_GROUP:
                scale = scales[ahead * TILES]
                if TILES == 2:
                    scale = tl.join(scale, scales[ahead * TILES + 1]).permute(0, 2, 1).reshape(WARPS, ROWS)
                acc += part * scale.to(tl.float32)[:, :, None]
            else:
                acc = part

    total = tl.sum(acc, 0)
    channel = first_row + tl.arange(0, ROWS)
    if BLOCKS_A_GROUP == 0:
        total *= tl.load(scales_ptr + channel, mask=channel < rows, other=0.0).to(tl.float32)[:, None]
    token = first_token + tl.arange(0, TOKENS)
    place_out = (split * tokens + token).to(tl.int64)[None, :] * rows + channel[:, None]
    inside = (channel < rows)[:, None] & (token < tokens)[None, :]
    tl.store(out_ptr + place_out, total.to(out_ptr.dtype.element_ty), mask=inside)


def _spread(bits: int) -> tuple[int, int, int]:
    """How a thread's inputs are spread over halves of a step, words and fields: the extents of p, h and the fields."""
    return (2, 1, 4) if bits == 4 else (1, 2, 2)


def pack_tiles(q_NK: torch.Tensor, bits: int, group: int | None) -> torch.Tensor:
    """Whole numbers (N, K) as the kernel reads them: int16 words (tiles of 16 rows, steps of inputs, 256).

    Rows are filled with zeros up to a multiple of 16, inputs up to whole blocks. Word 8·(4·g + t) + i of a step belongs
    to row g or g + 8 and to the inputs from 8·t on; its fields, from the lowest bits, are two inputs apart.

    Raises:
        ValueError: another dtype or shape, a number outside the range, bits or group that the kernel does not know.
    """
    check_numbers(q_NK, bits)
    fields_of(bits)
    (rows, columns), block = q_NK.shape, block_of(group)
    padded = torch.nn.functional.pad(q_NK, (0, -columns % block, 0, -rows % ROWS))
    halves, runs, fields = _spread(bits)
    steps = padded.shape[1] * bits // 256
    apart = padded.view(len(padded) // ROWS, 2, 8, steps, halves, 4, runs, fields, 2)
    apart = apart.permute(0, 3, 2, 5, 4, 6, 1, 8, 7).reshape(len(padded) // ROWS, steps, WORDS, fields)
    words = torch.zeros(apart.shape[:3], dtype=torch.int16, device=q_NK.device)
    for place in range(fields):
        words |= (apart[..., place].to(torch.int16) & (2**bits - 1)) << (bits * place)
    return words


def unpack_tiles(tiles: torch.Tensor, rows: int, columns: int, bits: int) -> torch.Tensor:
    """The whole numbers (N, K) int8 that :func:`pack_tiles` was given."""
    halves, runs, fields = _spread(bits)
    up = torch.arange(16 - bits, -1, -bits, dtype=torch.int16, device=tiles.device)
    numbers = ((tiles[..., None] << up) >> (16 - bits)).to(torch.int8)
    count, steps = tiles.shape[:2]
    apart = numbers.view(count, steps, 8, 4, halves, runs, 2, 2, fields).permute(0, 6, 2, 1, 4, 3, 5, 8, 7)
    return apart.reshape(count * ROWS, steps * 256 // bits)[:rows, :columns]


def weight_only_tiles(
    x_MK: torch.Tensor,
    tiles: torch.Tensor,
    scales_GN: torch.Tensor,
    *,
    bits: int,
    group: int | None,
    splits: int | None = None,
) -> torch.Tensor:
    """x times the transposed weights that ``tiles`` and ``scales`` stand for, (M, N), summed in float32.

    Any number of tokens gives the right result; above 16 every 16 read the weights again.

    Args:
        x_MK: tokens, float16 or bfloat16; rows contiguous, any stride between them.
        tiles: what :func:`pack_tiles` gives, contiguous.
        scales_GN: a scale for each group of inputs and each output channel, contiguous, x's dtype or float32; one row
            when ``group`` is None.
        bits: 8 or 4.
        group: inputs a scale, 64 or a multiple of 128; the last group may be short. None: one scale a channel.
        splits: programs that share the inputs of one tile; chosen for the chip when None.

    Raises:
        ValueError: a shape, stride, dtype or device outside what is said here; the argument is named.
    """
    check_float("x", x_MK)
    if x_MK.element_size() != 2:
        raise ValueError(f"x: dtype {x_MK.dtype} is not supported; use float16 or bfloat16")
    if x_MK.ndim != 2 or (x_MK.shape[1] > 1 and x_MK.stride(1) != 1):
        raise ValueError(f"x: shape {tuple(x_MK.shape)}, strides {x_MK.stride()}; (tokens, inputs), rows contiguous")
    block, rows = _check_weight(x_MK, tiles, scales_GN, bits, group)
    tokens, columns = x_MK.shape
    blocks = blocks_of(columns, group)
    shape = launch_shape(tokens, rows, blocks, multiprocessors(x_MK.device))
    chosen = shape.splits if splits is None else splits
    if not 1 <= chosen <= MAX_SPLITS:
        raise ValueError(f"splits: {chosen} is not between 1 and {MAX_SPLITS}")
    out = torch.empty(tokens, rows, dtype=x_MK.dtype, device=x_MK.device)
    if not out.numel():
        return out
    if not columns:
        return out.zero_()
    share = triton.cdiv(blocks, chosen)
    chosen = triton.cdiv(blocks, share)  # none without a block of its own
    target = out
    if chosen > 1:
        target = torch.empty(chosen, tokens, rows, dtype=torch.float32, device=x_MK.device)
    options = {} if shape.registers is None else {"maxnreg": shape.registers}
    whole = columns % block == 0 and blocks % share == 0 and share % (shape.warps * shape.ahead) == 0
    with on_device_of(x_MK):
        weight_only_tiles_kernel[(triton.cdiv(len(tiles), shape.tiles), triton.cdiv(tokens, shape.tokens), chosen)](
            x_MK, tiles, scales_GN, target, tokens, rows, columns, x_MK.stride(0), blocks, share,
            BITS=bits, BLOCK=block, BLOCKS_A_GROUP=0 if group is None else group // block, TOKENS=shape.tokens,
            WARPS=shape.warps, AHEAD=shape.ahead, TILES=shape.tiles, EVEN=whole,
            BIT_TRICKS=not INTERPRETED, WIDE=INTERPRETED, num_warps=shape.warps, num_stages=1, **options,
        )  # fmt: skip
        if chosen > 1:
            add_parts(target, out)
    return out


def _check_weight(
    x: torch.Tensor, tiles: torch.Tensor, scales: torch.Tensor, bits: int, group: int | None
) -> tuple[int, int]:
    """Inputs a block, and output channels."""
    fields_of(bits)
    columns, block = x.shape[1], block_of(group)
    groups = 1 if group is None else triton.cdiv(columns, group)
    if scales.ndim != 2 or len(scales) != groups or not scales.is_contiguous():
        raise ValueError(
            f"scales: shape {tuple(scales.shape)}, strides {scales.stride()}; contiguous ({groups}, outputs) are needed"
        )
    rows = scales.shape[1]
    wanted = (triton.cdiv(rows, ROWS), triton.cdiv(columns, block) * block * bits // 256, WORDS)
    if tuple(tiles.shape) != wanted or tiles.dtype != torch.int16 or not tiles.is_contiguous():
        raise ValueError(
            f"tiles: {tiles.dtype} {tuple(tiles.shape)}, strides {tiles.stride()}; {columns} inputs and {rows} outputs "
            f"in {bits} bits are int16 words, {wanted}, contiguous, as pack_tiles() makes them"
        )
    if tiles.device != x.device:
        raise ValueError(f"tiles: is on {tiles.device}, but x is on {x.device}")
    check_beside("scales", scales, "x", x, dtypes=(torch.float32,))
    return block, rows
