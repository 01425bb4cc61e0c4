"""Decoding: one pass from bytes to values, or to what is there plus the values."""

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import plus, read_floats, write_floats
from narrowcast.kernels.triton.encode import end_of
from narrowcast.kernels.triton.planes import WIDE, inside, places, read_values


@triton.jit
def decode_tile(
    wire, out, table, scales_at, tail_at, start, rem, row0,
    P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    value = read_values(wire, table, (0, scales_at, tail_at), (start, rem, row0), P, J, MASKED)
    mask = inside(rem, J)
    if J.accumulate:
        value = plus(read_floats(out + start, places(J), mask, J.out_dtype, MASKED), value)
    write_floats(out + start, places(J), value, mask, J.out_dtype, True, MASKED)


@triton.jit(do_not_specialize=("n", "scales_at", "tail_at", "chunks"))
def decode_kernel(wire, out, table, n, scales_at, tail_at, chunks, P: tl.constexpr, J: tl.constexpr):
    """A program does one tile; where a block is larger than that, `chunks` programs do a block."""
    program = tl.program_id(0).to(tl.int64)
    row0 = program * J.rows
    start = row0 * J.step
    end = tl.minimum(start + J.rows * J.step, n)
    if J.mode == WIDE:
        row0 = program // chunks
        start = row0 * P.block + (program % chunks) * J.cols
        end = tl.minimum(start + J.cols, end_of(row0, n, P))
    rem = (end - start).to(tl.int32)
    if J.exact:
        decode_tile(wire, out, table, scales_at, tail_at, start, rem, row0, P, J, False)
    elif J.cols != J.step:
        decode_tile(wire, out, table, scales_at, tail_at, start, rem, row0, P, J, True)
    else:
        if rem == J.rows * J.step:
            decode_tile(wire, out, table, scales_at, tail_at, start, rem, row0, P, J, False)
        else:
            decode_tile(wire, out, table, scales_at, tail_at, start, rem, row0, P, J, True)
