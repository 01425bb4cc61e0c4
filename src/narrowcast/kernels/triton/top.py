"""The kernels of `+topK`: the largest values of a block and their places, there and back."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import QUIET_NAN, bits_of, float_of, is_finite, load
from narrowcast.kernels.triton.sparse import code_at, put_values, ranked, shape_here, size_of, source, write_codes

FEW_MARKS = tl.constexpr(4096)
MOST_AT_ONCE = tl.constexpr(1024)


@triton.jit
def write_marks(side, places, k, low, bitmap, count, BYTES: tl.constexpr, STEPS: tl.constexpr):
    """A string of bits in which one is set for each place: few are compared with every byte, many found by bisection,
    since they ascend.
    """
    if (BYTES << STEPS) <= FEW_MARKS:
        j = tl.arange(0, 1 << STEPS)
        place = tl.load(places + j, mask=j < k, other=0).to(tl.int32)
        mark = (place >> low) + tl.where(bitmap != 0, 0, j)
        mark = tl.where(j < k, mark, -8)
        byte = tl.arange(0, BYTES)
        value = tl.sum(tl.where((mark >> 3)[:, None] == byte[None, :], (1 << (mark & 7))[:, None], 0), axis=0)
        tl.store(side + byte, value.to(tl.uint8), mask=byte < count)
    else:
        write_many_marks(side, places, k, low, bitmap, count, BYTES, STEPS)


@triton.jit
def write_many_marks(side, places, k, low, bitmap, count, BYTES: tl.constexpr, STEPS: tl.constexpr):
    byte = tl.arange(0, BYTES)
    value = tl.zeros((BYTES,), tl.int32)
    for bit in tl.static_range(8):
        string = 8 * byte + bit
        # how many marks are before this bit
        before = tl.zeros((BYTES,), tl.int32)
        for step in tl.static_range(STEPS):
            tried = before + (1 << (STEPS - 1 - step))
            place = tl.load(places + tried - 1, mask=(tried <= k) & (byte < count), other=0).to(tl.int32)
            mark = (place >> low) + tl.where(bitmap != 0, 0, tried - 1)
            before = tl.where((tried <= k) & (mark < string), tried, before)
        place = tl.load(places + before, mask=(before < k) & (byte < count), other=0).to(tl.int32)
        mark = (place >> low) + tl.where(bitmap != 0, 0, before)
        value |= tl.where((before < k) & (mark == string), 1, 0) << bit
    tl.store(side + byte, value.to(tl.uint8), mask=byte < count)


@triton.jit
def part_of(x, residual, wanted, number, m, factors, FIRST: tl.constexpr, PART: tl.constexpr, FULL: tl.constexpr,
            X: tl.constexpr, OWED: tl.constexpr, UNIT: tl.constexpr, DIVIDE: tl.constexpr,
            MULTIPLY: tl.constexpr):  # fmt: skip
    """A part of a block: places, what is to be sent, and magnitudes. FIRST: nobody has asked before."""
    divide, multiply, weight = factors
    i = number * PART + tl.arange(0, PART)
    if OWED and not FIRST:
        v = load(wanted + i, i < m, not FULL)
    else:
        v = source(x, residual, wanted, i, i < m, divide, multiply, weight, X, OWED, UNIT, DIVIDE, MULTIPLY, not FULL)
    return i, v, size_of(v) if FULL else ranked(v, i < m)


@triton.jit
def next_guess(low, high, low_count, high_count, few, step):
    """Where between two magnitudes about 2**few are left, if their logarithm falls evenly; each third time the middle.

    It decides only how many steps a search takes: at most 93.
    """
    most, least = tl.log2(low_count.to(tl.float32)), tl.log2(tl.maximum(high_count.to(tl.float32), 0.5))
    one = tl.zeros((1,), tl.int32)
    below, above = float_of(one + low), float_of(one + high)
    guess = tl.sum(bits_of(below + (above - below) * ((most - few) / (most - least))))
    guess = tl.where(step % 3 == 2, low + (high - low) // 2, guess)
    return tl.minimum(tl.maximum(guess, low + 1), high - 1)


@triton.jit
def narrowed(count, guess, floor, ceiling, enough, fewer, k):
    """What is known once `count` are at least `guess`: `floor` has at least k that are as large, `ceiling` fewer."""
    yes = count >= k
    floor, enough = tl.where(yes, guess, floor), tl.where(yes, count, enough)
    ceiling, fewer = tl.where(yes, ceiling, guess), tl.where(yes, fewer, count)
    return floor, ceiling, enough, fewer


@triton.jit
def are_taken(magnitude, floor, enough, fewer, k, before):
    """One for each that is among the k largest; of those that equal the smallest of them the first, `before` of which
    were seen already.
    """
    ones = (magnitude >= floor).to(tl.int32)
    equals = before
    if enough != k:
        equal = (magnitude == floor).to(tl.int32)
        ones = tl.where(before + tl.cumsum(equal, 0) <= k - fewer, ones, (magnitude > floor).to(tl.int32))
        equals = before + tl.sum(equal)
    return ones, equals


@triton.jit
def find_largest(x, residual, wanted, kept, places, m, k, factors, FULL: tl.constexpr, WIDTH: tl.constexpr,
                 ROOM: tl.constexpr, PART: tl.constexpr, X: tl.constexpr, OWED: tl.constexpr, UNIT: tl.constexpr,
                 DIVIDE: tl.constexpr, MULTIPLY: tl.constexpr):  # fmt: skip
    """The k largest of a block, exactly, and their places. FULL: the block has WIDTH values."""
    largest, sums = tl.full((PART,), 0, tl.int32), tl.zeros((PART,), tl.float32)
    for number in range(WIDTH // PART):
        _i, v, magnitude = part_of(x, residual, wanted, number, m, factors, True, PART, FULL, X, OWED, UNIT, DIVIDE,
                                   MULTIPLY)  # fmt: skip
        largest = tl.maximum(largest, magnitude)
        sums += tl.abs(v)
    if OWED:
        tl.debug_barrier()
    floor, ceiling = tl.full((), 0, tl.int32), tl.max(largest) + 1
    enough, fewer = m + tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    few = tl.log2((k + tl.full((), 0, tl.int32)).to(tl.float32))
    # about half again as many as are wanted, if values are spread as normal ones are
    likely = tl.sum(sums) / m * (0.55 * (tl.log2(enough.to(tl.float32)) - few - 0.6))
    guess = tl.minimum(tl.maximum(tl.sum(bits_of(likely + tl.zeros((1,), tl.float32))), 1), ceiling - 1)
    step = 0
    while (enough > ROOM) & (ceiling - floor > 1):
        counts = tl.zeros((PART,), tl.int32)
        for number in range(WIDTH // PART):
            _i, _v, magnitude = part_of(x, residual, wanted, number, m, factors, False, PART, FULL, X, OWED, UNIT,
                                        DIVIDE, MULTIPLY)  # fmt: skip
            # one less where it is as large: a shift costs less than a comparison and a choice
            counts += (guess - 1 - magnitude) >> 31
        floor, ceiling, enough, fewer = narrowed(0 - tl.sum(counts), guess, floor, ceiling, enough, fewer, k)
        step += 1
        guess = next_guess(floor, ceiling, enough, fewer, few + 0.6, step)
        # after two misses: perhaps too few are not zero at all
        guess = tl.where((step == 2) & (floor == 0), 1, guess)
    # more candidates than there is room for are equal to the smallest: the first of them are taken at once
    count = tl.where(enough > ROOM, k, enough)
    done, equals = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for number in range(WIDTH // PART):
        i, _v, magnitude = part_of(x, residual, wanted, number, m, factors, False, PART, FULL, X, OWED, UNIT, DIVIDE,
                                   MULTIPLY)  # fmt: skip
        ones, equals = are_taken(magnitude, floor, enough, fewer, count, equals)
        tl.store(places + done + tl.cumsum(ones, 0) - 1, i.to(tl.int16), mask=ones == 1)
        done += tl.sum(ones)
    tl.debug_barrier()
    j = tl.arange(0, ROOM)
    i = tl.load(places + j, mask=j < count, other=0).to(tl.int32)
    if OWED:
        v = tl.load(wanted + i, mask=j < count, other=0.0)
    else:
        divide, multiply, weight = factors
        v = source(x, residual, wanted, i, j < count, divide, multiply, weight, X, False, UNIT, DIVIDE, MULTIPLY, True)
    magnitude, enough, step = ranked(v, j < count), count, 0
    while (enough != k) & (ceiling - floor > 1):
        guess = next_guess(floor, ceiling, enough, fewer, few, step)
        floor, ceiling, enough, fewer = narrowed(
            0 - tl.sum((guess - 1 - magnitude) >> 31), guess, floor, ceiling, enough, fewer, k
        )
        step += 1
    ones, _equals = are_taken(magnitude, floor, enough, fewer, k, 0)
    rank = tl.cumsum(ones, 0) - 1
    tl.debug_barrier()
    tl.store(kept + rank, v, mask=ones == 1)
    tl.store(places + rank, i.to(tl.int16), mask=ones == 1)
    tl.debug_barrier()


@triton.jit
def top_forward(
    x, residual, wanted, kept, side, places, whole, rest, k, last_k, low, last_low, bitmap, last_bitmap, low_bytes,
    last_low_bytes, high_bytes, last_high_bytes, divide, multiply, weight, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    LOWS: tl.constexpr, HIGHS: tl.constexpr, STEPS: tl.constexpr, X: tl.constexpr, OWED: tl.constexpr,
    UNIT: tl.constexpr, DIVIDE: tl.constexpr, MULTIPLY: tl.constexpr,
):  # fmt: skip
    """A block is read a few times, from the cache, until a magnitude is found that at least k reach and not many more;
    these candidates then lie in registers. Few warps take a block: what waits for nobody is faster than many that meet.
    """
    here = tl.program_id(0).to(tl.int64)
    ROOM: tl.constexpr = min(WIDTH, 2 << STEPS)
    PART: tl.constexpr = min(WIDTH, MOST_AT_ONCE)
    factors = divide, multiply, weight
    at, first, full_bytes = here * SIZE, here * k, low_bytes + high_bytes
    places += here * ROOM
    m, k, low, bitmap, low_bytes, high_bytes = shape_here(
        whole, rest, k, last_k, low, last_low, bitmap, last_bitmap, low_bytes, last_low_bytes, high_bytes,
        last_high_bytes, SIZE,
    )  # fmt: skip
    if here < whole:
        find_largest(x + at, residual + at, wanted + at, kept + first, places, SIZE, k, factors, SIZE == WIDTH, WIDTH,
                     ROOM, PART, X, OWED, UNIT, DIVIDE, MULTIPLY)  # fmt: skip
    else:
        find_largest(x + at, residual + at, wanted + at, kept + first, places, m, k, factors, False, WIDTH, ROOM, PART,
                     X, OWED, UNIT, DIVIDE, MULTIPLY)  # fmt: skip
    write_codes(side + here * full_bytes, places, k, low, low_bytes, LOWS)
    write_marks(side + here * full_bytes + low_bytes, places, k, low, bitmap, high_bytes, HIGHS, STEPS)


@triton.jit
def top_inverse(
    out, wanted, residual, kept, side, whole, rest, k, last_k, low, last_low, bitmap, last_bitmap, low_bytes,
    last_low_bytes, high_bytes, last_high_bytes, divide, multiply, unit, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    MARKS: tl.constexpr, OUT: tl.constexpr, ADD: tl.constexpr, WRITE: tl.constexpr, OWED: tl.constexpr,
    UNIT: tl.constexpr, DIVIDE: tl.constexpr, MULTIPLY: tl.constexpr,
):  # fmt: skip
    """Values to their places; bytes that hold no places make the block NaN."""
    here = tl.program_id(0).to(tl.int64)
    first, full_bytes = here * k, low_bytes + high_bytes
    m, k, low, bitmap, low_bytes, high_bytes = shape_here(
        whole, rest, k, last_k, low, last_low, bitmap, last_bitmap, low_bytes, last_low_bytes, high_bytes,
        last_high_bytes, SIZE,
    )  # fmt: skip
    codes = side + here * full_bytes
    marks = codes + low_bytes
    string = tl.arange(0, MARKS)
    inside = string < 8 * high_bytes
    mark = (tl.load(marks + string // 8, mask=inside, other=0).to(tl.int32) >> (string % 8)) & 1
    # all are taken: no bytes say so
    mark = tl.where(high_bytes == 0, tl.where(string < k, 1, 0), mark)
    rank = tl.cumsum(mark, 0) - 1
    some = (mark == 1) & (rank < k)
    lower = code_at(codes, rank, low, some)
    place = tl.where(bitmap != 0, string, ((string - rank) << low) | lower)
    # two marks side by side have the same upper part
    byte_before = tl.load(marks + (string - 1) // 8, mask=inside & (string > 0), other=0).to(tl.int32)
    adjacent = some & (rank > 0) & (((byte_before >> ((string + 7) % 8)) & (1 - bitmap)) == 1)
    before = code_at(codes, rank - 1, low, adjacent)
    wrong = (adjacent & (lower <= before)) | (some & (place >= m))
    faults = tl.sum(wrong.to(tl.int32)) + tl.where(tl.sum(mark) == k, 0, 1)
    some = some & (tl.zeros_like(string) + faults == 0)
    place = tl.where(some, place, 0)
    value = tl.load(kept + first + rank, mask=some, other=0.0)
    lost = tl.sum((some & is_finite(value)).to(tl.int32)) == 0
    i = tl.arange(0, WIDTH)
    dense = tl.zeros((WIDTH,), tl.float32)
    dense = tl.where(lost, float_of(tl.zeros((WIDTH,), tl.int32) + QUIET_NAN), dense)
    put_values(
        out, wanted, residual, here * SIZE, i, i < m, dense, place, value, some, divide, multiply, unit, OUT, ADD,
        WRITE, OWED, UNIT, DIVIDE, MULTIPLY,
    )  # fmt: skip
