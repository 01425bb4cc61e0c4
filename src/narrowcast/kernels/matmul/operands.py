"""What the operands of a matrix product allow: simpler arithmetic, and no care for NaN and Inf.

Kernels are called with it and leave out what cannot matter. The bits do not depend on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.kernels.matmul.accumulator import Accumulator, Number

NARROW_BITS = 12
"""Operands with no more significant bits have products that float32 holds."""
LARGEST_SUM = 2.0**100
"""Below this nothing that a float32 kernel adds on the way overflows."""


@dataclass(frozen=True)
class How:
    """What gives the bits of the definition, beside float64 with sums rounded to odd, which always does."""

    single: bool
    """Float32 arithmetic."""
    careful: bool
    """NaN and Inf need translation."""
    plain: bool = False
    """Float64 sums as they are, not rounded to odd."""
    single_on_cpu: bool = False
    """Float32 arithmetic in kernels that leave float32's own sums alone and look whether a stochastic sum is exact."""


@dataclass(frozen=True)
class Range:
    """What is in a matrix: largest and smallest nonzero magnitude, and whether 12 bits hold every significand."""

    largest: float
    smallest: float
    narrow: bool

    @classmethod
    def of(cls, x: Tensor) -> Range:
        x = x[:1] if x.stride(0) == 0 else x  # one matrix for the whole batch
        size = x.abs()
        narrow = not bool((x.contiguous().view(torch.int32) & ((1 << (24 - NARROW_BITS)) - 1)).any())
        smallest = torch.where(size > 0, size, math.inf).amin()
        return cls(float(size.amax()), float(smallest), narrow)


def _same_specials(source: Number, target: Number) -> bool:
    """Whether what is lost in `source`, or comes of it (Inf - Inf), needs no translation in `target`."""
    if all(map(math.isfinite, source.lost)):
        return True
    return str(source.lost) == str(target.specials[:2]) and math.isnan(target.specials[2])


def _agree_on_specials(rule: Accumulator) -> bool:
    products, sums, outer = rule.product_number, rule.sum_number, rule.outer_number
    return all(_same_specials(*pair) for pair in ((products, sums), (sums, sums), (sums, outer), (outer, outer)))


def _serves_float32(number: Number) -> bool:
    return number.by_arithmetic and number.precision < NARROW_BITS and number.min_exponent >= -126


def _numbers(rule: Accumulator) -> tuple[Number, Number, Number]:
    return rule.product_number, rule.sum_number, rule.outer_number


def _terms_fit(rule: Accumulator) -> bool:
    """Whether no term is wider than its sum: it might lie exactly between two, where a smaller one would decide."""
    products, sums, outer = _numbers(rule)
    if products.even_steps != sums.even_steps or outer.even_steps != sums.even_steps:
        return False
    return products.precision <= sums.precision <= outer.precision


def _numbers_suit_float32(rule: Accumulator) -> bool:
    """Whether sums of two numbers, rounded to float32 first, round to the same number (Figueroa: 2 p + 2 <= 24)."""
    if rule.stochastic or rule.fused or not all(map(_serves_float32, _numbers(rule))):
        return False
    return _terms_fit(rule)


def _numbers_suit_float32_on_cpu(rule: Accumulator) -> bool:
    """The same where float32's sums are sums of the definition, and where inexact stochastic sums are noticed."""
    numbers = _numbers(rule)
    if rule.stochastic:
        return all(_serves_float32(number) and not number.even_steps for number in numbers)
    if rule.fused or not all(number.format is None or _serves_float32(number) for number in numbers):
        return False
    return _terms_fit(rule)


def _products_suit_float32(a: Range, b: Range, terms: int, rule: Accumulator) -> bool:
    if rule.product_number.format is None and not rule.fused and rule.multiply == "ieee":
        return True
    if rule.multiply == "ieee" and not (a.narrow and b.narrow):
        return False
    largest, smallest = a.largest * b.largest, a.smallest * b.smallest
    return largest * terms < LARGEST_SUM and smallest >= 4 * torch.finfo(torch.float32).tiny


def _sums_suit_float64(a: Range, b: Range, rule: Accumulator) -> bool:
    """Whether sums of two numbers, rounded to float64 first, round to the same number (Figueroa: 2 p + 2 <= 53)."""
    if rule.stochastic or not all(number.by_arithmetic for number in _numbers(rule)) or not _terms_fit(rule):
        return False
    if not rule.fused:
        return True
    # A product of 24 bits that is the smaller one is too small to matter where float64 cuts it, and one that is the
    # larger has, where float64 cuts the sum, left the format.
    sums = rule.sum_number
    reach = 2.0 ** (sums.min_exponent - sums.man_bits + 50)
    return a.narrow and b.narrow and not sums.even_steps and sums.high < reach


def how_to_compute(a_BMK: Tensor, b_BKN: Tensor, rule: Accumulator) -> How:
    """Looks at every value once."""
    if a_BMK.numel() == 0 or b_BKN.numel() == 0:
        return How(single=False, careful=True)
    a, b = Range.of(a_BMK), Range.of(b_BKN)
    # float32 operands have finite products in float64, but Mogami's are float32 numbers
    finite = a.largest * b.largest < (LARGEST_SUM if rule.multiply == "mogami" else math.inf)
    careful = not (finite and _agree_on_specials(rule))
    suit = not careful and _products_suit_float32(a, b, a_BMK.shape[2], rule)
    return How(
        suit and _numbers_suit_float32(rule),
        careful,
        _sums_suit_float64(a, b, rule),
        suit and _numbers_suit_float32_on_cpu(rule),
    )
