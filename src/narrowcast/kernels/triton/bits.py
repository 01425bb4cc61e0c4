"""Floats as patterns, sums in one order, random bits: what all kernels share.

Patterns are int32, so that comparing those of magnitudes compares the magnitudes, and NaN is the largest.
"""

# mypy: disable-error-code="assignment"
# tuples grow while a kernel is compiled

from __future__ import annotations

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
QUIET_NAN = tl.constexpr(0x7FC00000)
TINY_BITS = tl.constexpr(27 << 23)  # 2**-100
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, ties to even
ROUNDER_BITS = tl.constexpr(0x4B400000)
LARGEST = tl.constexpr(3.4028234663852886e38)

FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(u):
    return u.to(tl.float32, bitcast=True)


INTERPRETED = tl.constexpr(not isinstance(bits_of, triton.runtime.JITFunction))
"""Whether kernels run in Triton's interpreter, on CPU tensors: TRITON_INTERPRET=1 was set at the first import."""


@triton.jit
def load(at, mask, MASKED: tl.constexpr):
    """What lies at `at`; zero where the mask is off."""
    if MASKED:
        return tl.load(at, mask=mask, other=0)
    else:
        return tl.load(at)


@triton.jit
def store(at, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at, value, mask=mask)
    else:
        tl.store(at, value)


@triton.jit
def read_floats(base, at, mask, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Values of a tensor as float32, which is exact."""
    if DTYPE == BF16:
        # by the bits: the interpreter has no bfloat16 of its own
        half = load(base.to(tl.pointer_type(tl.uint16), bitcast=True) + at, mask, MASKED)
        return (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return load(base + at, mask, MASKED).to(tl.float32)


@triton.jit
def bf16_pattern(value, SATURATE: tl.constexpr):
    """The upper 16 bits of a float32, rounded to nearest even, as int32. SATURATE: a finite value stays finite."""
    u = bits_of(value)
    size = u & MAGNITUDE
    if SATURATE:
        # 0x7F7F0000 is the largest bfloat16
        near = tl.where(size < INFINITE, tl.minimum(size, 0x7F7F0000), size)
    else:
        near = size
    rounded = (near + 0x7FFF + ((near >> 16) & 1)) >> 16
    # one NaN, without sign and payload
    return tl.where(size > INFINITE, 0x7FC0, rounded | ((u >> 16) & 0x8000))


@triton.jit
def fp16_of(value, SATURATE: tl.constexpr):
    """As float16, rounded to nearest even. SATURATE: a finite value stays finite."""
    if SATURATE:
        size = bits_of(value) & MAGNITUDE
        cut = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
        value = tl.where(size < INFINITE, cut, value)
    return value.to(tl.float16)


@triton.jit
def fp16_pattern(value, SATURATE: tl.constexpr):
    """The bits of that, as int32; one NaN, without sign and payload."""
    word = fp16_of(value, SATURATE).to(tl.uint16, bitcast=True).to(tl.int32)
    return tl.where(value == value, word, 0x7E00)


@triton.jit
def write_floats(base, at, value, mask, DTYPE: tl.constexpr, SATURATE: tl.constexpr, MASKED: tl.constexpr):
    """Store float32 values as DTYPE."""
    if DTYPE == FP32:
        store(base + at, value, mask, MASKED)
    elif DTYPE == BF16:
        half = bf16_pattern(value, SATURATE).to(tl.uint16)
        store(base.to(tl.pointer_type(tl.uint16), bitcast=True) + at, half, mask, MASKED)
    else:
        half = fp16_pattern(value, SATURATE).to(tl.uint16)
        store(base.to(tl.pointer_type(tl.uint16), bitcast=True) + at, half, mask, MASKED)


@triton.jit
def after_loads(words, GATED: tl.constexpr):
    """The same words (int32), but not before all loads above are under way: else the compiler makes each where it is
    needed, and waits for it there.

    No load is moved over a barrier, and what a barrier finds (that no thread says yes) is not known before.
    """
    if GATED:
        none = tl.inline_asm_elementwise(
            "{ .reg .pred p, q; setp.ne.b32 p, $1, $1; bar.red.or.pred q, 0, p; selp.b32 $0, 1, 0, q; }",
            "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        late = ()
        for number in tl.static_range(len(words)):
            late += (words[number] | none,)
        return late
    else:
        return words


@triton.jit
def power_of_two(exponent):
    """2.0 ** exponent as float32, from -127 to 127."""
    return float_of(tl.where(exponent > -127, (exponent + 127) << 23, 0x00400000))


@triton.jit
def mix_bits(a, b, MASK: tl.constexpr):
    """The bits of a under MASK, the others of b, in one instruction: left to itself the compiler takes two."""
    if INTERPRETED:
        return (a & MASK) | (b & ~MASK)
    else:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xe4;", "=r,r,r,r", [a, b, MASK], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def exponent_of(x):
    """floor(log2 x) of positive normal numbers."""
    return (bits_of(x) >> 23) - 127


@triton.jit
def ceil_exponent_of(x):
    return exponent_of(x) + tl.where((bits_of(x) & 0x7FFFFF) != 0, 1, 0)


@triton.jit
def inverse(scale):
    """1 / scale, and 0 for the scale of a block of zeros or of non-finite values."""
    usable = (scale > 0) | (scale < 0)
    return tl.where(usable, tl.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0)


@triton.jit
def is_finite(x):
    return (bits_of(x) & MAGNITUDE) < INFINITE


@triton.jit
def clamp_overflow(result, finite):
    """`result`, but the largest number where it is too large and what it comes from is finite."""
    cut = tl.where(result > LARGEST, LARGEST, tl.where(result < -LARGEST, -LARGEST, result))
    return tl.where(finite, cut, result)


@triton.jit
def plus(a, b):
    """a + b; a finite sum stays finite."""
    return clamp_overflow(a + b, is_finite(a) & is_finite(b))


@triton.jit
def add_residual(v, residual, weight, UNIT: tl.constexpr):
    """v + residual * weight: two roundings."""
    if UNIT == 0:
        return plus(v, residual)
    else:
        return plus(v, clamp_overflow(residual * weight, is_finite(residual)))


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """Sum each row of x (ROWS, WIDTH): add the halves, repeat. Two addends at a time have but one order."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (ROWS, 2, WIDTH >> (level + 1))), axis=1)
    return tl.reshape(x, (ROWS,))


@triton.jit
def tree_sum_down(x, HEIGHT: tl.constexpr, COLS: tl.constexpr, LEVELS: tl.constexpr):
    """The same for each column of x (HEIGHT, COLS)."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (2, HEIGHT >> (level + 1), COLS)), axis=0)
    return tl.reshape(x, (COLS,))


@triton.jit
def bit_of(word, K: tl.constexpr):
    """Bit K of a word, where it lies. Compared with zero, seven of a byte become predicates by one instruction."""
    return word & (1 << K if K < 31 else -2147483648)


@triton.jit
def philox(counter, seed, stream):
    """Four words of 32 random bits for each 64-bit counter: Philox4x32 with 7 rounds."""
    c0 = counter.to(tl.uint32)
    c1 = (counter >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + stream.to(tl.uint32)
    c3 = tl.zeros_like(c0) + (stream >> 32).to(tl.uint32)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        # one wide multiplication gives both halves
        p0 = c0.to(tl.uint64) * tl.full(c0.shape, 0xD2511F53, tl.uint64)
        p1 = c2.to(tl.uint64) * tl.full(c0.shape, 0xCD9E8D57, tl.uint64)
        hi0 = (p0 >> 32).to(tl.uint32)
        lo0 = p0.to(tl.uint32)
        hi1 = (p1 >> 32).to(tl.uint32)
        lo1 = p1.to(tl.uint32)
        c0 = hi1 ^ c1 ^ k0
        c1 = lo1
        c2 = hi0 ^ c3 ^ k1
        c3 = lo0
        k0 += tl.full((), 0x9E3779B9, tl.uint32)
        k1 += tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def shared_noise(first, seed, stream, SIZE: tl.constexpr):
    """16 random bits (int32) for elements first, first + 1, ...; first is a multiple of 128. Eight share a call."""
    GROUPS: tl.constexpr = SIZE // 128
    counter = (first >> 3) + tl.arange(0, GROUPS * 16)
    w0, w1, w2, w3 = philox(counter, seed, stream)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    words = tl.permute(tl.reshape(words, (GROUPS, 16, 4)), (0, 2, 1))
    halves = tl.reshape(words, (GROUPS, 4, 1, 16)) >> (16 * tl.arange(0, 2)).to(tl.uint32)[None, None, :, None]
    return tl.reshape(halves.to(tl.int32) & 0xFFFF, (SIZE,))


@triton.jit
def own_noise(index, seed, stream):
    """The same for elements of any index, each with a call of its own."""
    counter = ((index >> 7) << 4) + (index & 15)
    w0, w1, w2, w3 = philox(counter, seed, stream)
    place = ((index >> 4) & 7).to(tl.int32)
    word = tl.where(place < 4, tl.where(place < 2, w0, w1), tl.where(place < 6, w2, w3))
    return (word >> ((place & 1) << 4).to(tl.uint32)).to(tl.int32) & 0xFFFF
