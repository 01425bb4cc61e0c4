"""Sums of wires whose codes are narrower than a byte, word by word.

A reduction of many wires is bound by arithmetic, so what counts is how many instructions a code takes. A word holds
J.each codes; each is made a float where it lies in the word, multiplied by the scale of its word and added to the sum
of its place. Only the finished sums are put in the order of the values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import float_of
from narrowcast.kernels.triton.codes import UNIFORM, level_of
from narrowcast.kernels.triton.constants import INTERPRETED as _INTERPRETED
from narrowcast.kernels.triton.planes import STORE_NONE, read_scales_at

INTERPRETED = tl.constexpr(_INTERPRETED)


@triton.jit
def read_group(wire, start, G: tl.constexpr, P: tl.constexpr, J: tl.constexpr):
    """Words of a full tile as int32, with J.each codes each. 3 and 6 bits: group G of the four that lie in three words.

    What lies above the codes is anything.
    """
    base = wire + (start >> 3) * P.bits
    number = tl.arange(0, J.rows * J.cols // (J.each * J.groups))
    words = base.to(tl.pointer_type(tl.uint32), bitcast=True)
    if J.groups == 1:
        return tl.load(words + number).to(tl.int32)
    else:
        at = words + 3 * number
        if G == 0:
            return tl.load(at).to(tl.int32)
        elif G == 1:
            return ((tl.load(at) >> 24) | (tl.load(at + 1) << 8)).to(tl.int32)
        elif G == 2:
            return ((tl.load(at + 1) >> 16) | (tl.load(at + 2) << 16)).to(tl.int32)
        else:
            return (tl.load(at + 2) >> 8).to(tl.int32)


# ---- one code --------------------------------------------------------------------------------------------------------


@triton.jit
def picked(word, MASK: tl.constexpr, FLIP: tl.constexpr):
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
    found = tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [lanes, code],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return float_of(found)


@triton.jit
def level_in(word, table, lanes, K: tl.constexpr, P: tl.constexpr, J: tl.constexpr):
    """The level of code K of each word."""
    MASK: tl.constexpr = 2**P.bits - 1
    if (P.codes.kind == UNIFORM) and (not P.codes.sign_magnitude):
        # an integer that lies in the mantissa of 2**(23 - AT) is that much more: neither moved nor converted
        MOVED: tl.constexpr = 0 if (K + 1) * P.bits <= 23 else 12
        AT: tl.constexpr = K * P.bits - MOVED
        FLIP: tl.constexpr = 0 if P.codes.unsigned else P.codes.sign_bit
        found = picked(word >> MOVED, MASK << AT, (FLIP << AT) | ((150 - AT) << 23))
        return float_of(found) - (2.0 ** (23 - AT) + FLIP)
    elif J.by_lanes:
        return looked_up(lanes, word >> (K * P.bits))
    else:
        return level_of((word >> (K * P.bits)) & MASK, table, P.codes)


@triton.jit
def value_in(word, first, table, lanes, K: tl.constexpr, P: tl.constexpr, J: tl.constexpr):
    """What code K of each word stands for."""
    if J.each <= K:
        return first  # there is none
    elif P.store == STORE_NONE:
        return level_in(word, table, lanes, K, P, J) * P.scale
    else:
        return level_in(word, table, lanes, K, P, J) * first


# ---- eight places of a word ------------------------------------------------------------------------------------------


@triton.jit
def read_eight(wire, scales_at, tail_at, start, row0, table, lanes, G: tl.constexpr, P: tl.constexpr, J: tl.constexpr):
    """The values of a tile, by their places in a word."""
    word = read_group(wire, start, G, P, J)
    if P.store == STORE_NONE:
        first = tl.zeros_like(word).to(tl.float32)
    else:
        EACH: tl.constexpr = J.each * J.groups
        row = tl.arange(0, J.rows * J.cols // EACH) // (J.cols // EACH)
        first, _ = read_scales_at(wire, scales_at, tail_at, row0, row, row >= 0, P, J, False)
    return (
        value_in(word, first, table, lanes, 0, P, J),
        value_in(word, first, table, lanes, 1, P, J),
        value_in(word, first, table, lanes, 2, P, J),
        value_in(word, first, table, lanes, 3, P, J),
        value_in(word, first, table, lanes, 4, P, J),
        value_in(word, first, table, lanes, 5, P, J),
        value_in(word, first, table, lanes, 6, P, J),
        value_in(word, first, table, lanes, 7, P, J),
    )


@triton.jit
def add_eight(a, wire, planes, tile, table, lanes, G: tl.constexpr, P: tl.constexpr, J: tl.constexpr):
    """The sums so far, and one more wire."""
    _stride, scales_at, tail_at = planes
    start, _rem, row0 = tile
    b = read_eight(wire, scales_at, tail_at, start, row0, table, lanes, G, P, J)
    return (
        a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7],
    )  # fmt: skip


@triton.jit
def sum_eight(wires, planes, tile, table, lanes, G: tl.constexpr, P: tl.constexpr, J: tl.constexpr):
    """The sums over all wires of one group of words."""
    stride, scales_at, tail_at = planes
    start, _rem, row0 = tile
    a = read_eight(wires, scales_at, tail_at, start, row0, table, lanes, G, P, J)
    if J.world <= 16:
        for rank in tl.static_range(1, J.world):
            a = add_eight(a, wires + rank * stride, planes, tile, table, lanes, G, P, J)
    else:
        for rank in range(1, J.world):
            a = add_eight(a, wires + rank * stride, planes, tile, table, lanes, G, P, J)
    return a


@triton.jit
def in_order(v0, v1, v2, v3, v4, v5, v6, v7, J: tl.constexpr):
    """The eight, or four, places of a word beside each other, in new dimensions. No value changes its thread."""
    if J.each == 4:
        return tl.join(tl.join(v0, v2), tl.join(v1, v3))
    else:
        even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
        return tl.join(even, tl.join(tl.join(v1, v5), tl.join(v3, v7)))


@triton.jit
def four(a, b, c, d):
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def sum_by_words(wires, table, planes, tile, P: tl.constexpr, J: tl.constexpr):
    """Decode the same full tile of J.world wires and add in rank order; flat, in the order of the values."""
    lanes = lane_levels(table, P, J)
    a = sum_eight(wires, planes, tile, table, lanes, 0, P, J)
    if J.groups == 1:
        found = in_order(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], J)
    else:
        b = sum_eight(wires, planes, tile, table, lanes, 1, P, J)
        c = sum_eight(wires, planes, tile, table, lanes, 2, P, J)
        d = sum_eight(wires, planes, tile, table, lanes, 3, P, J)
        found = in_order(
            four(a[0], b[0], c[0], d[0]), four(a[1], b[1], c[1], d[1]),
            four(a[2], b[2], c[2], d[2]), four(a[3], b[3], c[3], d[3]),
            four(a[4], b[4], c[4], d[4]), four(a[5], b[5], c[5], d[5]),
            four(a[6], b[6], c[6], d[6]), four(a[7], b[7], c[7], d[7]), J,
        )  # fmt: skip
    return tl.reshape(found, (J.rows * J.cols,))
