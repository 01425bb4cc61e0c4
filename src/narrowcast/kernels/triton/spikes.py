"""The largest of each row of a tile, apart: a step of the inner plan's own kernels, where there are few of them.

The spikes of a row are words of 32 bits: all places, and two values in bfloat16 each in `low` and `high`. Only the wire
has them by place.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import (
    INFINITE,
    MAGNITUDE,
    QUIET_NAN,
    bf16_pattern,
    bits_of,
    float_of,
    load,
    read_floats,
)
from narrowcast.kernels.triton.planes import by_rows, column_of, inside, spread
from narrowcast.kernels.triton.scales import largest

LOST = tl.constexpr(QUIET_NAN.value | (QUIET_NAN.value >> 16))
"""Two values that are NaN."""


@triton.jit
def place_of(places, NUMBER: tl.constexpr, J: tl.constexpr):
    """One of the places in a word."""
    return (places >> (NUMBER * J.levels)) & (J.cols - 1)


@triton.jit
def take_exactly(v, rem, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """The values with +0 instead of spikes, and where these are: of equal ones the first; NaN and Inf are alike. A row
    that has fewer values has the others behind them.
    """
    column = column_of(J)
    size = tl.minimum(bits_of(v) & MAGNITUDE, INFINITE)
    if MASKED:
        size = tl.where(inside(rem, J), size, -1)
    places = tl.zeros((J.rows,), tl.int32)
    for number in tl.static_range(P.spikes):
        most = spread(tl.max(by_rows(size, J), axis=1), J)
        place = tl.min(by_rows(tl.where(size == most, column, J.cols - 1), J), axis=1)
        places = places | (place << (number * J.levels))
        size = tl.where(column == spread(place, J), -2, size)
    return tl.where(size == -2, 0.0, v), places


@triton.jit
def take_spikes(v, rem, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """The same, and the pattern of the largest magnitude that is left.

    The place is written over the low bits of the magnitude, so that one maximum finds both, and no two are equal. That
    is wrong only where the largest of what is left differs from a spike in these bits alone: then exactly.
    """
    if MASKED:
        rest, places = take_exactly(v, rem, P, J, True)
        top = largest(rest, J)
    else:
        key = (bits_of(v) & (MAGNITUDE ^ (J.cols - 1))) | (J.cols - 1 - column_of(J))
        least = tl.max(by_rows(key, J), axis=1)
        places = least & (J.cols - 1)
        for number in tl.static_range(1, P.spikes):
            least = tl.max(by_rows(tl.where(key < spread(least, J), key, -1), J), axis=1)
            places = places | ((least & (J.cols - 1)) << (number * J.levels))
        # all bits of a place the other way round
        places = places ^ (-1 if P.spikes * J.levels == 32 else (1 << (P.spikes * J.levels)) - 1)
        rest = tl.where(key < spread(least, J), v, 0.0)
        top = largest(rest, J)
        near = ((top ^ least) < J.cols) & ((top & (J.cols - 1)) != 0)
        if tl.max(tl.where(near | (least >= INFINITE), 1, 0), axis=0) > 0:
            rest, places = take_exactly(v, rem, P, J, False)
            top = largest(rest, J)
    return rest, places, top


@triton.jit
def spike_values(x, v, places, tile, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """What spikes are as bfloat16. Where v is what lies at x they are read once more: each is one of many values."""
    low = tl.zeros((J.rows,), tl.int32)
    high = low
    if J.world or J.residual:
        for number in tl.static_range(P.spikes):
            one = tl.where(column_of(J) == spread(place_of(places, number, J), J), bits_of(v), 0)
            half = bf16_pattern(float_of(tl.sum(by_rows(one, J), axis=1)), True) << (16 * (number % 2))
            if number < 2:
                low = low | half
            else:
                high = high | half
    else:
        start, rem, _row0 = tile
        # as many as there are threads that have a row: what they found need not travel
        SLOTS: tl.constexpr = J.cols // (4 * J.across) if (J.across > 1) and (J.cols > 16 * J.across) else 4
        slot = tl.arange(0, SLOTS)[None, :]
        place = (places[:, None] >> (tl.minimum(slot, P.spikes - 1) * J.levels)) & (J.cols - 1)
        at = tl.arange(0, J.rows)[:, None] * J.step + place
        value = read_floats(x + start, at, (place < J.step) & (at < rem), J.x_dtype, MASKED)
        half = tl.where(slot < P.spikes, bf16_pattern(value, True) << (16 * (slot & 1)), 0)
        low = tl.sum(tl.where(slot < 2, half, 0), axis=1)
        if P.spikes > 2:
            high = tl.sum(tl.where(slot < 2, 0, half), axis=1)
    return low, high


@triton.jit
def spikes_inside(rem, P: tl.constexpr, J: tl.constexpr):
    """How many values each row of a tile that is not full has, and how many spikes."""
    values = tl.minimum(tl.maximum(rem - tl.arange(0, J.rows) * J.step, 0), J.step)
    return values, tl.minimum(values, P.spikes)


@triton.jit
def write_spikes(wire, side_at, tile, places, low, high, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """Values by place, then the places: for each row as many bytes, which threads side by side write at once."""
    _start, rem, row0 = tile
    PLACE_BYTES: tl.constexpr = (P.spikes * J.levels + 7) // 8
    BYTES: tl.constexpr = 2 * P.spikes + PLACE_BYTES
    SIZE: tl.constexpr = 2 if J.aligned and BYTES % 2 == 0 and not MASKED else 1
    LEAST: tl.constexpr = 16 if BYTES > 8 * SIZE else 8 if BYTES > 4 * SIZE else 4
    SLOTS: tl.constexpr = J.cols // (4 * J.across) if (J.across > 1) and (J.cols > 4 * J.across * LEAST) else LEAST
    slot = tl.arange(0, SLOTS)[None, :]
    count = tl.full((J.rows,), P.spikes, tl.int32)
    if MASKED:
        _values, count = spikes_inside(rem, P, J)
    word = tl.zeros((J.rows,), tl.int32)
    unit = tl.zeros((J.rows, SLOTS), tl.int32)
    for number in tl.static_range(P.spikes):
        place = place_of(places, number, J)
        rank = tl.zeros((J.rows,), tl.int32)
        for other in tl.static_range(P.spikes):
            if other != number:
                rank += (place_of(places, other, J) < place).to(tl.int32)
        half = (low if number < 2 else high) >> (16 * (number % 2))
        unit = tl.where(slot // (2 // SIZE) == rank[:, None], half[:, None] >> (8 * (slot % (2 // SIZE))), unit)
        word = word | tl.where(number < count, place << (rank * J.levels), 0)
    first = (2 // SIZE) * count
    for number in tl.static_range(PLACE_BYTES // SIZE):
        unit = tl.where(slot == first[:, None] + number, (word >> (8 * SIZE * number))[:, None], unit)
    base = wire + side_at + row0 * BYTES
    at = tl.arange(0, J.rows)[:, None] * (BYTES // SIZE) + slot
    some = SIZE * slot < (2 * count + ((count * J.levels + 7) >> 3))[:, None]
    if SIZE == 2:
        tl.store(base.to(tl.pointer_type(tl.uint16), bitcast=True) + at, unit.to(tl.uint16), mask=some)
    else:
        tl.store(base + at, unit.to(tl.uint8), mask=some)


@triton.jit
def half_at(base, at, mask, EVEN: tl.constexpr, MASKED: tl.constexpr):
    """Two bytes as int32."""
    if EVEN:
        return load(base.to(tl.pointer_type(tl.uint16), bitcast=True) + (at >> 1), mask, MASKED).to(tl.int32)
    else:
        lower = load(base + at, mask, MASKED).to(tl.int32)
        return lower | (load(base + at + 1, mask, MASKED).to(tl.int32) << 8)


@triton.jit
def read_spikes(wire, side_at, tile, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """Places, both words of values, and which rows have places that ascend and lie inside. Values of others are NaN."""
    _start, rem, row0 = tile
    PLACE_BYTES: tl.constexpr = (P.spikes * J.levels + 7) // 8
    BYTES: tl.constexpr = 2 * P.spikes + PLACE_BYTES
    EVEN: tl.constexpr = J.aligned and BYTES % 2 == 0
    base = wire + side_at + row0 * BYTES
    row = tl.arange(0, J.rows) * BYTES
    values = row
    count = row
    if MASKED:
        values, count = spikes_inside(rem, P, J)
    low = half_at(base, row, count > 0, EVEN, MASKED)
    if P.spikes > 1:
        low = low | (half_at(base, row + 2, count > 1, EVEN, MASKED) << 16)
    high = tl.zeros((J.rows,), tl.int32)
    if P.spikes > 2:
        high = half_at(base, row + 4, count > 2, EVEN, MASKED)
    if P.spikes > 3:
        high = high | (half_at(base, row + 6, count > 3, EVEN, MASKED) << 16)
    places = tl.zeros((J.rows,), tl.int32)
    if EVEN and not MASKED:
        for number in tl.static_range(PLACE_BYTES // 2):
            places = places | (half_at(base, row + (2 * P.spikes + 2 * number), row, True, False) << (16 * number))
    else:
        first = row + 2 * P.spikes
        if MASKED:
            first = row + 2 * count
        for byte in tl.static_range(PLACE_BYTES):
            places = places | (
                load(base + first + byte, 8 * byte < count * J.levels, MASKED).to(tl.int32) << (8 * byte)
            )
    right = row >= 0
    for number in tl.static_range(P.spikes):
        place = place_of(places, number, J)
        if MASKED:
            wrong = place >= values
            if number > 0:
                wrong = wrong | (place <= place_of(places, number - 1, J))
            right = right & ((number >= count) | (wrong == 0))
            # what is not there lies behind what is
            behind = (J.cols - 1) << (number * J.levels)
            places = tl.where(number < count, places, places | behind)
        elif number > 0:
            right = right & (place > place_of(places, number - 1, J))
    return places, tl.where(right, low, LOST), tl.where(right, high, LOST), right


@triton.jit
def put_spikes(v, places, low, high, P: tl.constexpr, J: tl.constexpr):
    """A tile of values with spikes in their places. The words are spread, and taken apart once for many values."""
    if P.spikes:
        column = column_of(J)
        place = spread(places, J)
        values = spread(low, J)
        for number in tl.static_range(P.spikes):
            if number == 2:
                values = spread(high, J)
            pattern = values << 16 if number % 2 == 0 else values & -65536
            v = tl.where(column == place_of(place, number, J), float_of(pattern), v)
    return v
