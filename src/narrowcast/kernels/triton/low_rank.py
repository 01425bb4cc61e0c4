"""The products of low rank on a GPU: each reads a matrix and its residual once for every four vectors.

Sums have an order that the shapes alone decide, so a GPU gives the same bits from run to run; it is not the CPU's
order. `finish`, which only multiplies and adds pair after pair, has the CPU's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.arithmetic import Feedback
from narrowcast.kernels.triton import launch
from narrowcast.kernels.triton.bits import add_residual, clamp_overflow, is_finite, read_floats
from narrowcast.kernels.triton.recipe import DTYPES
from narrowcast.kernels.triton.shapes import Tuning, pow2
from narrowcast.kernels.triton.sparse import unsent

VECTORS = 4
"""So many vectors share one reading of the matrix."""
ROWS, COLS = 16, 128
SMALLER, LARGER = tl.constexpr(2.0**-16), tl.constexpr(2.0**16)
PROGRAMS = 1024
"""So many programs keep a GPU busy: the rows of a matrix are cut where its columns are fewer."""
TILE = Tuning(ROWS * COLS, 4).options()
PLAIN = Tuning(COLS, 1).options()
LINE = 4096
LINES = Tuning(LINE, 8).options()
MOST = 2**31
"""Offsets in factors are numbers of 32 bits."""


@triton.jit
def read_tile(x, residual, row, col, n, m, weight, X: tl.constexpr, OWED: tl.constexpr, UNIT: tl.constexpr):
    """Some rows and columns of a matrix with its residual; zeros outside."""
    at = row.to(tl.int64)[:, None] * m + col[None, :]
    mask = (row < n)[:, None] & (col < m)[None, :]
    v = read_floats(x, at, mask, X, True)
    if OWED:
        v = add_residual(v, tl.load(residual + at, mask=mask, other=0.0), weight, UNIT)
    return v


@triton.jit
def vector(factor, number, vectors, place, length):
    """Part of one vector of a factor, made smaller so that no sum overflows; zeros where there is none."""
    inside = place < tl.where(number < vectors, length, 0)
    return tl.load(factor + number * length + place, mask=inside, other=0.0) * SMALLER


@triton.jit
def larger(total):
    """Undo that; what is finite stays finite."""
    return clamp_overflow(total * LARGER, is_finite(total))


@triton.jit
def left_kernel(x, residual, right, out, n, m, first, vectors, weight, X: tl.constexpr, OWED: tl.constexpr,
                UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Rows times up to four vectors."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    a = tl.zeros((ROWS, COLS), tl.float32)
    b, c, d = a, a, a
    for start in range(0, m, COLS):
        col = start + tl.arange(0, COLS)
        v = read_tile(x, residual, row, col, n, m, weight, X, OWED, UNIT)
        a += v * vector(right, first, vectors, col, m)[None, :]
        b += v * vector(right, first + 1, vectors, col, m)[None, :]
        c += v * vector(right, first + 2, vectors, col, m)[None, :]
        d += v * vector(right, first + 3, vectors, col, m)[None, :]
    sums = larger(tl.sum(a, 1)), larger(tl.sum(b, 1)), larger(tl.sum(c, 1)), larger(tl.sum(d, 1))
    write_sums(out, sums, first, vectors, row, n)


@triton.jit
def right_kernel(x, residual, left, out, n, m, first, vectors, weight, per, X: tl.constexpr, OWED: tl.constexpr,
                 UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Columns times up to four vectors, of the rows that this program has."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    part = tl.program_id(1)
    a = tl.zeros((ROWS, COLS), tl.float32)
    b, c, d = a, a, a
    for start in range(part * per, tl.minimum(n, (part + 1) * per), ROWS):
        row = start + tl.arange(0, ROWS)
        v = read_tile(x, residual, row, col, n, m, weight, X, OWED, UNIT)
        a += v * vector(left, first, vectors, row, n)[:, None]
        b += v * vector(left, first + 1, vectors, row, n)[:, None]
        c += v * vector(left, first + 2, vectors, row, n)[:, None]
        d += v * vector(left, first + 3, vectors, row, n)[:, None]
    sums = tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0), tl.sum(d, 0)
    write_sums(out + part * vectors * m, sums, first, vectors, col, m)


@triton.jit
def write_sums(out, sums, first, vectors, place, length):
    a, b, c, d = sums
    at = out + first * length + place
    tl.store(at, a, mask=place < length)
    tl.store(at + length, b, mask=place < tl.where(first + 1 < vectors, length, 0))
    tl.store(at + 2 * length, c, mask=place < tl.where(first + 2 < vectors, length, 0))
    tl.store(at + 3 * length, d, mask=place < tl.where(first + 3 < vectors, length, 0))


@triton.jit
def parts_kernel(parts, out, count, size, COLS: tl.constexpr):
    """The sum of what programs of `right_kernel` left, one after another."""
    place = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    for number in range(count):
        total += tl.load(parts + number * size + place, mask=place < size, other=0.0)
    tl.store(out + place, larger(total), mask=place < size)


@triton.jit
def finish_kernel(x, residual, left, right, n, m, vectors, weight, unit, share, OWED: tl.constexpr, UNIT: tl.constexpr,
                  SHARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """The matrix of two factors over what was there, and what it leaves unsent."""
    tiles = tl.cdiv(m, COLS)
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)
    at = row.to(tl.int64)[:, None] * m + col[None, :]
    mask = (row < n)[:, None] & (col < m)[None, :]
    total = tl.load(left + row, mask=row < n)[:, None] * tl.load(right + col, mask=col < m)[None, :]
    for number in range(1, vectors):
        p = tl.load(left + number * n + row, mask=row < n)
        total += p[:, None] * tl.load(right + number * m + col, mask=col < m)[None, :]
    if OWED:
        old = tl.load(residual + at, mask=mask, other=0.0)
        wanted = add_residual(tl.load(x + at, mask=mask, other=0.0), old, weight, UNIT)
        sent = total * share if SHARE else total
        tl.store(residual + at, unsent(wanted, sent, old, unit, UNIT), mask=mask)
    tl.store(x + at, total, mask=mask)


def _factors(feedback: Feedback | None, x: Tensor) -> tuple[Tensor, float, float, int]:
    """The residual, what it is multiplied by, its unit as kernels take it, and the kind of both."""
    if feedback is None:
        return x, 1.0, 1.0, 0
    kind = launch.unit_kind(feedback.unit, feedback.decay)
    return feedback.residual, feedback.weight, feedback.unit if kind == 2 else 1.0 / feedback.unit, kind


def fits(x_nm: Tensor, rank: int) -> bool:
    """Whether these kernels take the matrix."""
    return x_nm.is_contiguous() and x_nm.dtype in DTYPES and rank * (max(x_nm.shape) + COLS * PROGRAMS) < MOST


def left(x_nm: Tensor, feedback: Feedback | None, right_rm: Tensor) -> Tensor:
    """See `kernels.low_rank.left`."""
    (n, m), rank = x_nm.shape, len(right_rm)
    out_rn = torch.empty(rank, n, dtype=torch.float32, device=x_nm.device)
    residual, weight, _, kind = _factors(feedback, x_nm)
    with launch.on_device_of(x_nm):
        for first in range(0, rank, VECTORS):
            left_kernel[(triton.cdiv(n, ROWS),)](
                x_nm, residual, right_rm, out_rn, n, m, first, rank, weight, DTYPES[x_nm.dtype], feedback is not None,
                kind, ROWS, COLS, **TILE,
            )  # fmt: skip
    return out_rn


def right(x_nm: Tensor, feedback: Feedback | None, left_rn: Tensor) -> Tensor:
    """See `kernels.low_rank.right`."""
    (n, m), rank = x_nm.shape, len(left_rn)
    tiles = triton.cdiv(m, COLS)
    per = ROWS * triton.cdiv(triton.cdiv(n, ROWS), triton.cdiv(PROGRAMS, tiles))
    parts = triton.cdiv(n, per)
    out_Prm = torch.empty(parts, rank, m, dtype=torch.float32, device=x_nm.device)
    residual, weight, _, kind = _factors(feedback, x_nm)
    with launch.on_device_of(x_nm):
        for first in range(0, rank, VECTORS):
            right_kernel[(tiles, parts)](
                x_nm, residual, left_rn, out_Prm, n, m, first, rank, weight, per, DTYPES[x_nm.dtype],
                feedback is not None, kind, ROWS, COLS, **TILE,
            )  # fmt: skip
        out_rm = torch.empty_like(out_Prm[0])
        parts_kernel[(triton.cdiv(rank * m, COLS),)](out_Prm, out_rm, parts, rank * m, COLS, **PLAIN)
    return out_rm


def finish(x_nm: Tensor, feedback: Feedback | None, left_rn: Tensor, right_rm: Tensor, share: float) -> None:
    """See `kernels.low_rank.finish`, of a contiguous float32 matrix."""
    n, m = x_nm.shape
    residual, weight, unit, kind = _factors(feedback, x_nm)
    with launch.on_device_of(x_nm):
        finish_kernel[(triton.cdiv(n, ROWS) * triton.cdiv(m, COLS),)](
            x_nm, residual, left_rn, right_rm, n, m, len(left_rn), weight, unit, share, feedback is not None, kind,
            share != 1.0, ROWS, COLS, **TILE,
        )  # fmt: skip


@triton.jit
def line(at, number, length, k, LINE: tl.constexpr):
    """A part of vector k; zeros behind its end."""
    place = number * LINE + tl.arange(0, LINE)
    return tl.load(at + k * length + place, mask=place < length, other=0.0)


@triton.jit
def dot(at, length, i, j, LINE: tl.constexpr):
    sums = tl.zeros((LINE,), tl.float32)
    for number in range(tl.cdiv(length, LINE)):
        sums += line(at, number, length, i, LINE) * line(at, number, length, j, LINE)
    return tl.sum(sums)


@triton.jit
def put_line(at, number, length, k, value, LINE: tl.constexpr):
    place = number * LINE + tl.arange(0, LINE)
    tl.store(at + k * length + place, value, mask=place < length)


@triton.jit
def orthonormal_kernel(values, starts, lengths, vectors, tiny, dependent, LINE: tl.constexpr, R: tl.constexpr):
    """One program takes one factor, in place."""
    here = tl.program_id(0)
    length = tl.load(lengths + here)
    at = values + tl.load(starts + here)
    lines = tl.cdiv(length, LINE)
    number_of = tl.arange(0, R)
    first = tl.zeros((R,), tl.float32)
    for k in range(vectors):
        largest = tl.zeros((LINE,), tl.float32)
        for number in range(lines):
            largest = tl.maximum(largest, tl.abs(line(at, number, length, k, LINE)), propagate_nan=tl.PropagateNan.ALL)
        top = tl.max(largest)
        lost = tl.sum((largest != largest).to(tl.int32)) > 0
        for number in range(lines):
            v = line(at, number, length, k, LINE)
            scaled = tl.div_rn(v, tl.zeros_like(v) + top)
            put_line(at, number, length, k, tl.where(lost, float("nan"), tl.where(top >= tiny, scaled, 0.0)), LINE)
        tl.debug_barrier()
        first = tl.where(number_of == k, tl.sqrt_rn(dot(at, length, k, k, LINE)), first)
    for k in range(vectors):
        size = tl.sqrt_rn(dot(at, length, k, k, LINE))
        before = tl.sum(tl.where(number_of == k, first, 0.0))
        inverse = tl.where(size > dependent * before, 1.0 / size, 0.0)
        inverse = tl.where(size != size, size, inverse)
        for number in range(lines):
            put_line(at, number, length, k, line(at, number, length, k, LINE) * inverse, LINE)
        tl.debug_barrier()
        for j in range(k + 1, vectors):
            along = dot(at, length, j, k, LINE)
            for number in range(lines):
                rest = line(at, number, length, j, LINE) - along * line(at, number, length, k, LINE)
                put_line(at, number, length, j, rest, LINE)
            tl.debug_barrier()


def orthonormal(factors: Sequence[Tensor], tiny: float, dependent: float) -> list[Tensor]:
    """See `kernels.low_rank.orthonormal`; all factors have as many vectors as the first."""
    rank = len(factors[0])
    values = torch.cat([factor.reshape(-1) for factor in factors])
    sizes = [factor.numel() for factor in factors]
    starts, lengths = _table(tuple(sizes), rank, values.device)
    with launch.on_device_of(values):
        orthonormal_kernel[(len(factors),)](values, starts, lengths, rank, tiny, dependent, LINE, pow2(rank), **LINES)
    return [part.view(rank, -1) for part in values.split(sizes)]


@lru_cache(maxsize=64)
def _table(sizes: tuple[int, ...], rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each factor begins, and the length of its vectors, on the device; kept, since every step asks."""
    ends = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
    lengths = torch.tensor([size // rank for size in sizes], dtype=torch.int32)
    return ends[:-1].to(device), lengths.to(device)
