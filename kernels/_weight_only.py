"""What the products with weights of 8 or 4 bits share: fields of words, their widening, the sum of parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BITS = (8, 4)
#: Inputs that are widened together, and that one word's nibbles are spread over; a smaller group makes a smaller block.
BLOCK = 128
MAX_SPLITS = 32
_MERGE_BLOCK = 512
#: By dtype: the kind of instruction, and, each twice, a number whose unit is one, 1, -1, and minus the first less 8.
_PTX = {
    "bf16": ("bf16x2", 0x43004300, 0x3F803F80, 0xBF80BF80, 0xC308C308),
    "fp16": ("f16x2", 0x64006400, 0x3C003C00, 0xBC00BC00, 0xE408E408),
}


@triton.constexpr_function
def widen_ptx(bits, place, dtype):
    """Field `place` of two 16-bit words as two numbers, by way of 128 (float16: 1024), whose unit is one.

    Four bits: with the sign's bit flipped into 128, which is q + 8 more, less 136. Eight bits: the lower seven in 128,
    less the sign's in another 128, where it stands for itself.
    """
    kind, base, one, minus_one, minus_136 = _PTX[str(dtype)]
    head = f"{{ .reg .b32 t, s, u, v; shr.b32 t, $1, {bits * place}; "
    if bits == 4:
        return (
            f"{head} lop3.b32 t, t, 0x000F000F, {base | 0x00080008:#x}, 0x6A; "
            f"mov.b32 u, {one:#x}; mov.b32 v, {minus_136:#x}; fma.rn.{kind} $0, t, u, v; }}"
        )
    return (
        f"{head} lop3.b32 s, t, 0x00800080, {base:#x}, 0xEA; lop3.b32 t, t, 0x007F007F, {base:#x}, 0xEA; "
        f"mov.b32 u, {minus_one:#x}; fma.rn.{kind} $0, s, u, t; }}"
    )


@triton.jit
def widen(words, PLACE: tl.constexpr, like, BITS: tl.constexpr, BIT_TRICKS: tl.constexpr):
    """Field PLACE of every word as the number that it stands for, in the dtype of `like`."""
    if BIT_TRICKS:
        ptx: tl.constexpr = widen_ptx(BITS, PLACE, like.dtype)
        q = tl.inline_asm_elementwise(ptx, "=r,r", [words], dtype=like.dtype, is_pure=True, pack=2)
    else:
        q = ((words << (16 - BITS * (PLACE + 1))) >> (16 - BITS)).to(like.dtype)
    return q


@triton.jit
def add_parts_kernel(parts_ptr, out_ptr, count, splits, BLOCK: tl.constexpr):
    """The sum of `splits` parts of `count` numbers each, first to last."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    acc = tl.zeros([BLOCK], tl.float32)
    part = parts_ptr + place
    for _ in tl.range(0, splits):
        acc += tl.load(part, mask=inside, other=0.0)
        part += count
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


def add_parts(parts: torch.Tensor, out: torch.Tensor) -> None:
    """The sum of float32 parts (splits, ...) into `out`, on the current device."""
    count = out.numel()
    add_parts_kernel[(triton.cdiv(count, _MERGE_BLOCK),)](parts, out, count, len(parts), BLOCK=_MERGE_BLOCK)


def block_of(group: int | None) -> int:
    """Inputs a block under that group size (None: one scale a channel).

    Raises:
        ValueError: a group that is no multiple of 128 and not 64.
    """
    if group is None or (group > 0 and group % BLOCK == 0):
        return BLOCK
    if group != BLOCK // 2:
        raise ValueError(f"group: {group} inputs a scale is not supported; use 64, a multiple of 128, or None")
    return group


def fields_of(bits: int) -> int:
    """Numbers a word."""
    if bits not in BITS:
        raise ValueError(f"bits: {bits} is not supported; use 8 or 4")
    return 16 // bits


def check_numbers(q_NK: torch.Tensor, bits: int) -> None:
    """Raise ValueError unless these are whole numbers of that many bits, (outputs, inputs) int8."""
    if q_NK.dtype != torch.int8 or q_NK.ndim != 2:
        raise ValueError(f"q: {q_NK.dtype} of shape {tuple(q_NK.shape)}; it must be int8, (outputs, inputs)")
    if bits == 4 and q_NK.numel() and not -8 <= int(q_NK.min()) <= int(q_NK.max()) <= 7:
        raise ValueError(f"q: numbers from {int(q_NK.min())} to {int(q_NK.max())}; four bits hold -8 to 7")
