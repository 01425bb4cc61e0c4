"""Decoding: one pass from bytes to values, to what is there plus the values, or to the sum of several wires."""

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import plus, read_floats, write_floats
from narrowcast.kernels.triton.encode import end_of, sum_of_wires
from narrowcast.kernels.triton.planes import WIDE, inside, places
from narrowcast.kernels.triton.rotation import IF_NEEDED, read_values


@triton.jit
def decode_tile(wires, out, table, planes, tile, factors, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    start, rem, _row0 = tile
    mask = inside(rem, J)
    if J.world:
        value = sum_of_wires(wires, table, planes, tile, factors, P, J, MASKED)
    else:
        value = read_values(wires, table, planes, tile, P, J, MASKED, IF_NEEDED)
    if J.accumulate:
        value = plus(read_floats(out + start, places(J), mask, J.out_dtype, MASKED), value)
    write_floats(out + start, places(J), value, mask, J.out_dtype, True, MASKED)


@triton.jit(do_not_specialize=("n", "scales_at", "tail_at", "chunks", "divide", "multiply"))
def decode_kernel(
    wires, out, table, n, stride, per, scales_at, tail_at, chunks, divide, multiply, P: tl.constexpr, J: tl.constexpr
):
    """A program does one tile; where a block is larger than that, `chunks` programs do a block. Wires begin `stride`
    bytes apart: J.world of them are summed, or with J.many a row of programs decodes each, to `per` values.
    """
    program = tl.program_id(0).to(tl.int64)
    if J.many:
        row = tl.program_id(1).to(tl.int64)
        wires += row * stride
        out += row * per
    planes = (stride, scales_at, tail_at)
    factors = (divide, multiply, divide, multiply)
    row0 = program * J.rows
    start = row0 * J.step
    end = tl.minimum(start + J.rows * J.step, n)
    if J.mode == WIDE:
        row0 = program // chunks
        start = row0 * P.block + (program % chunks) * J.cols
        end = tl.minimum(start + J.cols, end_of(row0, n, P))
    rem = (end - start).to(tl.int32)
    tile = (start, rem, row0)
    if J.exact:
        decode_tile(wires, out, table, planes, tile, factors, P, J, False)
    elif J.cols != J.step:
        decode_tile(wires, out, table, planes, tile, factors, P, J, True)
    else:
        if rem == J.rows * J.step:
            decode_tile(wires, out, table, planes, tile, factors, P, J, False)
        else:
            decode_tile(wires, out, table, planes, tile, factors, P, J, True)
