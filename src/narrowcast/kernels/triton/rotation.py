"""A tile of blocks times their signs and the Hadamard matrix, in registers: see kernels/reference/rotation.py.

Each value meets the one that lies 1, 2, 4 ... places away, in a register or in another thread of the warp; nothing
goes through shared memory where a row lies in one warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import (
    INTERPRETED,
    MAGNITUDE,
    bits_of,
    clamp_overflow,
    float_of,
    is_finite,
    power_of_two,
)
from narrowcast.kernels.triton.planes import CAST, MEANS, column_of, inside, places, read_cast, read_coded, value_of
from narrowcast.kernels.triton.spikes import put_spikes, read_spikes

SIGN_BIT = tl.constexpr(-(1 << 31))

NEVER = tl.constexpr(0)
IF_NEEDED = tl.constexpr(1)
ALWAYS = tl.constexpr(2)


@triton.jit
def is_mixed(rem, LEVEL: tl.constexpr, J: tl.constexpr):
    """Whether both halves of 2**LEVEL values around a place exist."""
    return (places(J) | ((2 << LEVEL) - 1)) < rem


@triton.jit
def partners(v, APART: tl.constexpr, J: tl.constexpr):
    """For each value of a tile that which lies APART places before or after it."""
    HALVES: tl.constexpr = J.rows * J.cols // (2 * APART)
    if INTERPRETED:
        lower, upper = tl.split(tl.permute(tl.reshape(v, (HALVES, 2, APART)), (0, 2, 1)))
        other = tl.permute(tl.join(upper, lower), (0, 2, 1))
    else:
        # of both together less its own: what is a shuffle between threads, and within one nothing at all
        own = tl.reshape(bits_of(v), (HALVES, 2, APART))
        other = float_of(tl.xor_sum(own, axis=1, keep_dims=True) ^ own)
    return tl.reshape(other, (J.rows * J.cols,))


@triton.jit
def mixed_once(v, rem, LEVEL: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr):
    """Sums and differences of values 2**LEVEL apart."""
    # with J.across the parts of a row lie further apart in a tile
    APART: tl.constexpr = (1 << LEVEL) * (J.rows if J.across << LEVEL >= J.cols else 1)
    other = partners(v, APART, J)
    is_upper = (tl.arange(0, J.rows * J.cols) & APART) != 0
    sums = other + float_of(bits_of(v) ^ tl.where(is_upper, SIGN_BIT, 0))
    if CAREFUL:
        sums = clamp_overflow(sums, is_finite(v) & is_finite(other))
    if MASKED:
        sums = tl.where(is_mixed(rem, LEVEL, J), sums, v)
    return sums


@triton.jit
def mixed(v, rem, J: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr):
    """CAREFUL: a finite sum that is too large becomes the largest number."""
    for level in tl.static_range(J.levels):
        v = mixed_once(v, rem, level, J, MASKED, CAREFUL)
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
def unrotated(v, first, second, table, rem, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr, CARE: tl.constexpr):
    """The inverse, of what codes stand for under the scales of their rows. CARE: whether sums that are too large are
    held in float32; else the caller sees that something is not finite.
    """
    if P.rotated:
        if CARE == IF_NEEDED:
            top = bits_of(first) & MAGNITUDE
            if P.method == MEANS:
                top = tl.maximum(top, bits_of(second) & MAGNITUDE)
            # only with scales as large as these a sum can overflow: rare, and looked into only then
            if tl.max(top, axis=0) >= P.careful_from:
                y = mixed(v, rem, J, MASKED, True)
            else:
                y = mixed(v, rem, J, MASKED, False)
        else:
            y = mixed(v, rem, J, MASKED, CARE == ALWAYS)
        if MASKED:
            smaller, k = piece_exponents(rem, J)
            larger = y * power_of_two(smaller - k)
            y = larger if CARE == NEVER else clamp_overflow(larger, is_finite(y))
        return float_of(bits_of(y) ^ (tl.load(table + P.signs_at + column_of(J)) & SIGN_BIT))
    else:
        return v


@triton.jit
def read_values(wire, table, planes, tile, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr, CARE: tl.constexpr):
    """A tile of a wire, decoded to float32. CARE: see `unrotated`."""
    start, rem, _row0 = tile
    if P.method == CAST:
        return read_cast(wire, start, inside(rem, J), P, J, MASKED)
    else:
        code, first, second = read_coded(wire, planes, tile, P, J, MASKED)
        if P.spikes:
            _stride, _scales_at, side_at = planes
            spikes, low, high, right = read_spikes(wire, side_at, tile, P, J, MASKED)
            # whatever the codes are
            first = tl.where(right, first, float("nan"))
            return put_spikes(value_of(code, first, second, table, P, J), spikes, low, high, P, J)
        value = value_of(code, first, second, table, P, J)
        return unrotated(value, first, second, table, rem, P, J, MASKED, CARE)
