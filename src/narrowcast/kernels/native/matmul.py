"""The C++ matrix products of csrc/matmul.cpp."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels.matmul.accumulator import Accumulator, How, Number
from narrowcast.kernels.native import library

ORDERS = {"sequential": 0, "blocked": 1, "pairwise": 2}
MULTIPLIES = {"ieee": 0, "mogami": 1}
ODD_DOUBLE, SINGLE, DOUBLE = range(3)
"""`nc_arithmetic` of csrc/matmul.h."""
FEW_COLUMNS = 16
"""Fewer than these leave lanes of a vector empty."""

_DOUBLES = ("high", "low", "lost_high", "lost_low", "inf", "neg_inf", "nan")
_INTEGERS = ("man_bits", "min_exponent", "even_steps", "signed_zero", "parity", "exact")


class NativeNumber(Structure):
    """`nc_number` of csrc/matmul.h."""

    _fields_ = [*((name, c_double) for name in _DOUBLES), *((name, c_int32) for name in _INTEGERS)]


_ACCUMULATOR: list[tuple[str, Any]] = [
    *((name, NativeNumber) for name in ("product", "sum", "outer")),
    *((name, c_int32) for name in ("multiply", "order")),
    ("block", c_int64),
    *((name, c_int32) for name in ("kahan", "stochastic", "arithmetic", "careful")),
    ("seed", c_uint64),
]


class NativeAccumulator(Structure):
    """`nc_accumulator` of csrc/matmul.h."""

    _fields_ = _ACCUMULATOR


_STRIDES = [f"{matrix}_{stride}" for matrix in ("a", "b", "out") for stride in ("batch", "row", "column")]


class NativeMatrices(Structure):
    """`nc_matrices` of csrc/matmul.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("a", "b", "out")),
        *((name, c_int64) for name in ("batch", "m", "n", "k", *_STRIDES)),
    ]


def why_not(rule: Accumulator) -> str | None:
    """Why this accumulator cannot run here, or None."""
    loaded, why = library.load()
    if loaded is None:
        return why
    if not hasattr(loaded, "nc_matmul"):
        return "the native library was built without matrix products; run `make native`"
    tables = [n.name for n in rule.numbers if not n.by_arithmetic]
    return f"{tables[0]} is a table of values, to which only the reference rounds here" if tables else None


def _accumulator(rule: Accumulator, how: How, seed: int) -> NativeAccumulator:
    arithmetic = SINGLE if how.single or how.single_on_cpu else DOUBLE if how.plain else ODD_DOUBLE

    def native(number: Number, exact: bool = False) -> NativeNumber:
        # float32's own products and sums are rounded already
        exact = exact or (arithmetic == SINGLE and number.format is None)
        integers = number.man_bits, number.min_exponent, number.even_steps, number.signed_zero, number.parity, exact
        return NativeNumber(number.high, number.low, *number.lost, *number.specials, *integers)

    numbers = native(rule.product_number, rule.fused), native(rule.sum_number), native(rule.outer_number)
    flags = rule.kahan, rule.stochastic, arithmetic, how.careful
    return NativeAccumulator(*numbers, MULTIPLIES[rule.multiply], ORDERS[rule.order], rule.block, *flags, seed)


def matmul(a_BMK: Tensor, b_BKN: Tensor, rule: Accumulator, seed: int, out: Tensor, how: How) -> Tensor:
    """See `kernels.matmul.matmul`. how: what the caller knows of the operands."""
    rows, columns = a_BMK.shape[1], b_BKN.shape[2]
    if rule.multiply == "mogami":
        # subnormal operands count as zero
        a_BMK, b_BKN = (torch.where(x.abs() < torch.finfo(x.dtype).tiny, x * 0, x) for x in (a_BMK, b_BKN))
    if columns < FEW_COLUMNS <= rows and not rule.stochastic:
        # columns fill vectors, and each output is the same sum either way
        _call(b_BKN.mT, a_BMK.mT, rule, seed, out.mT, how)
        return out
    return _call(a_BMK, b_BKN, rule, seed, out, how)


def _call(a: Tensor, b: Tensor, rule: Accumulator, seed: int, out: Tensor, how: How) -> Tensor:
    batch, rows, terms = a.shape
    strides = *a.stride(), *b.stride(), *out.stride()
    sizes = batch, rows, b.shape[2], terms
    matrices = NativeMatrices(a.data_ptr(), b.data_ptr(), out.data_ptr(), *sizes, *strides)
    described = _accumulator(rule, how, seed)
    nc_matmul = library.require().nc_matmul
    nc_matmul.argtypes = [c_void_p, c_void_p, c_int32]
    status = nc_matmul(ctypes.byref(described), ctypes.byref(matrices), torch.get_num_threads())
    if status == -3:
        raise MemoryError(f"matmul: no memory for a panel of {terms} terms")
    library.check_status(status, "nc_matmul", rule)
    return out
