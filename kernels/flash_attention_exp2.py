"""2^x by two units at once: most elements by the exponential unit, one in EVERY by a polynomial on the multiply-adds.

A multiprocessor of a Hopper part has 16 exponentials a clock beside 128 multiply-adds. At a head dimension of 64 the
exponentials of attention take three quarters of its products' time (docs/attention.md), and what part of them is moved
off the exponential unit leaves it for the rest (FlashAttention-4, Zadouri et al. 2026). With x = n + f, n whole and
0 <= f < 1 (Cody and Waite 1980), 2^f is a polynomial of degree 3 by Horner's rule, off by at most 9e-5 of itself,
a twentieth of a bfloat16 rounding; n is added to the exponent's bits.

Seven instructions (one more that bounds x) stand for one whose unit takes eight times as long: with one in EVERY
elements moved, the exponential unit saves 1/EVERY of its time and the issue slots grow by 7/EVERY an element, of about
five. So one in 4 or in 8, not half.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Of FlashAttention-4; the first is exactly 1, so that the largest element of a row stays exact.
COEFFICIENTS = (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)
_SHIFT = 12582912.0  # 1.5 · 2²³: added to x, the whole part of x ends in the lowest bits
_LEAST = -127.0  # below it 2^x is 0, and the bits of n would wrap


def _literal(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


def assembly(every: int) -> str:
    """PTX for `every` elements: the first by the polynomial, the others by the exponential unit."""
    c0, c1, c2, c3 = (_literal(c) for c in COEFFICIENTS)
    lines = [
        ".reg .f32 x, n, f, p;",
        ".reg .b32 e, b;",
        f"max.ftz.f32 x, ${every}, {_literal(_LEAST)};",
        f"add.rm.ftz.f32 n, x, {_literal(_SHIFT)};",
        f"sub.rn.ftz.f32 f, n, {_literal(_SHIFT)};",
        "sub.rn.ftz.f32 f, x, f;",
        f"fma.rn.ftz.f32 p, f, {c3}, {c2};",
        f"fma.rn.ftz.f32 p, p, f, {c1};",
        f"fma.rn.ftz.f32 p, p, f, {c0};",
        "mov.b32 e, n;",
        "mov.b32 b, p;",
        "shl.b32 e, e, 23;",
        "add.s32 b, b, e;",
        "mov.b32 $0, b;",
        *(f"ex2.approx.ftz.f32 ${i}, ${every + i};" for i in range(1, every)),
    ]
    return "{ " + " ".join(lines) + " }"


def constraints(every: int) -> str:
    """Results and operands are 32-bit floating-point registers; results are written before all operands are read."""
    return ",".join(["=&f"] * every + ["f"] * every)


_IN_4, _REGISTERS_4 = gl.constexpr(assembly(4)), gl.constexpr(constraints(4))
_IN_8, _REGISTERS_8 = gl.constexpr(assembly(8)), gl.constexpr(constraints(8))


@gluon.jit
def exp2_spread(values, EVERY: gl.constexpr):
    """2^values for values up to 127, -inf included; one in EVERY (4 or 8) elements of a thread by the polynomial."""
    gl.static_assert(EVERY == 4 or EVERY == 8)
    if EVERY == 4:
        powers = gl.inline_asm_elementwise(_IN_4, _REGISTERS_4, [values], dtype=gl.float32, is_pure=True, pack=4)
    else:
        powers = gl.inline_asm_elementwise(_IN_8, _REGISTERS_8, [values], dtype=gl.float32, is_pure=True, pack=8)
    return powers
