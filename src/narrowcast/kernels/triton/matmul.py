"""Matrix products with a chosen accumulator on GPUs: the bits of the reference.

A program holds a tile of outputs in registers and goes through k = 0, 1, ...: nothing is shared between outputs, so
their order and the shape of the tile change no bit. Pairwise sums wait in scratch memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.matmul.accumulator import Accumulator, How, Number
from narrowcast.kernels.noise import as_signed
from narrowcast.kernels.triton.constants import constants
from narrowcast.kernels.triton.launch import on_device_of
from narrowcast.kernels.triton.matmul_steps import add, product
from narrowcast.kernels.triton.recipe import Named

SEQUENTIAL = tl.constexpr(0)
BLOCKED = tl.constexpr(1)
PAIRWISE = tl.constexpr(2)
ORDERS = {"sequential": 0, "blocked": 1, "pairwise": 2}
LOST = {"saturate": 0, "inf": 1, "nan": 2}
SPAN = 128
"""In the numbering of random bits, rows are padded to whole spans."""


@dataclass(frozen=True, repr=False, eq=False)
class NumberRecipe(Named):
    """A `Number` as constants of a kernel, patterns of float32 or float64."""

    high: float
    low: float
    lost: int
    inf: int
    nan: int
    even_steps: bool
    signed_zero: bool
    parity: int
    least: int
    to_addend: int
    step_shift: int


@dataclass(frozen=True, repr=False, eq=False)
class MatmulJob(Named):
    """What else a kernel is compiled for."""

    wide: bool
    careful: bool
    order: int
    kahan: bool
    stochastic: bool
    fused: bool
    mogami: bool
    mantissa: int
    bias: int
    sign: int
    magnitude: int
    infinite: int
    fraction: int
    half: int
    one: int
    rows: int
    columns: int


def _kind(value: float) -> int:
    return LOST["nan"] if math.isnan(value) else LOST["inf"] if math.isinf(value) else LOST["saturate"]


@lru_cache(maxsize=256)
def _number(number: Number, wide: bool) -> NumberRecipe:
    mantissa, bias = (52, 1023) if wide else (23, 127)
    inf, _, nan = number.specials
    return NumberRecipe(
        number.high, number.low, LOST[number.overflow], _kind(inf), _kind(nan), number.even_steps, number.signed_zero,
        number.parity, (number.min_exponent + bias) << mantissa,
        ((mantissa - number.man_bits) << mantissa) + (1 << (mantissa - 1)), number.man_bits << mantissa,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _job(rule: Accumulator, how: How) -> MatmulJob:
    wide = not how.single
    mantissa, bias, width = (52, 1023, 64) if wide else (23, 127, 32)
    infinite = (2 * bias + 1) << mantissa
    # float64 needs twice the registers, random bits more
    rows, columns = (16, 64) if rule.stochastic else (32, 64) if wide else (64, 64)
    return MatmulJob(
        wide, how.careful, ORDERS[rule.order], rule.kahan, rule.stochastic, rule.fused, rule.multiply == "mogami",
        mantissa, bias, -(1 << (width - 1)), (1 << (width - 1)) - 1, infinite, (1 << mantissa) - 1, 1 << (mantissa - 1),
        bias << mantissa, rows, columns,
    )  # fmt: skip


@triton.jit
def term_at(a, b, k, a_step, b_step, row_mask, column_mask, index, seed, P: tl.constexpr, J: tl.constexpr):
    """The product of column k of a (rows, 1) and row k of b (1, columns), rounded."""
    x = tl.load(a + k * a_step, mask=row_mask, other=0.0)
    y = tl.load(b + k * b_step, mask=column_mask, other=0.0)
    if J.wide:
        x = x.to(tl.float64)
        y = y.to(tl.float64)
    if J.mogami:
        x, y = tl.broadcast(x, y)
    return product(x, y, index, seed, k, P, J)


INTEGERS = ("m", "n", "k", "block", "seed")


@triton.jit(do_not_specialize=INTEGERS)
def matmul_kernel(
    a, b, out, stack, m, n, k, block, seed, a_batch, a_row, a_column, b_batch, b_row, b_column, out_batch, padded,
    P: tl.constexpr, S: tl.constexpr, O: tl.constexpr, J: tl.constexpr,  # noqa: E741
):  # fmt: skip
    tiles = tl.cdiv(n, J.columns)
    batch = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) // tiles) * J.rows + tl.arange(0, J.rows).to(tl.int64)[:, None]
    columns = (tl.program_id(0) % tiles) * J.columns + tl.arange(0, J.columns).to(tl.int64)[None, :]
    row_mask = rows < m
    column_mask = columns < n
    a += batch * a_batch + rows * a_row
    b += batch * b_batch + columns * b_column
    index = (batch * m + rows) * padded + columns
    seed = seed.to(tl.int64)
    if J.wide:
        zero = tl.zeros((J.rows, J.columns), tl.float64)
    else:
        zero = tl.zeros((J.rows, J.columns), tl.float32)
    total = zero
    carry = zero
    nothing = batch * 0  # makes a 64-bit integer of what is added
    wide_k = nothing + k
    if J.order == SEQUENTIAL:
        for i in range(k):
            at = nothing + i
            term = term_at(a, b, at, a_column, b_row, row_mask, column_mask, index, seed, P, J)
            total, carry = add(total, carry, term, index, seed, at, S, J)
    elif J.order == BLOCKED:
        for j in range(tl.cdiv(k, block)):
            part = zero
            part_owed = zero
            for i in range(j * block, tl.minimum(k, j * block + block)):
                at = nothing + i
                term = term_at(a, b, at, a_column, b_row, row_mask, column_mask, index, seed, P, J)
                part, part_owed = add(part, part_owed, term, index, seed, at, S, J)
            total, carry = add(total, carry, part, index, seed, wide_k + j, O, J)
    else:
        # a counter in binary: when a bit falls, two sums of equally many neighbours are added
        size = tl.num_programs(1).to(tl.int64) * m * n
        stack += (batch * m + rows) * n + columns
        mask = row_mask & column_mask
        depth = nothing
        step = wide_k
        for i in range(k):
            at = nothing + i
            term = term_at(a, b, at, a_column, b_row, row_mask, column_mask, index, seed, P, J)
            total, carry = add(zero, zero, term, index, seed, at, S, J)
            done = at + 1
            while done % 2 == 0:
                depth -= 1
                left = tl.load(stack + depth * size, mask=mask, other=0.0)
                total, carry = add(left, zero, total, index, seed, step, S, J)
                step += 1
                done = done // 2
            tl.store(stack + depth * size, total, mask=mask)
            # another thread may read what this one wrote
            tl.debug_barrier()
            depth += 1
        if depth > 0:
            depth -= 1
        while depth > 0:
            depth -= 1
            left = tl.load(stack + depth * size, mask=mask, other=0.0)
            total, carry = add(left, zero, total, index, seed, step, S, J)
            step += 1
    value = total.to(tl.float32)
    value = tl.where(value != value, float("nan"), value)
    tl.store(out + batch * out_batch + rows * n + columns, value, mask=row_mask & column_mask)


def why_not(rule: Accumulator) -> str | None:
    """Why this accumulator cannot run here, or None."""
    tables = [n.name for n in (rule.product_number, rule.sum_number, rule.outer_number) if not n.by_arithmetic]
    return f"{tables[0]} is a table of values, to which only the CPU's reference rounds here" if tables else None


def _scratch(rule: Accumulator, out: Tensor, terms: int, how: How) -> Tensor:
    depth = max(terms, 1).bit_length() + 1 if rule.order == "pairwise" else 0
    dtype = torch.float32 if how.single else torch.float64
    return torch.empty(depth * out.numel() or 1, dtype=dtype, device=out.device)


def matmul(a_BMK: Tensor, b_BKN: Tensor, rule: Accumulator, seed: int, out: Tensor, how: How) -> Tensor:
    """See `kernels.matmul.matmul`; `out` is contiguous."""
    why = why_not(rule)
    if why is not None:
        raise NotImplementedError(f"matmul: {why}; move a and b to the CPU")
    if out.numel() == 0:
        return out
    if rule.multiply == "mogami":
        # subnormal operands count as zero
        a_BMK, b_BKN = (torch.where(x.abs() < torch.finfo(x.dtype).tiny, x * 0, x) for x in (a_BMK, b_BKN))
    job = _job(rule, how)
    batch, m, n = out.shape
    k = a_BMK.shape[2]
    numbers = (constants(_number(x, job.wide)) for x in (rule.product_number, rule.sum_number, rule.outer_number))
    grid = (triton.cdiv(m, job.rows) * triton.cdiv(n, job.columns), batch)
    with on_device_of(out):
        matmul_kernel[grid](
            a_BMK, b_BKN, out, _scratch(rule, out, k, how), m, n, k, rule.block, as_signed(seed), *a_BMK.stride(),
            *b_BKN.stride(), m * n, -(-n // SPAN) * SPAN, *numbers, constants(job), num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out
