"""Codes and scales in the bytes of a wire.

A tile has J.rows rows of J.cols places, of which the first J.step hold values; it starts at value `start` of the
tensor and holds `rem` of them. P is a `Recipe`, J a `CodecJob`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import (
    BF16,
    FP32,
    INFINITE,
    MAGNITUDE,
    QUIET_NAN,
    bf16_pattern,
    bits_of,
    float_of,
    fp16_pattern,
    load,
    power_of_two,
    store,
)
from narrowcast.kernels.triton.codes import TABLE, level_of

SCALED = tl.constexpr(0)
AFFINE = tl.constexpr(1)
MEANS = tl.constexpr(2)
SIGN = tl.constexpr(3)
NVFP4 = tl.constexpr(4)
CAST = tl.constexpr(5)

IN_TILE = tl.constexpr(0)
WIDE = tl.constexpr(1)
FREE = tl.constexpr(2)

STORE_FP32 = tl.constexpr(0)
STORE_BF16 = tl.constexpr(1)
STORE_E8M0 = tl.constexpr(2)
STORE_NONE = tl.constexpr(3)


@triton.jit
def places(J: tl.constexpr):
    """The offset of each value of a tile from its first one. Tiles are flat, so that all accesses share a layout.

    J.across: the first of that many parts of every row, then the second ones: a thread has some of each.
    """
    number = tl.arange(0, J.rows * J.cols)
    if J.across > 1:
        PART: tl.constexpr = J.cols // J.across
        row = (number // PART) % J.rows
        number = row * J.cols + (number // (PART * J.rows)) * PART + number % PART
    elif J.cols != J.step:
        number = (number // J.cols) * J.step + number % J.cols
    return number


@triton.jit
def column_of(J: tl.constexpr):
    """The place of each value in its row; said so that the compiler sees which lie side by side."""
    number = tl.arange(0, J.rows * J.cols)
    PART: tl.constexpr = J.cols // J.across
    return number // (PART * J.rows) * PART + number % PART if J.across > 1 else number % J.cols


@triton.jit
def inside(rem, J: tl.constexpr):
    """Which places of a tile hold values."""
    here = places(J) < rem
    if J.cols != J.step:
        here = here & (tl.arange(0, J.rows * J.cols) % J.cols < J.step)
    return here


@triton.jit
def by_rows(v, J: tl.constexpr):
    """A flat tile with its rows apart."""
    if J.across > 1:
        v = tl.permute(tl.reshape(v, (J.across, J.rows, J.cols // J.across)), (1, 0, 2))
    return tl.reshape(v, (J.rows, J.cols))


@triton.jit
def spread(scale, J: tl.constexpr):
    """What each row has, for each place of it."""
    if J.across > 1:
        parts = tl.broadcast_to(scale[None, :, None], (J.across, J.rows, J.cols // J.across))
        return tl.reshape(parts, (J.rows * J.cols,))
    return tl.reshape(tl.broadcast_to(scale[:, None], (J.rows, J.cols)), (J.rows * J.cols,))


@triton.jit
def write_words(base, at, word, mask, SIZE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """Store int32 words as SIZE bytes each at base + SIZE * at."""
    if SIZE == 1:
        store(base + at, word.to(tl.uint8), mask, MASKED)
    elif ALIGNED:
        if SIZE == 4:
            store(base.to(tl.pointer_type(tl.int32), bitcast=True) + at, word, mask, MASKED)
        else:
            store(base.to(tl.pointer_type(tl.uint16), bitcast=True) + at, word.to(tl.uint16), mask, MASKED)
    else:
        for byte in tl.static_range(SIZE):
            store(base + at * SIZE + byte, (word >> (8 * byte)).to(tl.uint8), mask, MASKED)


@triton.jit
def read_words(base, at, mask, SIZE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """The inverse: int32, the upper bytes zero."""
    if SIZE == 1:
        return load(base + at, mask, MASKED).to(tl.int32)
    elif ALIGNED:
        if SIZE == 4:
            return load(base.to(tl.pointer_type(tl.int32), bitcast=True) + at, mask, MASKED)
        else:
            return load(base.to(tl.pointer_type(tl.uint16), bitcast=True) + at, mask, MASKED).to(tl.int32)
    else:
        word = load(base + at * SIZE, mask, MASKED).to(tl.int32)
        for byte in tl.static_range(1, SIZE):
            word = word | (load(base + at * SIZE + byte, mask, MASKED).to(tl.int32) << (8 * byte))
        return word


@triton.jit
def group_places(rem, P: tl.constexpr, J: tl.constexpr):
    """Byte offsets of the groups of J.group codes, and how many bytes may be touched from each on."""
    number = tl.arange(0, J.rows * J.cols // J.group)
    at = number * J.group_bytes
    room = ((rem * P.bits + 7) >> 3) - at
    if J.cols != J.step:
        row = number // (J.cols // J.group)
        column = number % (J.cols // J.group)
        at = (row * (J.step // J.group) + column) * J.group_bytes
        room = tl.where(column * J.group < J.step, ((rem * P.bits + 7) >> 3) - at, 0)
    return at, room


@triton.jit
def join_codes(codes, BITS: tl.constexpr, EACH: tl.constexpr, J: tl.constexpr):
    """Words of EACH neighbouring codes, the first lowest: pairs, then pairs of pairs. No value changes its thread."""
    word = codes
    LEVELS: tl.constexpr = 1 if EACH == 2 else 2 if EACH == 4 else 3 if EACH == 8 else 4 if EACH == 16 else 5
    for level in tl.static_range(LEVELS):
        low, high = tl.split(tl.reshape(word, (J.rows * J.cols >> (level + 1), 2)))
        # a sum, and so one instruction
        word = low + (high << (BITS << level))
    return word


@triton.jit
def apart(word, BITS: tl.constexpr, EACH: tl.constexpr, J: tl.constexpr):
    """The inverse: halves, then halves of halves."""
    LEVELS: tl.constexpr = 1 if EACH == 2 else 2 if EACH == 4 else 3 if EACH == 8 else 4 if EACH == 16 else 5
    for number in tl.static_range(LEVELS):
        low = word & ((1 << (BITS << (LEVELS - 1 - number))) - 1)
        high = (word >> (BITS << (LEVELS - 1 - number))) & ((1 << (BITS << (LEVELS - 1 - number))) - 1)
        word = tl.reshape(tl.join(low, high), (J.rows * J.cols >> (LEVELS - 1 - number),))
    return word


@triton.jit
def write_codes(wire, start, codes, rem, mask, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """Pack a tile of codes (int32, clean above P.bits) into the wire."""
    if P.bits == 8:
        store(wire + start + places(J), codes.to(tl.uint8), mask, MASKED)
    elif J.words and not MASKED:
        EACH: tl.constexpr = 32 // P.bits
        word = join_codes(tl.reshape(by_rows(codes, J), (J.rows * J.cols,)), P.bits, EACH, J)
        base = (wire + (start >> 3) * P.bits).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(base + tl.arange(0, J.rows * J.cols // EACH), word)
    else:
        if MASKED:
            codes = tl.where(mask, codes, 0)
        codes = tl.reshape(by_rows(codes, J), (J.rows * J.cols,))
        if J.group * P.bits > 32:
            codes = codes.to(tl.int64)
        word = join_codes(codes, P.bits, J.group, J)
        at, room = group_places(rem, P, J)
        base = wire + (start >> 3) * P.bits
        for byte in tl.static_range(J.group_bytes):
            store(base + at + byte, (word >> (8 * byte)).to(tl.uint8), byte < room, MASKED)


@triton.jit
def read_codes(wire, start, rem, mask, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """A tile of codes, as int32."""
    if P.bits == 8:
        return load(wire + start + places(J), mask, MASKED).to(tl.int32)
    elif J.words and not MASKED:
        EACH: tl.constexpr = 32 // P.bits
        base = (wire + (start >> 3) * P.bits).to(tl.pointer_type(tl.int32), bitcast=True)
        word = tl.load(base + tl.arange(0, J.rows * J.cols // EACH))
        return apart(word, P.bits, EACH, J)
    else:
        at, room = group_places(rem, P, J)
        base = wire + (start >> 3) * P.bits
        word = load(base + at, room > 0, MASKED).to(tl.int32)
        if J.group * P.bits > 32:
            word = word.to(tl.int64)
        for byte in tl.static_range(1, J.group_bytes):
            word = word | (load(base + at + byte, byte < room, MASKED).to(word.dtype) << (8 * byte))
        return apart(word, P.bits, J.group, J).to(tl.int32)


@triton.jit
def write_cast(wire, start, value, mask, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """Values in the type of the wire; finite ones stay finite."""
    if P.cast == FP32:
        # one NaN, without sign and payload
        word = tl.where(value == value, bits_of(value), QUIET_NAN)
    elif P.cast == BF16:
        word = bf16_pattern(value, True)
    else:
        word = fp16_pattern(value, True)
    write_words(wire + start * (P.bits // 8), places(J), word, mask, P.bits // 8, J.aligned, MASKED)


@triton.jit
def read_cast(wire, start, mask, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    word = read_words(wire + start * (P.bits // 8), places(J), mask, P.bits // 8, J.aligned, MASKED)
    if P.cast == FP32:
        return float_of(word)
    elif P.cast == BF16:
        return float_of(word << 16)
    else:
        return word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_word(scale, P: tl.constexpr):
    """What stands for a scale on the wire."""
    u = bits_of(scale)
    lost = (u & MAGNITUDE) > INFINITE
    if P.store == STORE_E8M0:
        return tl.where(lost, 255, (u >> 23) & 255)
    elif P.store == STORE_BF16:
        return tl.where(lost, QUIET_NAN, u) >> 16
    else:
        return tl.where(lost, QUIET_NAN, u)


@triton.jit
def write_scales(wire, scales_at, row0, first, second, mask, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """One scale for each row of the tile, or the two of affine and means; for nvfp4 `second` are codes."""
    rows = tl.arange(0, J.rows)
    base = wire + scales_at
    if P.method == NVFP4:
        store(base + row0 + rows, second.to(tl.uint8), mask, MASKED)
    elif (P.method == AFFINE) | (P.method == MEANS):
        pair = base + row0 * 8
        write_words(pair, 2 * rows, scale_word(first, P), mask, 4, J.aligned, MASKED)
        write_words(pair, 2 * rows + 1, scale_word(second, P), mask, 4, J.aligned, MASKED)
    else:
        SIZE: tl.constexpr = 4 if P.store == STORE_FP32 else 2 if P.store == STORE_BF16 else 1
        write_words(base + row0 * SIZE, rows, scale_word(first, P), mask, SIZE, J.aligned, MASKED)


@triton.jit
def as_stored(scale, P: tl.constexpr):
    """A scale as it is read back: one byte has no zero."""
    if (P.store == STORE_E8M0) & (P.method == SCALED):
        return tl.where(scale == 0, float_of(tl.full((), 0x00400000, tl.int32)), scale)
    else:
        return scale


@triton.jit
def read_scales(wire, scales_at, tail_at, row0, mask, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """The scale or the two of each row."""
    return read_scales_at(wire, scales_at, tail_at, row0, tl.arange(0, J.rows), mask, P, J, MASKED)


@triton.jit
def read_scales_at(wire, scales_at, tail_at, row0, rows, mask, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """Those of any rows, counted from row0."""
    base = wire + scales_at
    if (P.method == AFFINE) | (P.method == MEANS):
        pair = base + row0 * 8
        first = float_of(read_words(pair, 2 * rows, mask, 4, J.aligned, MASKED))
        second = float_of(read_words(pair, 2 * rows + 1, mask, 4, J.aligned, MASKED))
    elif P.method == NVFP4:
        tensor = float_of(read_words(wire + tail_at, tl.zeros((1,), tl.int32), mask, 4, J.aligned, False))
        code = load(base + row0 + rows, mask, MASKED).to(tl.int32)
        first = level_of(code, wire, P.block_codes) * tensor
        second = first
    else:
        SIZE: tl.constexpr = 4 if P.store == STORE_FP32 else 2 if P.store == STORE_BF16 else 1
        word = read_words(base + row0 * SIZE, rows, mask, SIZE, J.aligned, MASKED)
        if P.store == STORE_E8M0:
            first = tl.where(word == 255, float("nan"), power_of_two(word - 127))
        elif P.store == STORE_BF16:
            first = float_of(word << 16)
        else:
            first = float_of(word)
        second = first
    return first, second


@triton.jit
def value_of(code, first, second, table, P: tl.constexpr, J: tl.constexpr):
    """What comes back for a tile of codes under the scales of its rows."""
    if P.method == AFFINE:
        return spread(first, J) + code.to(tl.float32) * spread(second, J)
    elif P.method == MEANS:
        return tl.where(code == 1, spread(second, J), spread(first, J))
    elif P.method == SIGN:
        # by the bits: a minus sign may be computed as 0 - x, which has no -0
        return float_of(bits_of(spread(first, J)) ^ tl.where(code == 1, 0, -2147483648))
    elif P.store == STORE_NONE:
        return level_of(code, table, P.codes) * P.scale
    else:
        return tile_levels(code, table, P, J) * spread(first, J)


@triton.jit
def tile_levels(code, table, P: tl.constexpr, J: tl.constexpr):
    """The level of each code of a tile. Where many are looked up the table goes to shared memory: short addresses."""
    if J.world and (J.mode == IN_TILE) and (P.codes.kind == TABLE):
        levels = tl.load(table + tl.arange(0, 2**P.bits))
        if P.codes.short:
            # half as many banks of shared memory are in each other's way
            return float_of(tl.gather((levels >> 16).to(tl.int16), code, 0).to(tl.int32) << 16)
        else:
            return float_of(tl.gather(levels, code, 0))
    else:
        return level_of(code, table, P.codes)


@triton.jit
def read_coded(wire, planes, tile, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """A tile of codes, and the scales of its rows."""
    _stride, scales_at, tail_at = planes
    start, rem, row0 = tile
    code = read_codes(wire, start, rem, inside(rem, J), P, J, MASKED)
    first = tl.zeros((J.rows,), tl.float32)
    second = first
    if P.store != STORE_NONE:
        row_mask = tl.arange(0, J.rows) * J.step < rem
        first, second = read_scales(wire, scales_at, tail_at, row0, row_mask, P, J, MASKED)
    return code, first, second
