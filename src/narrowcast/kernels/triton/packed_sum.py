"""Sums of wires whose codes are narrower than a byte, word by word.

A reduction of many wires is bound by arithmetic, so what counts is how many instructions a code takes. A word holds
J.each codes; each becomes a float where it lies in the word, multiplied by the scale of its row and added to the sum
of its place. Only whole sums are put in the order of the values.
"""

# mypy: disable-error-code="assignment"
# tuples grow while a kernel is compiled

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import INTERPRETED, after_loads, bit_of, bits_of, float_of
from narrowcast.kernels.triton.codes import UNIFORM, level_of
from narrowcast.kernels.triton.planes import MEANS, SCALED, SIGN, STORE_E8M0, STORE_NONE, read_scales


@triton.jit
def in_rows(word, J: tl.constexpr):
    return tl.reshape(word, (J.rows, J.cols // (J.each * J.groups)))


@triton.jit
def read_group(wire, start, P: tl.constexpr, J: tl.constexpr):
    """J.groups words (int32) of J.each codes, for each place of a full tile where such a group begins.

    3 and 6 bits: four words of 24 bits lie in three of 32. What lies above the codes is anything.
    """
    base = wire + (start >> 3) * P.bits
    number = tl.arange(0, J.rows * J.cols // (J.each * J.groups))
    words = base.to(tl.pointer_type(tl.uint32), bitcast=True)
    if J.groups == 1:
        return (in_rows(tl.load(words + number).to(tl.int32), J),)
    elif J.groups == 2:
        pairs = tl.load(words + tl.arange(0, J.rows * J.cols // J.each)).to(tl.int32)
        return tl.split(tl.reshape(pairs, (J.rows, J.cols // (J.each * J.groups), 2)))
    else:
        low = in_rows(tl.load(words + 3 * number), J)
        middle = in_rows(tl.load(words + 3 * number + 1), J)
        high = in_rows(tl.load(words + 3 * number + 2), J)
        second = ((low >> 24) | (middle << 8)).to(tl.int32)
        third = ((middle >> 16) | (high << 16)).to(tl.int32)
        return (low.to(tl.int32), second, third, (high >> 8).to(tl.int32))


@triton.jit
def pick(word, MASK: tl.constexpr, FLIP: tl.constexpr):
    """(word & MASK) ^ FLIP in one instruction: left to itself the compiler takes two."""
    if INTERPRETED:
        return (word & MASK) ^ FLIP
    else:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6a;", "=r,r,r,r", [word, MASK, FLIP], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def lane_levels(table, P: tl.constexpr, J: tl.constexpr):
    """For `looked_up`: thread i of each warp holds the level of code i."""
    if J.by_lanes:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 l; .reg .b64 a; mov.u32 l, %laneid; and.b32 l, l, $2;"
            " mad.wide.u32 a, l, 4, $1; ld.global.b32 $0, [a]; }",
            "=r,l,r", [table.to(tl.int64), 2**P.bits - 1], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return 0


@triton.jit
def looked_up(lanes, code):
    """What the thread with the number in the low bits of `code` holds. All threads of a warp must come here."""
    pattern = tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [lanes, code],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return float_of(pattern)


@triton.jit
def level_in(word, table, lanes, K: tl.constexpr, P: tl.constexpr, J: tl.constexpr):
    """The level of code K of each word."""
    MASK: tl.constexpr = 2**P.bits - 1
    if (P.codes.kind == UNIFORM) and (not P.codes.sign_magnitude):
        # an integer that lies in the mantissa of 2**(23 - AT) is that much more: neither moved nor converted
        MOVED: tl.constexpr = 0 if (K + 1) * P.bits <= 23 else 12
        AT: tl.constexpr = K * P.bits - MOVED
        FLIP: tl.constexpr = 0 if P.codes.unsigned else P.codes.sign_bit
        pattern = pick(word >> MOVED, MASK << AT, (FLIP << AT) | ((150 - AT) << 23))
        return float_of(pattern) - (2.0 ** (23 - AT) + FLIP)
    elif J.by_lanes:
        return looked_up(lanes, word >> (K * P.bits))
    else:
        return level_of((word >> (K * P.bits)) & MASK, table, P.codes)


@triton.jit
def chosen(bit, first, second):
    """`second` where the bit is set, else `first`."""
    if INTERPRETED:
        return tl.where(bit != 0, second, first)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; selp.f32 $0, $3, $2, p; }",
            "=r,r,r,r", [bit, first, second], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def plus_chosen(total, bit, first, second):
    """The sum and what the bit chooses: two additions of which one takes place, and no choice before."""
    if INTERPRETED:
        return total + tl.where(bit != 0, second, first)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p add.rn.f32 $0, $0, $4; @!p add.rn.f32 $0, $0, $3; }",
            "=r,0,r,r,r", [total, bit, first, second], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def value_in(word, first, second, table, lanes, K: tl.constexpr, P: tl.constexpr, J: tl.constexpr):
    """What code K of each word stands for, under the scales of its row."""
    if P.method == MEANS:
        return chosen(bit_of(word, K), first, second)
    elif P.method == SIGN:
        return float_of(bits_of(first) ^ ((word << (31 - K)) & -2147483648) ^ -2147483648)
    elif P.store == STORE_NONE:
        return level_in(word, table, lanes, K, P, J) * P.scale
    else:
        return level_in(word, table, lanes, K, P, J) * first


@triton.jit
def read_rows(wire, planes, tile, P: tl.constexpr, J: tl.constexpr):
    """The words of a tile, and the scales of each row."""
    _stride, scales_at, tail_at = planes
    start, _rem, row0 = tile
    words = read_group(wire, start, P, J)
    first = tl.zeros((J.rows,), tl.float32)
    second = first
    if (P.store == STORE_E8M0) and (P.method == SCALED):
        # Inf, which is as little finite, instead of NaN
        exponent = tl.load(wire + scales_at + row0 + tl.arange(0, J.rows)).to(tl.int32)
        first = float_of(tl.maximum(exponent << 23, 0x00400000))
    elif P.store != STORE_NONE:
        first, second = read_scales(wire, scales_at, tail_at, row0, first == first, P, J, False)
    return words, first, second


@triton.jit
def values_of(read, table, lanes, P: tl.constexpr, J: tl.constexpr):
    """The values of a tile, by their places in a group of words."""
    words, first, second = read
    values = ()
    for place in tl.static_range(J.each * J.groups):
        word = words[place // J.each]
        values += (value_in(word, first[:, None], second[:, None], table, lanes, place % J.each, P, J),)
    return values


@triton.jit
def add_words(sums, read, table, lanes, P: tl.constexpr, J: tl.constexpr):
    """The sums so far, and one more wire."""
    words, first, second = read
    values = ()
    for place in tl.static_range(J.each * J.groups):
        word = words[place // J.each]
        if P.method == MEANS:
            bit = bit_of(word, place % J.each)
            total = plus_chosen(sums[place], bit, first[:, None], second[:, None])
        else:
            more = value_in(word, first[:, None], second[:, None], table, lanes, place % J.each, P, J)
            total = sums[place] + more
        values += (total,)
    return values


@triton.jit
def sum_wires(wires, planes, tile, table, lanes, P: tl.constexpr, J: tl.constexpr, ROLLED: tl.constexpr):
    """The sums over all wires, by their places in a group of words."""
    stride, _scales_at, _tail_at = planes
    here = read_rows(wires, planes, tile, P, J)
    if not ROLLED:
        # all are asked for before the first is waited for
        read = (here,)
        for rank in tl.static_range(1, J.world):
            read += (read_rows(wires + rank * stride, planes, tile, P, J),)
        words, first, second = here
        if J.no_minus:
            first = first + 0.0
            second = second + 0.0
        sums = values_of((after_loads(words, J.gated), first, second), table, lanes, P, J)
        for rank in tl.static_range(1, J.world):
            sums = add_words(sums, read[rank], table, lanes, P, J)
    else:
        sums = values_of(here, table, lanes, P, J)
        for rank in range(1, J.world):
            sums = add_words(sums, read_rows(wires + rank * stride, planes, tile, P, J), table, lanes, P, J)
    return sums


@triton.jit
def in_order(places, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """What lies in the places of a group beside each other, in new dimensions. No value changes its thread."""
    for level in tl.static_range(LEVELS):
        pairs = ()
        for place in tl.static_range(COUNT >> (level + 1)):
            pairs += (tl.join(places[place], places[place + (COUNT >> (level + 1))]),)
        places = pairs
    return places[0]


@triton.jit
def sum_by_words(wires, table, planes, tile, P: tl.constexpr, J: tl.constexpr, ROLLED: tl.constexpr):
    """Decode the same full tile of J.world wires and add in rank order; flat, in the order of the values. ROLLED: in
    few instructions, one wire after another.
    """
    sums = sum_wires(wires, planes, tile, table, lane_levels(table, P, J), P, J, ROLLED)
    COUNT: tl.constexpr = J.each * J.groups
    LEVELS: tl.constexpr = 2 if COUNT == 4 else 3 if COUNT == 8 else 4 if COUNT == 16 else 5 if COUNT == 32 else 6
    return tl.reshape(in_order(sums, COUNT, LEVELS), (J.rows * J.cols,))
