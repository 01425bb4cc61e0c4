"""Sums of wires of 4-bit floats, by way of float16.

Two words of four bytes hold what a word of eight codes does, each byte the upper one of a float16: seven instructions
for eight codes. What is left of a code is to be widened and scaled. A float16 of them is 2**-LIFT of the level, and the
scale makes that good; where a scale is too large for that, its tile is summed as other codes are.
"""

# mypy: disable-error-code="assignment"
# tuples grow while a kernel is compiled

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import INTERPRETED, MAGNITUDE, after_loads, bits_of, float_of
from narrowcast.kernels.triton.codes import level_of
from narrowcast.kernels.triton.packed_sum import in_order, sum_by_words
from narrowcast.kernels.triton.planes import NVFP4

SIGNS = tl.constexpr(-2139062144)  # 0x80808080


@triton.jit
def upper_bytes(word, C: tl.constexpr):
    """The even codes of each word, and the odd ones: sign on top, the rest where float16 has it."""
    UP: tl.constexpr = 2 - C.man
    REST: tl.constexpr = 0x07070707 << UP
    even = ((word << UP) & REST) | ((word << 4) & SIGNS)
    odd = ((word >> (4 - UP)) & REST) | (word & SIGNS)
    return even, odd


@triton.jit
def widen(word, UPPER: tl.constexpr):
    """Two bytes of a word, each the upper one of a float16, as float32."""
    if INTERPRETED:
        one = (((word >> (16 * UPPER)) & 0xFF) << 8).to(tl.uint16).to(tl.float16, bitcast=True)
        other = (((word >> (16 * UPPER + 8)) & 0xFF) << 8).to(tl.uint16).to(tl.float16, bitcast=True)
        return one.to(tl.float32), other.to(tl.float32)
    else:
        PICK: tl.constexpr = 0x3424 if UPPER else 0x1404
        return tl.inline_asm_elementwise(
            "{ .reg .b32 h; .reg .b16 a, b; prmt.b32 h, $2, 0, $3; mov.b32 {a, b}, h;"
            " cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            "=r,=r,r,r", [word, PICK], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def small_levels(word, C: tl.constexpr):
    """2**-LIFT of the levels of eight codes, in their order."""
    even, odd = upper_bytes(word, C)
    zero, two = widen(even, 0)
    four, six = widen(even, 1)
    one, three = widen(odd, 0)
    five, seven = widen(odd, 1)
    return zero, one, two, three, four, five, six, seven


@triton.jit
def read_four(wire, planes, tile, P: tl.constexpr, J: tl.constexpr):
    """Four words that lie together, the bytes of the scales of two and two, and what all scales are multiplied by."""
    _stride, scales_at, tail_at = planes
    start, _rem, row0 = tile
    FOURS: tl.constexpr = J.rows * J.cols // 32
    words = (wire + (start >> 3) * 4).to(tl.pointer_type(tl.int32), bitcast=True) + tl.arange(0, 4 * FOURS)
    even, odd = tl.split(tl.reshape(tl.load(words), (FOURS, 2, 2)))
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    scales = wire + scales_at + row0
    if J.cols == 16:
        pair = tl.load(scales.to(tl.pointer_type(tl.uint16), bitcast=True) + tl.arange(0, FOURS)).to(tl.int32)
        low, high = pair & 0xFF, pair >> 8
    else:
        low = tl.load(scales + tl.arange(0, FOURS) // (J.cols // 32)).to(tl.int32)
        high = low
    tensor = 1.0
    if P.method == NVFP4:
        tensor = tl.load((wire + tail_at).to(tl.pointer_type(tl.float32), bitcast=True))
    return (zero, one, two, three), low, high, tensor


@triton.jit
def lift(byte, tensor, P: tl.constexpr):
    """2**LIFT of the scales that bytes stand for."""
    LIFT: tl.constexpr = 15 - P.codes.bias
    if P.method == NVFP4:
        return (level_of(byte, byte, P.block_codes) * tensor) * 2.0**LIFT
    else:
        return float_of((byte + LIFT) << 23)


@triton.jit
def size_of(read, P: tl.constexpr):
    """Of what decides whether scales can be lifted."""
    _words, low, high, tensor = read
    if P.method == NVFP4:
        return bits_of(tensor) & MAGNITUDE
    else:
        return tl.maximum(low, high)


@triton.jit
def can_be_lifted(reads, P: tl.constexpr, J: tl.constexpr):
    """Whether no scale of a tile leaves float32 by that."""
    LIFT: tl.constexpr = 15 - P.codes.bias
    most = size_of(reads[0], P)
    for rank in tl.static_range(1, J.world):
        most = tl.maximum(most, size_of(reads[rank], P))
    if P.method == NVFP4:
        # a block's scale is below 2**9
        return most < (127 + 127 - 9 - LIFT) << 23
    else:
        return tl.max(most, axis=0) < 255 - LIFT


@triton.jit
def plus_four(sums, read, FIRST: tl.constexpr, P: tl.constexpr, J: tl.constexpr):
    """The sums by place, of 32 together, and one more wire."""
    words, low, high, tensor = read
    # `can_be_lifted` is a barrier unless one scale of each wire says it
    words = after_loads(words, J.gated and FIRST and (P.method == NVFP4))
    added = ()
    for number in tl.static_range(4):
        levels = small_levels(words[number], P.codes)
        scale = lift(low if number < 2 else high, tensor, P)
        for place in tl.static_range(8):
            if FIRST:
                added += (levels[place] * scale,)
            elif P.method == NVFP4:
                added += (sums[8 * number + place] + levels[place] * scale,)
            else:
                # by a power of two, so that the product is exact: the sum rounds but once either way
                added += (tl.fma(levels[place], scale, sums[8 * number + place]),)
    return added


@triton.jit
def sum_fours(reads, P: tl.constexpr, J: tl.constexpr):
    sums = plus_four((), reads[0], True, P, J)
    for rank in tl.static_range(1, J.world):
        sums = plus_four(sums, reads[rank], False, P, J)
    return tl.reshape(in_order(sums, 32, 5), (J.rows * J.cols,))


@triton.jit
def sum_by_halves(wires, table, planes, tile, P: tl.constexpr, J: tl.constexpr):
    """As `sum_by_words`."""
    stride, _scales_at, _tail_at = planes
    reads = ()
    for rank in tl.static_range(J.world):
        reads += (read_four(wires + rank * stride, planes, tile, P, J),)
    if can_be_lifted(reads, P, J):
        total = sum_fours(reads, P, J)
    else:
        total = sum_by_words(wires, table, planes, tile, P, J, True)
    return total
