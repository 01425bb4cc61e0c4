"""round_to: values to values of a format, nearest or stochastic. C is a `Codes`, J a `RoundJob`."""

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import (
    INFINITE,
    MAGNITUDE,
    ROUNDER,
    bits_of,
    float_of,
    read_floats,
    shared_noise,
    write_floats,
)
from narrowcast.kernels.triton.codes import FLOAT, UNIFORM, cpd_round_even, float_nudged, grid_value, table_index

SATURATE = tl.constexpr(0)
TO_INF = tl.constexpr(1)
TO_NAN = tl.constexpr(2)
CPD = tl.constexpr(3)


@triton.jit
def below_normal(u, noise, C: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The rounded pattern of a magnitude below the smallest normal number."""
    if STOCHASTIC:
        small = float_of(tl.minimum(u, (128 - C.bias) << 23))
        steps = ((small * 2.0 ** (C.bias - 1)) * 2.0 ** (C.man + 17)).to(tl.int32)
        steps = (steps + 2 * noise + 1) >> 17
        # back in two factors: one alone may be a subnormal number
        return bits_of((steps.to(tl.float32) * 2.0 ** (-C.man)) * 2.0 ** (1 - C.bias))
    else:
        return bits_of((float_of(u) + 2.0 ** (24 - C.bias - C.man)) - 2.0 ** (24 - C.bias - C.man))


@triton.jit
def float_value(x, noise, C: tl.constexpr, J: tl.constexpr):
    v = bits_of(x)
    u = v & MAGNITUDE
    DROPPED: tl.constexpr = 23 - C.man
    finite = tl.minimum(u, INFINITE - 1)
    normal = (float_nudged(finite, noise, C, J.stochastic) >> DROPPED) << DROPPED
    size = tl.where(u < ((128 - C.bias) << 23), below_normal(u, noise, C, J.stochastic), normal)
    sign = v & -2147483648
    if J.overflow == SATURATE:
        size = tl.minimum(size, C.max_bits)
    elif J.overflow == TO_INF:
        size = tl.where(size > C.max_bits, INFINITE, size)
    value = size | sign
    if not C.signed_zero:
        value = tl.where(size == 0, 0, value)
    if J.overflow == TO_NAN:
        value = tl.where(size > C.max_bits, 0x7FC00000, value)
    return float_of(value)


@triton.jit
def cpd_value(x, C: tl.constexpr):
    """CPD's cast, corner cases included: overflow is tested before rounding, so that a carry may leave the format."""
    v = bits_of(x)
    u = v & MAGNITUDE
    exponent = (u >> 23) - 127
    field = exponent + C.bias
    shift = tl.minimum(tl.where(field <= 0, 1 - field, 0), 31)
    kept = cpd_round_even(((u & 0x7FFFFF) | 0x800000) >> shift, 23 - C.man)
    # a significand of at most 2 times the binade: each is a normal float where their product may be a subnormal one
    binade = tl.minimum(tl.where(field <= 0, 1 - C.bias, exponent), 127)
    size = bits_of((kept.to(tl.float32) * 2.0 ** (-C.man)) * float_of((binade + 127) << 23))
    size = tl.where(field >= 2**C.exp_bits - 1, INFINITE, size)
    size = tl.where((u >> 23) == 0, 0, size)
    return tl.where(u >= INFINITE, x, float_of(size | (v & -2147483648)))


@triton.jit
def uniform_value(x, noise, C: tl.constexpr, J: tl.constexpr):
    t = tl.minimum(tl.maximum(x * J.steps_per_unit, C.low), C.high)
    size = tl.abs(t)
    if J.stochastic:
        whole = size.to(tl.int32)
        part = ((size - whole.to(tl.float32)) * 131072.0).to(tl.int32)
        integer = (whole + ((part + 2 * noise + 1) >> 17)).to(tl.float32)
    else:
        integer = (size + ROUNDER) - ROUNDER
    value = bits_of(integer * (1.0 / J.steps_per_unit))
    if C.signed_zero:
        return float_of(value | (bits_of(t) & -2147483648))
    else:
        return float_of(tl.where(value == 0, value, value | (bits_of(t) & -2147483648)))


@triton.jit
def search_value(x, noise, table, C: tl.constexpr, J: tl.constexpr):
    finite = (bits_of(x) & MAGNITUDE) < INFINITE
    index = table_index(tl.where(finite, x, 0.0), noise, table, C, J.stochastic)
    value = grid_value(table, index, C)
    if C.signed_zero:
        # by the bits: a constant -0.0 may lose its sign
        value = float_of(tl.where((value == 0) & (bits_of(x) < 0), -2147483648, bits_of(value)))
    return value


@triton.jit
def special_value(x, value, table, C: tl.constexpr):
    """What NaN and Inf become."""
    POSITIVE: tl.constexpr = C.inf_code if C.inf_code >= 0 else C.max_code
    NEGATIVE: tl.constexpr = C.neg_inf_code if C.neg_inf_code >= 0 else C.min_code
    NAN: tl.constexpr = C.nan_code if C.nan_code >= 0 else C.max_code
    u = bits_of(x)
    size = u & MAGNITUDE
    infinite = tl.where(u < 0, float_of(tl.load(table + NEGATIVE)), float_of(tl.load(table + POSITIVE)))
    value = tl.where(size == INFINITE, infinite, value)
    return tl.where(size > INFINITE, float_of(tl.load(table + NAN)), value)


@triton.jit
def round_tile(x, out, table, start, rem, seed, C: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    at = tl.arange(0, J.cols)
    mask = at < rem
    value = read_floats(x + start, at, mask, J.dtype, MASKED)
    noise = 0
    if J.stochastic:
        noise = shared_noise(start, seed, start * 0, J.cols)
    if J.overflow == CPD:
        rounded = cpd_value(value, C)
    elif C.kind == FLOAT:
        rounded = float_value(value, noise, C, J)
    elif C.kind == UNIFORM:
        rounded = uniform_value(value, noise, C, J)
    else:
        rounded = search_value(value, noise, table, C, J)
    if J.overflow != CPD:
        rounded = special_value(value, rounded, table, C)
    # a value that the type of the tensor cannot hold becomes Inf there
    write_floats(out + start, at, rounded, mask, J.dtype, False, MASKED)


@triton.jit(do_not_specialize=("n", "seed"))
def round_kernel(x, out, table, n, seed, C: tl.constexpr, J: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    start = program * J.cols
    rem = tl.minimum(n - start, J.cols).to(tl.int32)
    if J.exact:
        round_tile(x, out, table, start, rem, seed.to(tl.int64), C, J, False)
    else:
        if rem == J.cols:
            round_tile(x, out, table, start, rem, seed.to(tl.int64), C, J, False)
        else:
            round_tile(x, out, table, start, rem, seed.to(tl.int64), C, J, True)
