"""Some values of a block and their places, there and back: what `+topK` and `+spikeS` share, and the latter.

One program takes one block. Places go through memory of our own, since a thread wants what others found; a barrier
stands between. What a block needs is passed in numbers for whole blocks and again for a last, shorter one.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import (
    INFINITE,
    MAGNITUDE,
    QUIET_NAN,
    add_residual,
    bf16_pattern,
    bits_of,
    clamp_overflow,
    float_of,
    is_finite,
    load,
    plus,
    read_floats,
    store,
    write_floats,
)

# a block's m values and k places; how places are written: bits apart, whether as a bitmap, bytes of both strings
# (of spikes: bits of a place, and bytes of the values)


@triton.jit
def shape_here(whole, rest, k, last_k, low, last_low, bitmap, last_bitmap, low_bytes, last_low_bytes, high_bytes,
               last_high_bytes, SIZE: tl.constexpr):  # fmt: skip
    """Of this program's block: the last one may be shorter."""
    full = tl.program_id(0) < whole
    m, count = tl.where(full, SIZE, rest), tl.where(full, k, last_k)
    low_here, bitmap_here = tl.where(full, low, last_low), tl.where(full, bitmap, last_bitmap)
    low_size, high_size = tl.where(full, low_bytes, last_low_bytes), tl.where(full, high_bytes, last_high_bytes)
    return m, count, low_here, bitmap_here, low_size, high_size


@triton.jit
def source(x, residual, wanted, at, mask, divide, multiply, weight, X: tl.constexpr, OWED: tl.constexpr,
           UNIT: tl.constexpr, DIVIDE: tl.constexpr, MULTIPLY: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """What is to be sent: the values, divided, multiplied, with what is left from before; the last is noted down."""
    v = read_floats(x, at, mask, X, MASKED)
    if DIVIDE:
        v = clamp_overflow(tl.div_rn(v, tl.zeros_like(v) + divide), is_finite(v))
    if MULTIPLY:
        v = clamp_overflow(v * multiply, is_finite(v))
    if OWED:
        v = add_residual(v, load(residual + at, mask, MASKED), weight, UNIT)
        store(wanted + at, v, mask, MASKED)
    return v


@triton.jit
def code_at(side, j, bits, mask):
    """Number j of codes of up to 16 bits that lie at `side`."""
    begin = j * bits
    byte = begin // 8
    end = (begin + bits + 7) // 8
    word = tl.load(side + byte, mask=mask & (byte < end), other=0).to(tl.int32)
    word |= tl.load(side + byte + 1, mask=mask & (byte + 1 < end), other=0).to(tl.int32) << 8
    word |= tl.load(side + byte + 2, mask=mask & (byte + 2 < end), other=0).to(tl.int32) << 16
    return (word >> (begin % 8)) & ((1 << bits) - 1)


@triton.jit
def write_codes(side, places, k, bits, count, BYTES: tl.constexpr):
    """The lower bits of k places as codes, in `count` bytes."""
    byte = tl.arange(0, BYTES)
    value = tl.zeros((BYTES,), tl.int32)
    bits = tl.maximum(bits, 1)
    j = 8 * byte // bits
    begin = 8 * byte - j * bits
    for bit in tl.static_range(8):
        place = tl.load(places + j, mask=(j < k) & (byte < count), other=0).to(tl.int32)
        value |= ((place >> begin) & 1) << bit
        end = begin + 1 == bits
        j, begin = tl.where(end, j + 1, j), tl.where(end, 0, begin + 1)
    tl.store(side + byte, value.to(tl.uint8), mask=byte < count)


@triton.jit
def size_of(v):
    """Magnitudes as integers; what is not finite is the largest, all alike."""
    return tl.minimum(bits_of(v) & MAGNITUDE, INFINITE)


@triton.jit
def ranked(v, mask):
    """The same, and less than any where there is no value."""
    return tl.where(mask, size_of(v), -1)


@triton.jit
def put_values(
    out, wanted, residual, base, i, mask, dense, place, value, some, divide, multiply, unit, OUT: tl.constexpr,
    ADD: tl.constexpr, WRITE: tl.constexpr, OWED: tl.constexpr, UNIT: tl.constexpr, DIVIDE: tl.constexpr,
    MULTIPLY: tl.constexpr,
):  # fmt: skip
    """Dense values everywhere but in some places, which have values of their own; or what they leave unsent."""
    # before anything is written over it
    if ADD:
        value = plus(read_floats(out, base + place, some, OUT, True), value)
        dense = plus(read_floats(out, base + i, mask, OUT, True), dense)
    if DIVIDE:
        value = clamp_overflow(tl.div_rn(value, tl.zeros_like(value) + divide), is_finite(value))
        dense = clamp_overflow(tl.div_rn(dense, tl.zeros_like(dense) + divide), is_finite(dense))
    if MULTIPLY:
        value = clamp_overflow(value * multiply, is_finite(value))
        dense = clamp_overflow(dense * multiply, is_finite(dense))
    if OWED:
        old_some = tl.load(residual + base + place, mask=some, other=0.0)
        old = tl.load(residual + base + i, mask=mask, other=0.0)
        left_some = unsent(tl.load(wanted + base + place, mask=some, other=0.0), value, old_some, unit, UNIT)
        left = unsent(tl.load(wanted + base + i, mask=mask, other=0.0), dense, old, unit, UNIT)
    tl.debug_barrier()
    if WRITE:
        write_floats(out, base + i, dense, mask, OUT, True, True)
    if OWED:
        tl.store(residual + base + i, left, mask=mask)
    tl.debug_barrier()
    if WRITE:
        write_floats(out, base + place, value, some, OUT, True, True)
    if OWED:
        tl.store(residual + base + place, left_some, mask=some)


@triton.jit
def unsent(wanted, sent, old, unit, UNIT: tl.constexpr):
    """What should have been sent and was not; where that is not finite the old residual stays."""
    lost = wanted - sent
    if UNIT == 1:
        lost = lost * unit
    elif UNIT == 2:
        lost = tl.div_rn(lost, tl.zeros_like(lost) + unit)
    return tl.where(is_finite(lost), lost, old)


@triton.jit
def spike_forward(
    x, residual, wanted, kept, side, places, whole, rest, k, last_k, low, last_low, bitmap, last_bitmap, low_bytes,
    last_low_bytes, high_bytes, last_high_bytes, divide, multiply, weight, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    LOWS: tl.constexpr, HIGHS: tl.constexpr, STEPS: tl.constexpr, X: tl.constexpr, OWED: tl.constexpr,
    UNIT: tl.constexpr, DIVIDE: tl.constexpr, MULTIPLY: tl.constexpr,
):  # fmt: skip
    """The largest, one after another; zeros in their places. low: bits of a place; high_bytes: of the values."""
    here = tl.program_id(0).to(tl.int64)
    scratch, full_bytes = places + here * k, low_bytes + high_bytes
    m, k, low, bitmap, low_bytes, high_bytes = shape_here(
        whole, rest, k, last_k, low, last_low, bitmap, last_bitmap, low_bytes, last_low_bytes, high_bytes,
        last_high_bytes, SIZE,
    )  # fmt: skip
    i = tl.arange(0, WIDTH)
    mask = i < m
    v = source(
        x, residual, wanted, here * SIZE + i, mask, divide, multiply, weight, X, OWED, UNIT, DIVIDE, MULTIPLY, True
    )
    magnitude = ranked(v, mask)
    for _ in range(k):
        place = tl.min(tl.where(magnitude == tl.max(magnitude, 0), i, WIDTH), 0)
        magnitude = tl.where(i == place, -2, magnitude)
    taken = magnitude == -2
    rank = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(kept + here * SIZE + i, tl.where(taken, 0.0, v), mask=mask)
    tl.store(scratch + rank, i, mask=taken)
    half, at = bf16_pattern(v, True), side + here * full_bytes + 2 * rank
    tl.store(at, (half & 255).to(tl.uint8), mask=taken)
    tl.store(at + 1, ((half >> 8) & 255).to(tl.uint8), mask=taken)
    tl.debug_barrier()
    write_codes(side + here * full_bytes + high_bytes, scratch, k, low, low_bytes, LOWS)


@triton.jit
def spike_inverse(
    out, wanted, residual, kept, side, whole, rest, k, last_k, low, last_low, bitmap, last_bitmap, low_bytes,
    last_low_bytes, high_bytes, last_high_bytes, divide, multiply, unit, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    MARKS: tl.constexpr, OUT: tl.constexpr, ADD: tl.constexpr, WRITE: tl.constexpr, OWED: tl.constexpr,
    UNIT: tl.constexpr, DIVIDE: tl.constexpr, MULTIPLY: tl.constexpr,
):  # fmt: skip
    """Spikes to their places; where these do not ascend the block is NaN."""
    here = tl.program_id(0).to(tl.int64)
    full_bytes = low_bytes + high_bytes
    m, k, low, bitmap, low_bytes, high_bytes = shape_here(
        whole, rest, k, last_k, low, last_low, bitmap, last_bitmap, low_bytes, last_low_bytes, high_bytes,
        last_high_bytes, SIZE,
    )  # fmt: skip
    values = side + here * full_bytes
    codes = values + high_bytes
    rank = tl.arange(0, MARKS)
    some = rank < k
    place = code_at(codes, rank, low, some)
    before = code_at(codes, rank - 1, low, some & (rank > 0))
    wrong = some & ((place >= m) | ((rank > 0) & (place <= before)))
    faults = tl.sum(wrong.to(tl.int32))
    half = tl.load(values + 2 * rank, mask=some, other=0).to(tl.int32)
    pattern = (half | (tl.load(values + 2 * rank + 1, mask=some, other=0).to(tl.int32) << 8)) << 16
    pattern = tl.where((pattern & MAGNITUDE) > INFINITE, QUIET_NAN, pattern)
    some = some & (tl.zeros_like(rank) + faults == 0)
    i = tl.arange(0, WIDTH)
    dense = tl.load(kept + here * SIZE + i, mask=i < m, other=0.0)
    dense = tl.where(faults == 0, dense, float_of(tl.zeros((WIDTH,), tl.int32) + QUIET_NAN))
    put_values(
        out, wanted, residual, here * SIZE, i, i < m, dense, tl.where(some, place, 0), float_of(pattern), some, divide,
        multiply, unit, OUT, ADD, WRITE, OWED, UNIT, DIVIDE, MULTIPLY,
    )  # fmt: skip
