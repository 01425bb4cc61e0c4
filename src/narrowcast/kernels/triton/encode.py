"""Encoding: one kernel where a tile holds whole blocks; two where a scale needs more than that; three for sums over it.

`encode_kernel` reads values (of a tensor, or the sum of W decoded wires), adds residuals, finds scales, rounds,
packs and stores, and keeps what rounding removed, all in one pass. Where a block is larger than a tile `parts_kernel`
runs first and leaves what the scale follows from; nothing waits for the host.
"""

# mypy: disable-error-code="assignment,misc"
# tuples grow while a kernel is compiled

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import (
    INFINITE,
    MAGNITUDE,
    add_residual,
    after_loads,
    bf16_pattern,
    bits_of,
    clamp_overflow,
    float_of,
    fp16_of,
    inverse,
    is_finite,
    own_noise,
    plus,
    power_of_two,
    read_floats,
    shared_noise,
    store,
    tree_sum_down,
    write_floats,
)
from narrowcast.kernels.triton.codes import code_of, cpd_rounded, float_code, uniform_raw, with_specials
from narrowcast.kernels.triton.fp4_sum import sum_by_halves
from narrowcast.kernels.triton.packed_sum import sum_by_words
from narrowcast.kernels.triton.packing import write_packed, write_signs
from narrowcast.kernels.triton.planes import (
    AFFINE,
    CAST,
    IN_TILE,
    MEANS,
    NVFP4,
    SCALED,
    SIGN,
    STORE_NONE,
    WIDE,
    as_stored,
    inside,
    places,
    read_coded,
    spread,
    value_of,
    write_cast,
    write_codes,
    write_scales,
    write_words,
)
from narrowcast.kernels.triton.rotation import ALWAYS, IF_NEEDED, NEVER, read_values, rotated, unrotated
from narrowcast.kernels.triton.scales import (
    DIVIDE,
    largest,
    norm_exponent,
    parts_top,
    tensor_scale,
    tile_scales,
    wide_scales,
)
from narrowcast.kernels.triton.spikes import put_spikes, spike_values, take_spikes, write_spikes

#
# memory:  x (values, or J.world wires), wire, residual, out, table
# planes:  stride (bytes between wires), where scales begin, where nvfp4's tensor scale lies or the side plane begins
# noise:   seed, stream, offset
# factors: divide, multiply (of the reduction), weight and unit of residuals: see `launch.Factors`
# tile:    start, rem (values in it), row0 (number of its first block)


@triton.jit
def finish(total, factors, J: tl.constexpr):
    """A sum, divided and multiplied as the reduction says."""
    divide, multiply, _weight, _unit = factors
    if J.divide:
        total = clamp_overflow(tl.div_rn(total, tl.zeros_like(total) + divide), is_finite(total))
    if J.multiply:
        total = clamp_overflow(total * multiply, is_finite(total))
    return total


@triton.jit
def sum_one_by_one(wires, table, planes, tile, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    stride, _scales_at, _tail_at = planes
    total = read_values(wires, table, planes, tile, P, J, MASKED, NEVER)
    if J.few:
        for rank in tl.static_range(1, J.world):
            total = total + read_values(wires + rank * stride, table, planes, tile, P, J, MASKED, NEVER)
    else:
        for rank in range(1, J.world):
            total = total + read_values(wires + rank * stride, table, planes, tile, P, J, MASKED, NEVER)
    return total


@triton.jit
def sum_at_once(wires, table, planes, tile, P: tl.constexpr, J: tl.constexpr):
    """The same of a full tile: all wires are asked for before the first is waited for."""
    stride, _scales_at, _tail_at = planes
    read = ()
    for rank in tl.static_range(J.world):
        read += (read_coded(wires + rank * stride, planes, tile, P, J, False),)
    code, first, second = read[0]
    if P.store == STORE_NONE:
        code = after_loads((code,), J.gated)[0]
    else:
        first = float_of(after_loads((bits_of(first),), J.gated)[0])
    total = value_of(code, first, second, table, P, J)
    for rank in tl.static_range(1, J.world):
        code, first, second = read[rank]
        total = total + value_of(code, first, second, table, P, J)
    return total


@triton.jit
def sum_carefully(wires, table, planes, tile, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """The same, where a finite sum that is too large becomes the largest number at each step."""
    stride, _scales_at, _tail_at = planes
    total = read_values(wires, table, planes, tile, P, J, MASKED, ALWAYS)
    for rank in range(1, J.world):
        total = plus(total, read_values(wires + rank * stride, table, planes, tile, P, J, MASKED, ALWAYS))
    if J.no_minus:
        total = total + 0.0
    return total


@triton.jit
def sum_of_wires(wires, table, planes, tile, factors, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """Decode the same tile of J.world wires and add in rank order."""
    if P.rotated or P.spikes:
        total = sum_one_by_one(wires, table, planes, tile, P, J, MASKED)
    elif J.halves and not MASKED:
        total = sum_by_halves(wires, table, planes, tile, P, J)
    elif J.each and not MASKED:
        total = sum_by_words(wires, table, planes, tile, P, J, not J.few)
    elif J.gated and not (MASKED or P.method == CAST):
        total = sum_at_once(wires, table, planes, tile, P, J)
    else:
        total = sum_one_by_one(wires, table, planes, tile, P, J, MASKED)
    # what is not finite now was not finite before or has overflowed on the way: rare, and looked into only then
    if tl.max(bits_of(total) & MAGNITUDE, axis=0) >= INFINITE:
        total = sum_carefully(wires, table, planes, tile, P, J, MASKED)
    return finish(total, factors, J)


@triton.jit
def values_to_send(memory, planes, tile, factors, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """A tile of what is to be sent, and the residuals there. Zero outside."""
    x, _wire, residual, _out, table = memory
    start, rem, _row0 = tile
    _divide, _multiply, weight, _unit = factors
    mask = inside(rem, J)
    if J.world:
        v = sum_of_wires(x, table, planes, tile, factors, P, J, MASKED)
        if MASKED:
            v = tl.where(mask, v, 0.0)
    else:
        v = read_floats(x + start, places(J), mask, J.x_dtype, MASKED)
    old = v
    if J.residual:
        old = read_floats(residual + start, places(J), mask, 0, MASKED)
        if J.residual != 2:  # then the first pass added it
            v = add_residual(v, old, weight, J.unit)
    return v, old


@triton.jit
def tile_noise(start, noise, P: tl.constexpr, J: tl.constexpr):
    """Random bits for each place, where the codec rounds stochastically."""
    seed, stream, offset = noise
    if P.stochastic:
        if J.shared_noise:
            return shared_noise(offset + start, seed, stream, J.rows * J.cols)
        else:
            return own_noise(offset + start + places(J), seed, stream)
    else:
        return 0


@triton.jit
def cpd_codes(t, P: tl.constexpr):
    t = cpd_rounded(t, P.codes)
    return with_specials(t, float_code(tl.where(is_finite(t), t, 0.0), 0, P.codes, False), P.codes)


@triton.jit
def row_inverse(scale, P: tl.constexpr, J: tl.constexpr):
    """1 / scale, and 0 for a block of zeros or of non-finite values."""
    if (P.rule != DIVIDE) & (P.method == SCALED) & (not J.given_scale):
        # a normal power of two: the exponent changes its sign
        return float_of(tl.where(scale > 0, 0x7F000000 - bits_of(scale), 0))
    else:
        return inverse(scale)


@triton.jit
def packed_codes(v, first, random, table, P: tl.constexpr, J: tl.constexpr):
    """What `write_packed` takes: any code in rows that are not finite."""
    t = v * spread(row_inverse(first, P, J), J)
    if J.raw:
        return uniform_raw(t, P.codes, J.cut)
    else:
        return code_of(t, random, table, P.codes, P.stochastic)


@triton.jit
def tile_codes(v, first, second, random, table, P: tl.constexpr, J: tl.constexpr):
    """The code of each value under the scales of its row."""
    if (P.method == MEANS) | (P.method == SIGN):
        tell = spread(first, J)
        return tl.where((tell == tell) & (v >= 0), 1, 0)
    elif P.store == STORE_NONE:
        t = v * P.inverse
        if P.cpd:
            return cpd_codes(t, P)
        else:
            code = code_of(tl.where(is_finite(v), t, 0.0), random, table, P.codes, P.stochastic)
            return with_specials(v, code, P.codes)
    else:
        if P.method == AFFINE:
            t = (v - spread(first, J)) * spread(inverse(second), J)
        else:
            t = v * spread(row_inverse(first, P, J), J)
        # the codes of a non-finite block are zero: its scale says so
        tell = spread(first, J)
        t = tl.where(tell == tell, t, 0.0)
        if P.cpd:
            return cpd_codes(t, P)
        else:
            return code_of(t, random, table, P.codes, P.stochastic)


@triton.jit
def cast_back(v, P: tl.constexpr):
    """What a plain cast brings back."""
    if P.cast == 0:
        return v
    elif P.cast == 1:
        return float_of(bf16_pattern(v, True) << 16)
    else:
        return fp16_of(v, True).to(tl.float32)


@triton.jit
def keep_residual(residual, v, sent, old, factors, mask, J: tl.constexpr, MASKED: tl.constexpr):
    """What should have been sent and was not; where that is not finite the old residual stays."""
    _divide, _multiply, _weight, unit = factors
    lost = v - sent
    if J.unit == 1:
        lost = lost * unit
    elif J.unit == 2:
        lost = tl.div_rn(lost, tl.zeros_like(lost) + unit)
    store(residual + places(J), tl.where(is_finite(lost), lost, old), mask, MASKED)


@triton.jit
def encode_tile(
    memory, planes, tile, noise, factors, first, second, tensor,
    P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Everything that becomes of one tile. The scales come from the caller unless its rows are blocks."""
    x, wire, residual, out, table = memory
    _stride, scales_at, tail_at = planes
    start, rem, row0 = tile
    mask = inside(rem, J)
    wanted, old = values_to_send(memory, planes, tile, factors, P, J, MASKED)
    if P.spikes:
        v, spikes, top = take_spikes(wanted, rem, P, J, MASKED)
        low, high = spike_values(x, wanted, spikes, tile, P, J, MASKED)
        write_spikes(wire, tail_at, tile, spikes, low, high, P, J, MASKED)
    else:
        v = rotated(wanted, table, rem, P, J, MASKED)
        if J.mode == IN_TILE:
            top = largest(v, J)
    if P.method == CAST:
        write_cast(wire, start, v, mask, P, J, MASKED)
        sent = cast_back(v, P)
    else:
        if J.mode == IN_TILE:
            first, second = tile_scales(v, top, rem, mask, tensor, P, J, MASKED)
            row_mask = tl.arange(0, J.rows) * J.step < rem
            write_scales(wire, scales_at, row0, first, second, row_mask, P, J, MASKED)
        random = tile_noise(start, noise, P, J)
        if J.packed and not MASKED:
            codes = packed_codes(v, first, random, table, P, J)
            write_packed(wire, start, codes, first == first, P, J)
            if J.raw:
                codes = (codes & (2**P.bits - 1)) ^ P.codes.sign_bit
        else:
            codes = tile_codes(v, first, second, random, table, P, J)
            if J.signs and not MASKED:
                write_signs(wire, start, v, first == first, J)
            else:
                write_codes(wire, start, codes, rem, mask, P, J, MASKED)
        if J.residual or J.out:
            sent = value_of(codes, as_stored(first, P), second, table, P, J)
            sent = unrotated(sent, first, second, table, rem, P, J, MASKED, IF_NEEDED)
            if P.spikes:
                sent = put_spikes(sent, spikes, low, high, P, J)
    if J.residual:
        keep_residual(residual + start, wanted, sent, old, factors, mask, J, MASKED)
    if J.out:
        write_floats(out + start, places(J), sent, mask, J.out_dtype, True, MASKED)


@triton.jit
def encode_some(memory, planes, tile, noise, factors, first, second, tensor, P: tl.constexpr, J: tl.constexpr):
    """A full tile without masks, so that loads and stores are wide; one that is not full with them."""
    _start, rem, _row0 = tile
    if J.exact:
        encode_tile(memory, planes, tile, noise, factors, first, second, tensor, P, J, False)
    elif J.cols != J.step:
        encode_tile(memory, planes, tile, noise, factors, first, second, tensor, P, J, True)
    else:
        if rem == J.rows * J.step:
            encode_tile(memory, planes, tile, noise, factors, first, second, tensor, P, J, False)
        else:
            encode_tile(memory, planes, tile, noise, factors, first, second, tensor, P, J, True)


PLAIN = (
    "n", "scales_at", "tail_at", "codes_end", "scales_end", "tiles", "chunks", "blocks", "count",
    "seed", "stream", "offset", "divide", "multiply", "weight", "unit",
)  # fmt: skip
"""Numbers that no kernel is specialised for: of an integer the width matters alone, and that of noise is 64 bits."""


@triton.jit
def pad(wire, begin, end):
    """Zero bytes between planes; at most 3."""
    at = begin + tl.arange(0, 4)
    tl.store(wire + at, tl.zeros((4,), tl.uint8), mask=at < end)


@triton.jit
def end_of(block, n, P: tl.constexpr):
    """Where a block ends."""
    if P.block:
        return tl.minimum((block + 1) * P.block, n)
    else:
        return tl.minimum(block + (1 << 62), n)


@triton.jit(do_not_specialize=PLAIN)
def encode_kernel(
    x, wire, residual, out, table, parts, sums, given_scale, n, stride, per, scales_at, tail_at, codes_end, scales_end,
    tiles, chunks, blocks, count, seed: tl.int64, stream: tl.int64, offset: tl.int64, divide, multiply, weight, unit,
    P: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """A program does `tiles` tiles; where a block is larger than a tile, `chunks` programs do a block. J.many: a row of
    programs does `per` values, whose wire begins `stride` bytes after the one before.
    """
    program = tl.program_id(0).to(tl.int64)
    offset = offset.to(tl.int64)
    if J.many:
        row = tl.program_id(1).to(tl.int64)
        x += row * per
        residual += row * per
        offset += row * per
        wire += row * stride
    memory = (x, wire, residual, out, table)
    planes = (stride, scales_at, tail_at)
    noise = (seed.to(tl.int64), stream.to(tl.int64), offset)
    factors = (divide, multiply, weight, unit)
    first = tl.zeros((J.rows,), tl.float32)
    second = first
    tensor = first
    if P.store != STORE_NONE:  # noqa: SIM102  the one is known when compiling, the other is not
        if program == 0:
            pad(wire, codes_end, scales_at)
    if P.method == NVFP4:
        tensor = tensor_scale(parts_top(parts, 0, count, J), P)
        if program == 0:
            pad(wire, scales_end, tail_at)
            write_words(wire + tail_at, tl.zeros((1,), tl.int32), bits_of(tensor), tensor == tensor, 4, J.aligned, True)
    if P.spikes:  # noqa: SIM102
        if program == 0:
            pad(wire, scales_end, tail_at)
    if J.mode == WIDE:
        block = program // chunks
        chunk = program % chunks
        begin = block * P.block
        end = end_of(block, n, P)
        first, second = wide_scales(parts, sums, given_scale, block, blocks, count, (end - begin).to(tl.int32), P, J)
        if chunk == 0:
            write_scales(wire, scales_at, block, first, second, first == first, P, J, False)
        for number in range(tiles):
            start = begin + (chunk * tiles + number) * J.cols
            if start < end:
                tile = (start, tl.minimum(end - start, J.cols).to(tl.int32), block)
                encode_some(memory, planes, tile, noise, factors, first, second, tensor, P, J)
    elif J.loop:
        for number in range(tiles):
            row0 = (program * tiles + number) * J.rows
            start = row0 * J.step
            if start < n:
                tile = (start, tl.minimum(n - start, J.rows * J.step).to(tl.int32), row0)
                encode_some(memory, planes, tile, noise, factors, first, second, tensor, P, J)
    else:
        row0 = program * J.rows
        tile = (row0 * J.step, tl.minimum(n - row0 * J.step, J.rows * J.step).to(tl.int32), row0)
        encode_some(memory, planes, tile, noise, factors, first, second, tensor, P, J)


@triton.jit
def parts_tile(memory, planes, tile, factors, top, low, high, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """Largest magnitude (and ends) of a tile, beside those of tiles before; the values kept where asked."""
    _x, _wire, _residual, total, _table = memory
    start, rem, _row0 = tile
    mask = inside(rem, J)
    v, _old = values_to_send(memory, planes, tile, factors, P, J, MASKED)
    if J.out:
        store(total + start + places(J), v, mask, MASKED)
    here = largest(v, J)
    if P.method == NVFP4:
        # a block that is not finite says nothing about the others
        here = tl.where(here < INFINITE, here, 0)
    top = tl.maximum(top, tl.max(here, axis=0))
    if P.method == AFFINE:
        least = v
        most = v
        if MASKED:
            least = tl.where(mask, v, float("inf"))
            most = tl.where(mask, v, float("-inf"))
        low = tl.minimum(low, tl.min(least, axis=0))
        high = tl.maximum(high, tl.max(most, axis=0))
    return top, low, high


@triton.jit(do_not_specialize=PLAIN)
def parts_kernel(
    x, residual, total, table, parts, n, stride, scales_at, tail_at, tiles, blocks, count,
    divide, multiply, weight, unit, P: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """The first pass: `count` programs for each block leave what its scale follows from."""
    program = tl.program_id(0).to(tl.int64)
    memory = (x, x, residual, total, table)
    planes = (stride, scales_at, tail_at)
    factors = (divide, multiply, weight, unit)
    block = program // count
    begin = block * P.block
    end = end_of(block, n, P)
    if P.method == NVFP4:
        # the whole tensor; a product, so that the compiler knows where loads begin
        begin = block * 0
        end = tl.minimum(begin + (1 << 62), n)
    top = tl.full((), 0, tl.int32)
    low = tl.full((), float("inf"), tl.float32)
    high = tl.full((), float("-inf"), tl.float32)
    for number in range(tiles):
        start = begin + ((program % count) * tiles + number) * (J.rows * J.step)
        if start < end:
            rem = tl.minimum(end - start, J.rows * J.step).to(tl.int32)
            row0 = block
            if P.method == NVFP4:
                row0 = start // P.block
            tile = (start, rem, row0)
            if J.exact:
                top, low, high = parts_tile(memory, planes, tile, factors, top, low, high, P, J, False)
            else:
                if rem == J.rows * J.step:
                    top, low, high = parts_tile(memory, planes, tile, factors, top, low, high, P, J, False)
                else:
                    top, low, high = parts_tile(memory, planes, tile, factors, top, low, high, P, J, True)
    tl.store(parts + program, top)
    if P.method == AFFINE:
        tl.store(parts + blocks * count + program, bits_of(low))
        tl.store(parts + 2 * blocks * count + program, bits_of(high))


@triton.jit(do_not_specialize=PLAIN)
def sums_kernel(
    x, residual, parts, sums, n, blocks, count, weight, P: tl.constexpr, J: tl.constexpr
):  # fmt: skip
    """The first levels of the halving tree of a large block: J.columns sums of P.tree_width / J.columns values each."""
    program = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = J.columns // J.cols
    block = program // GROUPS
    column = (program % GROUPS) * J.cols + tl.arange(0, J.cols)
    inner = tl.arange(0, J.rows)[:, None] * J.columns + column[None, :]
    begin = block * P.block
    mask = inner < tl.minimum(n - begin, P.block)
    v = read_floats(x + begin, inner, mask, J.x_dtype, True)
    if J.residual:
        old = read_floats(residual + begin, inner, mask, 0, True)
        v = add_residual(v, old, weight, J.unit)
    into = sums + block * J.columns + column
    if P.l2:
        small = v * power_of_two(0 - norm_exponent(parts_top(parts, block, count, J)))[:, None]
        tl.store(into, bits_of(tree_sum_down(small * small, J.rows, J.cols, J.levels)))
    elif P.method == SIGN:
        small = tl.abs(v) * (1.0 / P.tree_width)
        tl.store(into, bits_of(tree_sum_down(small, J.rows, J.cols, J.levels)))
    else:
        small = v * (1.0 / P.tree_width)
        low = tree_sum_down(tl.where(v < 0, small, 0.0), J.rows, J.cols, J.levels)
        high = tree_sum_down(tl.where(v < 0, 0.0, small), J.rows, J.cols, J.levels)
        tl.store(into, bits_of(low))
        tl.store(into + blocks * J.columns, bits_of(high))
        tl.store(into + 2 * blocks * J.columns, tl.sum(tl.where(v < 0, 1, 0), axis=0))
