"""One rounding to a number, exact sums and products: what csrc/matmul_round.hpp has, in Triton.

WIDE: float64, else float32. N is a `NumberRecipe`, J a `MatmulJob`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import own_noise

SATURATE = tl.constexpr(0)
TO_INF = tl.constexpr(1)
TO_NAN = tl.constexpr(2)

PRODUCT = tl.constexpr(0)
TERM = tl.constexpr(1)
SUM = tl.constexpr(2)
GAIN = tl.constexpr(3)
CARRY = tl.constexpr(4)
SLOTS = tl.constexpr(8)


@triton.jit
def pattern_of(x, WIDE: tl.constexpr):
    if WIDE:
        return x.to(tl.int64, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def real_of(u, WIDE: tl.constexpr):
    if WIDE:
        return u.to(tl.float64, bitcast=True)
    else:
        return u.to(tl.float32, bitcast=True)


@triton.jit
def limit(r, N: tl.constexpr):
    """What is beyond the largest number."""
    if N.lost == SATURATE:
        r = tl.where(r > N.high, N.high, r)
        r = tl.where(r < N.low, N.low, r)
    elif N.lost == TO_INF:
        r = tl.where(r > N.high, float("inf"), r)
        r = tl.where(r < N.low, float("-inf"), r)
    else:
        r = tl.where((r > N.high) | (r < N.low), float("nan"), r)
    return r


@triton.jit
def with_specials(x, r, N: tl.constexpr):
    """What NaN and Inf become."""
    if N.inf == TO_INF:
        r = tl.where(tl.abs(x) == float("inf"), x, r)
    elif N.inf == TO_NAN:
        r = tl.where(tl.abs(x) == float("inf"), float("nan"), r)
    else:
        r = tl.where(x == float("inf"), N.high, tl.where(x == float("-inf"), N.low, r))
    if N.nan == TO_NAN:
        r = tl.where(x != x, float("nan"), r)
    elif N.nan == TO_INF:
        r = tl.where(x != x, float("inf"), r)
    else:
        r = tl.where(x != x, N.high, r)
    return r


@triton.jit
def clamp_to(x, N: tl.constexpr):
    x = tl.where(x > N.high, N.high, x)
    return tl.where(x < N.low, N.low, x)


@triton.jit
def settle(x, N: tl.constexpr, J: tl.constexpr):
    """Without mantissa bits: where a tie goes down to the even code, that code."""
    u = pattern_of(x, J.wide)
    exponent = ((u & J.infinite) >> J.mantissa) - J.bias
    tie = (u & J.fraction) == J.half
    down = tie & (((exponent ^ N.parity) & 1) == 0) & ((u & J.magnitude) >= N.least)
    return real_of(tl.where(down, u & (J.infinite | J.sign), u), J.wide)


@triton.jit
def binade_of(u, N: tl.constexpr, J: tl.constexpr):
    if N.even_steps:
        return u * 0 + N.least
    else:
        return tl.maximum(u & J.infinite, N.least)


@triton.jit
def nearest(x, N: tl.constexpr, J: tl.constexpr):
    t = x
    if N.even_steps:
        t = clamp_to(t, N)
    if N.parity >= 0:
        t = settle(t, N, J)
    u = pattern_of(t, J.wide)
    addend = real_of(binade_of(u, N, J) + N.to_addend, J.wide)
    r = (t + addend) - addend
    if N.signed_zero:
        r = real_of(pattern_of(r, J.wide) | (u & J.sign), J.wide)
    r = limit(r, N)
    if J.careful:
        r = with_specials(x, r, N)
    return r


@triton.jit
def floor_of(x):
    """Of numbers from 0 to 2**51."""
    whole = (x + 4503599627370496.0) - 4503599627370496.0
    return tl.where(whole > x, whole - 1.0, whole)


@triton.jit
def stochastic(x, random, N: tl.constexpr, J: tl.constexpr):
    t = x
    if N.even_steps:
        t = clamp_to(t, N)
    u = pattern_of(t, True) & J.magnitude
    step = binade_of(u, N, J) - N.step_shift
    per_step = real_of((2046 << 52) - step, True)
    odd = (2 * random + 1).to(tl.float64)
    count = floor_of((floor_of(real_of(u, True) * per_step * 131072.0) + odd) * (1.0 / 131072.0))
    r = count * real_of(step, True)
    sign = pattern_of(x, True) & J.sign
    if N.signed_zero:
        r = real_of(pattern_of(r, True) | sign, True)
    else:
        r = tl.where(r == 0, r, real_of(pattern_of(r, True) | sign, True))
    return with_specials(x, limit(r, N), N)


@triton.jit
def round_number(x, index, seed, stream, N: tl.constexpr, J: tl.constexpr):
    """x to a number, once."""
    if J.stochastic:
        return stochastic(x, own_noise(index, seed, stream), N, J)
    else:
        return nearest(x, N, J)


@triton.jit
def exact_sum(a, b, J: tl.constexpr):
    """a + b; in float64 rounded to odd, so that one more rounding is the only one."""
    total = a + b
    if J.wide:
        part = total - a
        error = (a - (total - part)) + (b - part)
        u = pattern_of(total, True)
        step = tl.where((pattern_of(error, True) ^ u) < 0, -1, 1)
        inexact = (error < 0) | (error > 0)
        total = real_of(tl.where(inexact & ((u & 1) == 0), u + step, u), True)
    return total


@triton.jit
def mogami(a, b, J: tl.constexpr):
    """Multiplication by adding patterns; subnormal operands are zero."""
    ua = pattern_of(a, J.wide)
    ub = pattern_of(b, J.wide)
    sign = (ua ^ ub) & J.sign
    ua = ua & J.magnitude
    ub = ub & J.magnitude
    p = ua + (ub - J.one)
    if J.wide:
        # float32's smallest normal number and 2**128, as patterns of float64
        p = tl.where(p < 0x3810000000000000, 0, p)
        p = tl.where(p >= 0x47F0000000000000, J.infinite, p)
    p = tl.where((ua == 0) | (ub == 0), 0, p)
    result = real_of(p | sign, J.wide)
    if J.careful:
        result = tl.where((ua >= J.infinite) | (ub >= J.infinite), a * b, result)
    return result


@triton.jit
def product(a, b, index, seed, k, N: tl.constexpr, J: tl.constexpr):
    if J.mogami:
        p = mogami(a, b, J)
    else:
        p = a * b
    if J.fused:
        return p
    else:
        return round_number(p, index, seed, k * SLOTS + PRODUCT, N, J)


@triton.jit
def add(total, carry, term, index, seed, step, N: tl.constexpr, J: tl.constexpr):
    """The new sum, and with Kahan's method its carry."""
    stream = step * SLOTS
    if J.kahan:
        y = round_number(exact_sum(term, -carry, J), index, seed, stream + TERM, N, J)
        t = round_number(exact_sum(total, y, J), index, seed, stream + SUM, N, J)
        gained = round_number(exact_sum(t, -total, J), index, seed, stream + GAIN, N, J)
        return t, round_number(exact_sum(gained, -y, J), index, seed, stream + CARRY, N, J)
    else:
        return round_number(exact_sum(total, term, J), index, seed, stream + SUM, N, J), carry
