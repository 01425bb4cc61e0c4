"""The kernels of `+topK`: the largest values of a block and their places, there and back."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import INFINITE, QUIET_NAN, bits_of, float_of, is_finite, load
from narrowcast.kernels.triton.constants import INTERPRETED
from narrowcast.kernels.triton.sparse import code_at, put_values, ranked, shape_here, source, write_codes

FEW_MARKS = tl.constexpr(4096)
MOST_AT_ONCE = tl.constexpr(2048 if INTERPRETED else 512)


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
def bits_set(word):
    """How many of 16 bits are one."""
    word = word - ((word >> 1) & 0x5555)
    word = (word & 0x3333) + ((word >> 2) & 0x3333)
    word = (word + (word >> 4)) & 0x0F0F
    return (word + (word >> 8)) & 0x1F


@triton.jit
def words_of(small, i, PART: tl.constexpr, WORD: tl.constexpr):
    """A bit for each value that is not small, WORD of them in an integer."""
    bits = tl.where(small, 0, 1 << (i & (WORD - 1)))
    return tl.sum(tl.reshape(bits, (PART // WORD, WORD)), axis=1)


@triton.jit
def part_of(x, residual, wanted, number, m, factors, FIRST: tl.constexpr, PART: tl.constexpr, FULL: tl.constexpr,
            X: tl.constexpr, OWED: tl.constexpr, UNIT: tl.constexpr, DIVIDE: tl.constexpr,
            MULTIPLY: tl.constexpr):  # fmt: skip
    """Places in a part of a block and what is to be sent of them. FIRST: nobody has asked before."""
    divide, multiply, weight = factors
    i = number * PART + tl.arange(0, PART)
    if OWED and not FIRST:
        v = load(wanted + i, i < m, not FULL)
    else:
        v = source(x, residual, wanted, i, i < m, divide, multiply, weight, X, OWED, UNIT, DIVIDE, MULTIPLY, not FULL)
    return i, v


@triton.jit
def logarithm(count):
    """About that to the base 2 of a count: a straight line between powers of two."""
    return bits_of(tl.zeros((1,), tl.float32) + count).to(tl.float32) * (1.0 / (1 << 23)) - 127.0


@triton.jit
def write_places(places, word, set_here, COUNT: tl.constexpr, WORD: tl.constexpr):
    """The places of the bits that are one, in ascending order."""
    first = tl.arange(0, COUNT) * WORD
    rank = tl.cumsum(set_here, 0) - set_here
    for step in range(tl.max(set_here)):
        # the lowest bit alone, and its number as an exponent
        lowest = word & (0 - word)
        bit = (bits_of(lowest.to(tl.float32)) >> 23) - 127
        tl.store(places + rank + step, (first + bit).to(tl.int16), mask=lowest != 0)
        word = word ^ lowest


@triton.jit
def next_guess(low, high, low_count, high_count, few, step):
    """Where between two magnitudes about 2**few are left, if their logarithm falls evenly; each third time the middle.

    It decides only how many steps a search takes: at most 93.
    """
    most, least = logarithm(low_count), logarithm(tl.maximum(high_count.to(tl.float32), 0.5))
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
def find_largest(x, residual, wanted, kept, places, m, k, factors, FULL: tl.constexpr, WIDTH: tl.constexpr,
                 ROOM: tl.constexpr, PART: tl.constexpr, X: tl.constexpr, OWED: tl.constexpr, UNIT: tl.constexpr,
                 DIVIDE: tl.constexpr, MULTIPLY: tl.constexpr):  # fmt: skip
    """The k largest of a block, exactly, and their places. FULL: the block has WIDTH values."""
    divide, multiply, weight = factors
    WORD: tl.constexpr = min(PART, 16)
    HERE: tl.constexpr = PART // WORD
    sums = tl.zeros((PART,), tl.float32)
    for number in range(WIDTH // PART):
        _i, v = part_of(x, residual, wanted, number, m, factors, True, PART, FULL, X, OWED, UNIT, DIVIDE, MULTIPLY)
        sums += tl.abs(v)
    if OWED:
        tl.debug_barrier()
    floor, ceiling = tl.full((), 0, tl.int32), tl.full((), 1, tl.int32) + INFINITE
    enough, fewer = m + tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    few = logarithm(k)
    # about half again as many as are wanted, if values are spread as normal ones are
    likely = tl.sum(sums) / m * (0.55 * (logarithm(enough) - few - 0.6))
    guess = tl.minimum(tl.maximum(tl.sum(bits_of(likely)), 1), ceiling - 1)
    guess, step = tl.where(enough > ROOM, guess, 0), 0
    words = places + ROOM
    all_words = words + tl.arange(0, WIDTH // WORD)
    word, set_here = tl.zeros((WIDTH // WORD,), tl.int32), tl.zeros((WIDTH // WORD,), tl.int32)
    while (step == 0) | ((enough > ROOM) & (ceiling - floor > 1)):
        least = float_of(tl.zeros((PART,), tl.int32) + guess)
        for number in range(WIDTH // PART):
            i, v = part_of(x, residual, wanted, number, m, factors, False, PART, FULL, X, OWED, UNIT, DIVIDE, MULTIPLY)
            # what is not a number is not less
            small = tl.abs(v) < least if FULL else (tl.abs(v) < least) | (i >= m)
            tl.store(words + number * HERE + tl.arange(0, HERE), words_of(small, i, PART, WORD).to(tl.int16))
        tl.debug_barrier()
        word = tl.load(all_words).to(tl.int32) & 0xFFFF
        set_here = bits_set(word)
        floor, ceiling, enough, fewer = narrowed(tl.sum(set_here), guess, floor, ceiling, enough, fewer, k)
        step += 1
        guess = next_guess(floor, ceiling, enough, fewer, few + 0.6, step)
        # after two misses: perhaps too few are not zero at all
        guess = tl.where((step == 2) & (floor == 0), 1, guess)
        tl.debug_barrier()
    if enough > ROOM:
        # more candidates than there is room for are equal to the smallest: the first of them are taken at once
        before = tl.full((), 0, tl.int32)
        for number in range(WIDTH // PART):
            i, v = part_of(x, residual, wanted, number, m, factors, False, PART, FULL, X, OWED, UNIT, DIVIDE, MULTIPLY)
            magnitude = ranked(v, i < m)
            equal = (magnitude == floor).to(tl.int32)
            late = before + tl.cumsum(equal, 0) > k - fewer
            small = (magnitude < floor) | ((magnitude == floor) & late)
            tl.store(words + number * HERE + tl.arange(0, HERE), words_of(small, i, PART, WORD).to(tl.int16))
            before += tl.sum(equal)
        tl.debug_barrier()
        word = tl.load(all_words).to(tl.int32) & 0xFFFF
        set_here = bits_set(word)
        enough = k + tl.full((), 0, tl.int32)
    write_places(places, word, set_here, WIDTH // WORD, WORD)
    tl.debug_barrier()
    j = tl.arange(0, ROOM)
    i = tl.load(places + j, mask=j < enough, other=0).to(tl.int32)
    if OWED:
        v = tl.load(wanted + i, mask=j < enough, other=0.0)
    else:
        v = source(x, residual, wanted, i, j < enough, divide, multiply, weight, X, False, UNIT, DIVIDE, MULTIPLY, True)
    magnitude, step = ranked(v, j < enough), 0
    while (enough != k) & (ceiling - floor > 1):
        guess = next_guess(floor, ceiling, enough, fewer, few, step)
        count = tl.sum((magnitude >= guess).to(tl.int32))
        floor, ceiling, enough, fewer = narrowed(count, guess, floor, ceiling, enough, fewer, k)
        step += 1
    ones = (magnitude >= floor).to(tl.int32)
    if enough != k:
        equal = (magnitude == floor).to(tl.int32)
        ones = tl.where(tl.cumsum(equal, 0) <= k - fewer, ones, (magnitude > floor).to(tl.int32))
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
    """A block is read twice, the second time from the cache: for the mean magnitude, from which one is guessed that at
    least k reach and not many more, and for those that do, one bit each, from which their places follow. Then the k
    largest of these candidates are looked for. A wrong guess costs another reading.

    One warp takes a block: what all threads of a block must do, such as guessing, is done as often as there are warps.
    """
    here = tl.program_id(0).to(tl.int64)
    ROOM: tl.constexpr = min(WIDTH, 2 << STEPS)
    factors = divide, multiply, weight
    at, first, full_bytes = here * SIZE, here * k, low_bytes + high_bytes
    PART: tl.constexpr = min(WIDTH, MOST_AT_ONCE)
    places += here * (ROOM + WIDTH // min(WIDTH, 16))
    m, k, low, bitmap, low_bytes, high_bytes = shape_here(
        whole, rest, k, last_k, low, last_low, bitmap, last_bitmap, low_bytes, last_low_bytes, high_bytes,
        last_high_bytes, SIZE,
    )  # fmt: skip
    if here < whole:
        find_largest(x + at, residual + at, wanted + at, kept + first, places, SIZE, k, factors, SIZE == WIDTH, WIDTH,
                     ROOM, PART, X, OWED, UNIT, DIVIDE, MULTIPLY)  # fmt: skip
    else:
        find_largest(x + at, residual + at, wanted + at, kept + first, places, m, k, factors, False, WIDTH, ROOM,
                     PART, X, OWED, UNIT, DIVIDE, MULTIPLY)  # fmt: skip
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
