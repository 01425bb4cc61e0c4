"""Full tiles of codes as words of 32 bits: packed by sums, finished a word at a time.

What can be done once for the codes of a word is not done for each: their offset, their sign bits, and that the codes of
a row without a finite scale are zero.
"""

# mypy: disable-error-code="assignment"
# tuples grow while a kernel is compiled

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import INTERPRETED, ROUNDER_BITS, bit_of, bits_of
from narrowcast.kernels.triton.planes import by_rows, join_codes


@triton.jit
def lower(word, BY: tl.constexpr):
    """Shifted down, zeros from above."""
    return (word.to(tl.uint32) >> BY).to(tl.int32)


@triton.jit
def write_packed(wire, start, codes, live, P: tl.constexpr, J: tl.constexpr):
    """Pack a full tile of codes into words of 32 bits; zero in rows that are not `live`.

    J.raw: codes have the sign bit turned and something above them, which one sum and one xor for a word make good.
    """
    EACH: tl.constexpr = 8 if P.bits == 3 else 4 if P.bits == 6 else 32 // P.bits
    ONES: tl.constexpr = (2 ** (EACH * P.bits) - 1) // (2**P.bits - 1)
    word = join_codes(tl.reshape(by_rows(codes, J), (J.rows * J.cols,)), P.bits, EACH, J)
    if J.raw:
        # as int32
        ABOVE: tl.constexpr = ((0 - ONES * ROUNDER_BITS + 2**31) & 0xFFFFFFFF) - 2**31
        TURN: tl.constexpr = ((ONES * P.codes.sign_bit + 2**31) & 0xFFFFFFFF) - 2**31
        word = (word + ABOVE) ^ TURN
    keep = tl.where(live, -1 if EACH * P.bits == 32 else 0xFFFFFF, 0)
    word = tl.reshape(word, (J.rows, J.cols // EACH)) & keep[:, None]
    base = (wire + (start >> 3) * P.bits).to(tl.pointer_type(tl.int32), bitcast=True)
    if EACH * P.bits == 32:
        tl.store(base + tl.arange(0, J.rows * J.cols // EACH), tl.reshape(word, (J.rows * J.cols // EACH,)))
    else:
        # four words of 24 bits lie in three
        even, odd = tl.split(tl.reshape(word, (J.rows * J.cols // (4 * EACH), 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        at = base + 3 * tl.arange(0, J.rows * J.cols // (4 * EACH))
        tl.store(at, first + (second << 24))
        tl.store(at + 1, lower(second, 8) + (third << 16))
        tl.store(at + 2, lower(third, 16) + (fourth << 8))


@triton.jit
def in_places(v, ROWS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr, LEVELS: tl.constexpr):
    """EACH tensors of shape (ROWS, GROUPS): the first value of each group of neighbours, the second, ..."""
    places = (v,)
    for level in tl.static_range(LEVELS):
        even = ()
        odd = ()
        for place in tl.static_range(1 << level):
            one, other = tl.split(tl.reshape(places[place], (ROWS, GROUPS, EACH >> (level + 1), 2)))
            even += (one,)
            odd += (other,)
        places = even + odd
    rows = ()
    for place in tl.static_range(EACH):
        rows += (tl.reshape(places[place], (ROWS, GROUPS)),)
    return rows


@triton.jit
def sign_words(v, J: tl.constexpr):
    """Bit i of word j: value 32 * j + i of a full tile is below zero. Shape (J.rows, J.cols // 32)."""
    if J.across > 1:
        # those of one thread first: the weights are constants
        PART: tl.constexpr = J.cols // J.across
        bits = tl.reshape(by_rows(tl.where(v < 0, 1, 0), J), (J.rows, J.cols // 32, 32 // PART, PART))
        word = tl.sum(bits << (PART * tl.arange(0, 32 // PART))[None, None, :, None], axis=2)
        return tl.sum(word << tl.arange(0, PART)[None, None, :], axis=2)
    # -0 is not below zero
    places = in_places(bits_of(v if J.no_minus else v + 0.0), J.rows, J.cols // 32, 32, 5)
    word = tl.zeros((J.rows, J.cols // 32), tl.int32)
    for place in tl.static_range(32):
        word = push_sign(word, places[31 - place])
    return word


@triton.jit
def push_sign(word, pattern):
    """The word moved up by one, the sign of the pattern below."""
    if INTERPRETED:
        return (word << 1) | lower(pattern, 31)
    else:
        return tl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $1, $2, 1;", "=r,r,r", [pattern, word], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def part_by_bit(value, bit):
    """The value and 0 where the bit is set, else 0 and the value."""
    if INTERPRETED:
        return tl.where(bit != 0, value, 0.0), tl.where(bit != 0, 0.0, value)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; selp.f32 $0, $2, 0f00000000, p; selp.f32 $1, 0f00000000, $2, p; }",
            "=r,=r,r,r", [value, bit], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def plus_parted(low, high, value, bit):
    """The value added to `low` where the bit is set, else to `high`."""
    if INTERPRETED:
        return tl.where(bit != 0, low + value, low), tl.where(bit != 0, high, high + value)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p add.rn.f32 $0, $0, $4; @!p add.rn.f32 $1, $1, $4; }",
            "=r,=r,0,1,r,r", [low, high, value, bit], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def halve(values, LEVELS: tl.constexpr):
    """The sum of 2**LEVELS tensors by the halving tree."""
    for level in tl.static_range(LEVELS):
        sums = ()
        for place in tl.static_range(1 << (LEVELS - 1 - level)):
            sums += (values[place] + values[place + (1 << (LEVELS - 1 - level))],)
        values = sums
    return values[0]


@triton.jit
def sums_by_sign(v, words, J: tl.constexpr):
    """The halving trees of rows of 64 values, each in one thread: of those below zero and of the others."""
    first, second = tl.split(words)
    places = in_places(v, J.rows, 1, 64, 6)
    low = ()
    high = ()
    for place in tl.static_range(32):
        below, above = part_by_bit(places[place], bit_of(first[:, None], place))
        low += (below,)
        high += (above,)
    lows = ()
    highs = ()
    for place in tl.static_range(32):
        below, above = plus_parted(low[place], high[place], places[32 + place], bit_of(second[:, None], place))
        lows += (below,)
        highs += (above,)
    return tl.reshape(halve(lows, 5), (J.rows,)), tl.reshape(halve(highs, 5), (J.rows,))


@triton.jit
def count_negative(v, J: tl.constexpr, MASKED: tl.constexpr):
    """How many values of each row are below zero."""
    if J.signs and not (MASKED or INTERPRETED):
        ones = tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [sign_words(v, J)], dtype=tl.int32, is_pure=True, pack=1
        )
        return tl.sum(ones, axis=1)
    else:
        return tl.sum(by_rows(tl.where(v < 0, 1, 0), J), axis=1)


@triton.jit
def write_signs(wire, start, v, live, J: tl.constexpr):
    """The codes of a full tile of values: 1 where not below zero; 0 in rows that are not `live`."""
    word = tl.where(live[:, None], ~sign_words(v, J), 0)
    base = (wire + (start >> 3)).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(base + tl.arange(0, J.rows * J.cols // 32), tl.reshape(word, (J.rows * J.cols // 32,)))
