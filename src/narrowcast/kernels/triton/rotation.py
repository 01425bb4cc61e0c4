"""A tile of blocks times their signs and the Hadamard matrix, in registers: see kernels/reference/rotation.py.

Of every two halves that lie side by side the sum and the difference; a compiler that keeps a half of each in a thread
moves no more values than that between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import MAGNITUDE, bits_of, clamp_overflow, float_of, is_finite, plus, power_of_two
from narrowcast.kernels.triton.planes import CAST, MEANS, inside, read_cast, read_coded, value_of

SIGN_BIT = tl.constexpr(-(1 << 31))


@triton.jit
def column_of(J: tl.constexpr):
    """The place of each value in its block."""
    return tl.arange(0, J.rows * J.cols) % J.cols


@triton.jit
def is_mixed(rem, LEVEL: tl.constexpr, J: tl.constexpr):
    """Whether both halves of 2**LEVEL values around a place exist."""
    number = tl.arange(0, J.rows * J.cols)
    return (number | ((2 << LEVEL) - 1)) < rem


@triton.jit
def halves_of(v, LEVEL: tl.constexpr, J: tl.constexpr):
    """Lower and upper halves of every 2 * 2**LEVEL values."""
    if LEVEL == 0:
        return tl.split(tl.reshape(v, (J.rows * J.cols // 2, 2)))
    else:
        apart = tl.reshape(v, ((J.rows * J.cols) >> (LEVEL + 1), 2, 1 << LEVEL))
        return tl.split(tl.permute(apart, (0, 2, 1)))


@triton.jit
def joined(lower, upper, LEVEL: tl.constexpr, J: tl.constexpr):
    """The inverse."""
    both = tl.join(lower, upper)
    if LEVEL > 0:
        both = tl.permute(both, (0, 2, 1))
    return tl.reshape(both, (J.rows * J.cols,))


@triton.jit
def mixed(v, rem, J: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr):
    """CAREFUL: a finite sum that is too large becomes the largest number."""
    for level in tl.static_range(J.levels):
        lower, upper = halves_of(v, level, J)
        if CAREFUL:
            down = clamp_overflow(lower - upper, is_finite(lower) & is_finite(upper))
            sums = joined(plus(lower, upper), down, level, J)
        else:
            sums = joined(lower + upper, lower - upper, level, J)
        if MASKED:
            sums = tl.where(is_mixed(rem, level, J), sums, v)
        v = sums
    return v


@triton.jit
def piece_exponents(rem, J: tl.constexpr):
    """For each place of a tile that is not full the power of two by which it is made smaller, and log2 of its piece."""
    k = tl.zeros((J.rows * J.cols,), tl.int32)
    for level in tl.static_range(J.levels):
        k += is_mixed(rem, level, J).to(tl.int32)
    return (J.levels + k + 1) >> 1, k


@triton.jit
def rotated(v, table, rem, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """What is rounded of a tile of values, where the codec rotates blocks."""
    if P.rotated:
        # a sign and the power of two of a whole block
        factor = tl.load(table + P.signs_at + column_of(J))
        if MASKED:
            smaller, _k = piece_exponents(rem, J)
            factor = bits_of(power_of_two(0 - smaller)) | (factor & SIGN_BIT)
        return mixed(v * float_of(factor), rem, J, MASKED, False)
    else:
        return v


@triton.jit
def unrotated(v, first, second, table, rem, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """The inverse, of what codes stand for under the scales of their rows."""
    if P.rotated:
        y = mixed(v, rem, J, MASKED, False)
        top = bits_of(first) & MAGNITUDE
        if P.method == MEANS:
            top = tl.maximum(top, bits_of(second) & MAGNITUDE)
        # only with scales as large as these a sum can overflow: rare, and looked into only then
        if tl.max(top, axis=0) >= P.careful_from:
            y = mixed(v, rem, J, MASKED, True)
        if MASKED:
            smaller, k = piece_exponents(rem, J)
            y = clamp_overflow(y * power_of_two(smaller - k), is_finite(y))
        return float_of(bits_of(y) ^ (tl.load(table + P.signs_at + column_of(J)) & SIGN_BIT))
    else:
        return v


@triton.jit
def read_values(wire, table, planes, tile, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """A tile of a wire, decoded to float32."""
    start, rem, _row0 = tile
    if P.method == CAST:
        return read_cast(wire, start, inside(rem, J), P, J, MASKED)
    else:
        code, first, second = read_coded(wire, planes, tile, P, J, MASKED)
        value = value_of(code, first, second, table, P, J)
        return unrotated(value, first, second, table, rem, P, J, MASKED)
