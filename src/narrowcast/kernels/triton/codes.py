"""A scaled value to its code and back, for every kind of format. `C` is a `Codes` of recipe.py."""

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import INFINITE, MAGNITUDE, ROUNDER, ROUNDER_BITS, bits_of, float_of, mix_bits

FLOAT = tl.constexpr(0)
UNIFORM = tl.constexpr(1)
TABLE = tl.constexpr(2)

E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)


@triton.jit
def float_steps(u, noise, C: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The code of a magnitude below the smallest normal number, where all steps are equal."""
    if STOCHASTIC:
        small = float_of(tl.minimum(u, (128 - C.bias) << 23))
        # 2**17 / step may be too large for one float
        steps = (small * 2.0 ** (C.bias - 1)) * 2.0 ** (C.man + 17)
        return (steps.to(tl.int32) + 2 * noise + 1) >> 17
    else:
        MAGIC: tl.constexpr = (24 - C.bias - C.man + 127) << 23
        return bits_of(float_of(u) + 2.0 ** (24 - C.bias - C.man)) - MAGIC


@triton.jit
def float_nudged(u, noise, C: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The pattern with what decides the rounding added; the dropped bits are not yet cleared."""
    DROPPED: tl.constexpr = 23 - C.man
    if STOCHASTIC:
        odd = 2 * noise + 1
        if DROPPED >= 17:
            return u + (odd << (DROPPED - 17))
        else:
            return u + (odd >> (17 - DROPPED))
    else:
        PARITY: tl.constexpr = ((127 - C.bias) << C.man) & 1
        HALF: tl.constexpr = (1 << (DROPPED - 1)) - 1
        return u + HALF + (((u >> DROPPED) ^ PARITY) & 1)


@triton.jit
def float_code(t, noise, C: tl.constexpr, STOCHASTIC: tl.constexpr):
    v = bits_of(t)
    if C.by_addition and not STOCHASTIC:
        code = float_code_by_addition(tl.minimum(tl.abs(t), C.high), C)
    else:
        code = float_code_by_pattern(tl.minimum(v & MAGNITUDE, C.max_bits), noise, C, STOCHASTIC)
    # the low bits of the code, and of the value's what is left: the sign
    top = (v.to(tl.uint32, bitcast=True) >> (32 - C.bits)).to(tl.int32, bitcast=True)
    signed = mix_bits(code, top, C.sign_bit - 1)
    if C.signed_zero:
        return signed
    else:
        return tl.where(signed == C.sign_bit, 0, signed)


@triton.jit
def float_code_by_addition(size, C: tl.constexpr):
    """Nearest, in few steps: the sum with a power of two whose last place is the format's has the code in its low bits.
    Above them is anything.

    The significand starts at 2**man in every binade but the lowest. That and the bias are made good in advance: an even
    number of units in the last place of the addend, modulo the 256 that a byte counts.
    """
    UNITS: tl.constexpr = (0 - ((128 - C.bias) << C.man)) & 0xFF
    binade = bits_of(tl.maximum(size, 2.0 ** (1 - C.bias))) & INFINITE
    # exact, and the pipe for products has room where that for integers has none
    addend = float_of(binade) * (2.0 ** (23 - C.man) + UNITS * 2.0**-C.man)
    return bits_of(size + addend) + (binade >> (23 - C.man))


@triton.jit
def float_code_by_pattern(u, noise, C: tl.constexpr, STOCHASTIC: tl.constexpr):
    normal = (float_nudged(u, noise, C, STOCHASTIC) >> (23 - C.man)) - ((127 - C.bias) << C.man)
    return tl.where(u < ((128 - C.bias) << 23), float_steps(u, noise, C, STOCHASTIC), normal)


@triton.jit
def float_level(code, C: tl.constexpr):
    # the sign on top and the rest where float32 has it, by one shift that fills up with signs, and a mask
    KEPT: tl.constexpr = (((C.sign_bit - 1) << (23 - C.man)) | 0x80000000) - 0x100000000
    placed = ((code << (32 - C.bits)) >> (8 - C.exp_bits)) & KEPT
    # the exponent is read as if it were float32's, then moved: exact, subnormals included
    level = float_of(placed) * 2.0 ** (127 - C.bias)
    if C.ieee:
        TOP: tl.constexpr = (((1 << C.exp_bits) - 1) << C.man) << (23 - C.man)
        level = tl.where((placed & MAGNITUDE) >= TOP, float_of(placed | INFINITE), level)
    if C.top_is_nan:
        level = tl.where((code & (C.sign_bit - 1)) == C.sign_bit - 1, float("nan"), level)
    if C.neg_zero_is_nan:
        level = tl.where(code == C.sign_bit, float("nan"), level)
    return level


@triton.jit
def integer_of(size, noise, STOCHASTIC: tl.constexpr):
    """A magnitude below 2**14 as an integer, nearest even or stochastic."""
    if STOCHASTIC:
        return ((size * 131072.0).to(tl.int32) + 2 * noise + 1) >> 17
    else:
        return bits_of(size + ROUNDER) - ROUNDER_BITS


@triton.jit
def uniform_code(t, noise, C: tl.constexpr, STOCHASTIC: tl.constexpr):
    MASK: tl.constexpr = 2**C.bits - 1
    if C.sign_magnitude:
        integer = integer_of(tl.minimum(tl.abs(t), C.high), noise, STOCHASTIC)
        return integer | ((bits_of(t) >> (32 - C.bits)) & C.sign_bit)
    else:
        t = tl.minimum(tl.maximum(t, C.low), C.high)
        if STOCHASTIC:
            sign = bits_of(t) >> 31
            return ((integer_of(tl.abs(t), noise, True) ^ sign) - sign) & MASK
        else:
            # the low bits of the sum are the integer in two's complement
            return bits_of(t + ROUNDER) & MASK


@triton.jit
def uniform_raw(t, C: tl.constexpr, CUT: tl.constexpr):
    """Two's complement with the sign bit turned, nearest even, in the low bits; above them those of ROUNDER."""
    if CUT:
        t = tl.minimum(tl.maximum(t, C.low), C.high)
    return bits_of(t + (ROUNDER + C.sign_bit))


@triton.jit
def uniform_level(code, C: tl.constexpr):
    # an integer below 2**23 in the low bits of 2**23 is that much more: no conversion is needed
    if C.unsigned:
        return float_of(code | 0x4B000000) - 8388608.0
    elif C.sign_magnitude:
        size = float_of((code & (C.sign_bit - 1)) | 0x4B000000) - 8388608.0
        return float_of(bits_of(size) | ((code & C.sign_bit) << (32 - C.bits)))
    else:
        return float_of((code ^ C.sign_bit) | 0x4B000000) - (8388608.0 + C.sign_bit)


@triton.jit
def grid_value(table, index, C: tl.constexpr):
    return float_of(tl.load(table + C.grid_at + index))


@triton.jit
def nearest_index(t, table, C: tl.constexpr):
    """The index into the grid, by the prefix table and as many halvings as it leaves."""
    place = (bits_of(t) >> 16) & 0xFFFF
    one = tl.load(table + C.search_at + place)
    two = tl.load(table + C.search_at + place + 1)
    low = tl.minimum(one, two)
    high = tl.maximum(one, two)
    for _ in tl.static_range(C.steps):
        middle = (low + high + 1) >> 1
        start = float_of(tl.load(table + C.starts_at + tl.maximum(middle - 1, 0)))
        open_ = low < high
        up = start <= t
        high = tl.where(open_ & (up == 0), middle - 1, high)
        low = tl.where(open_ & up, middle, low)
    return low


@triton.jit
def stochastic_index(t, noise, table, C: tl.constexpr):
    """Between the two neighbours of t, away from zero with a probability that is the fraction cut to 17 bits."""
    LAST: tl.constexpr = C.n_grid - 1
    index = nearest_index(t, table, C)
    value = grid_value(table, index, C)
    below = t < 0
    near = tl.where(below, tl.where(value < t, index + 1, index), tl.where(value > t, index - 1, index))
    near = tl.minimum(tl.maximum(near, 0), LAST)
    value = grid_value(table, near, C)
    far = tl.where(value == t, near, tl.where(below, near - 1, near + 1))
    far = tl.minimum(tl.maximum(far, 0), LAST)
    gap = tl.load((table + C.gaps_at).to(tl.pointer_type(tl.float64), bitcast=True)
                  + tl.minimum(tl.minimum(near, far), LAST - 1))  # fmt: skip
    fraction = tl.abs(t.to(tl.float64) - value.to(tl.float64)) * tl.where(near == far, tl.zeros_like(gap), gap)
    steps = (fraction * 131072.0).to(tl.int32)
    return tl.where(steps + 2 * noise + 1 >= 131072, far, near)


@triton.jit
def table_index(t, noise, table, C: tl.constexpr, STOCHASTIC: tl.constexpr):
    t = tl.minimum(tl.maximum(t, C.low), C.high)
    if STOCHASTIC:
        return stochastic_index(t, noise, table, C)
    else:
        return nearest_index(t, table, C)


@triton.jit
def table_code(t, noise, table, C: tl.constexpr, STOCHASTIC: tl.constexpr):
    if C.packed:
        u = bits_of(t)
        entry = tl.load(table + C.search_at + ((u >> 16) & 0xFFFF))
        # threshold, code below it, code above
        return tl.where((u & 0xFFFF) >= (entry & 0xFFFF), entry >> 24, entry >> 16) & 0xFF
    else:
        index = table_index(t, noise, table, C, STOCHASTIC)
        code = tl.load(table + C.codes_at + index)
        if C.signed_zero:
            zero = (grid_value(table, index, C) == 0) & (bits_of(t) < 0)
            code = tl.where(zero, C.neg_zero_code, code)
        return code


@triton.jit
def code_of(t, noise, table, C: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The code (int32) of each scaled value; it saturates. A NaN gives any code."""
    if (C.fp8 == E4M3) and (not STOCHASTIC):
        return t.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    elif C.kind == FLOAT:
        return float_code(t, noise, C, STOCHASTIC)
    elif C.kind == UNIFORM:
        return uniform_code(t, noise, C, STOCHASTIC)
    else:
        return table_code(t, noise, table, C, STOCHASTIC)


@triton.jit
def level_of(code, table, C: tl.constexpr):
    """What a scale multiplies."""
    if C.fp8 == E4M3:
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif C.fp8 == E5M2:
        # the upper byte of a float16
        return (code << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif C.kind == FLOAT:
        return float_level(code, C)
    elif C.kind == UNIFORM:
        return uniform_level(code, C)
    else:
        return float_of(tl.load(table + code))


@triton.jit
def with_specials(x, code, C: tl.constexpr):
    """Put the codes of NaN and Inf where x has them; a format without such codes takes its largest value."""
    POSITIVE: tl.constexpr = C.inf_code if C.inf_code >= 0 else C.max_code
    NEGATIVE: tl.constexpr = C.neg_inf_code if C.neg_inf_code >= 0 else C.min_code
    NAN: tl.constexpr = C.nan_code if C.nan_code >= 0 else C.max_code
    u = bits_of(x)
    size = u & MAGNITUDE
    code = tl.where(size == INFINITE, tl.where(u < 0, NEGATIVE, POSITIVE), code)
    return tl.where(size > INFINITE, NAN, code)


@triton.jit
def cpd_rounded(t, C: tl.constexpr):
    """CPD's cast, corner cases included; what leaves the format is Inf."""
    u = bits_of(t) & MAGNITUDE
    exponent = (u >> 23) - 127
    field = exponent + C.bias
    significand = (u & 0x7FFFFF) | 0x800000
    shift = tl.minimum(tl.where(field <= 0, 1 - field, 0), 31)
    kept = cpd_round_even(significand >> shift, 23 - C.man)
    # a significand below 2 times the binade: each is a normal float where the product may be a subnormal one
    binade = tl.minimum(tl.where(field <= 0, 1 - C.bias, exponent), 127)
    size = (kept.to(tl.float32) * 2.0 ** (-C.man)) * float_of((binade + 127) << 23)
    size = tl.where(field >= 2**C.exp_bits - 1, float("inf"), size)
    size = tl.where((u >> 23) == 0, 0.0, size)
    size = tl.where(bits_of(size) > C.max_bits, float("inf"), size)
    rounded = float_of(bits_of(size) | (bits_of(t) & -2147483648))
    return tl.where((u == 0) | (u >= INFINITE), t, rounded)


@triton.jit
def cpd_round_even(significand, DROP: tl.constexpr):
    kept = significand >> DROP
    rest = significand & ((1 << DROP) - 1)
    up = (rest > (1 << (DROP - 1))) | ((rest == (1 << (DROP - 1))) & ((kept & 1) == 1))
    return kept + tl.where(up, 1, 0)
