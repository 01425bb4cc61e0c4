"""Matrix products in exact fractions, one output at a time: the definition, written again without floats."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

from narrowcast.kernels.matmul.accumulator import Accumulator, Number

Value = Fraction | float
"""A float only where it is not finite."""


def float32_grid_step(x: Fraction) -> Fraction:
    exponent = max(math.floor(math.log2(abs(x))) if x else -126, -126)
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > -126 and abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    return Fraction(2) ** (exponent - 23)


def to_float32(x: Fraction) -> Value:
    step = float32_grid_step(x)
    steps = round(x / step)  # ties to even
    value = steps * step
    return value if abs(value) <= Fraction(2) ** 128 - Fraction(2) ** 104 else math.copysign(math.inf, x)


@cache
def rounder(number: Number) -> Callable[[Fraction], Value]:
    """Nearest of a finite list, ties to the even code, by comparing distances."""
    fmt = number.format
    if fmt is None:
        return to_float32
    known = [(Fraction(v), int(c)) for v, c in zip(fmt.grid.tolist(), fmt.grid_codes.tolist(), strict=True)]
    if number.overflow != "saturate":
        step = Fraction(2) ** (math.frexp(fmt.max)[1] - 1 - number.man_bits)
        # one step beyond: its code follows the largest one's
        top, bottom = known[-1][0] + step, known[0][0] - step
        known = [(bottom, known[-1][1] + 1), *known, (top, known[-1][1] + 1)]

    values = [value for value, _ in known]

    def nearest(x: Fraction) -> Value:
        at = bisect.bisect_left(values, x)
        neighbours = known[max(at - 1, 0) : at + 1]
        best = min(neighbours, key=lambda pair: (abs(pair[0] - x), pair[1] % 2))[0]
        high, low = number.lost
        if best > fmt.max:
            return high if not math.isfinite(high) else Fraction(high)
        if best < fmt.min:
            return low if not math.isfinite(low) else Fraction(low)
        return best

    return nearest


def dot(a: Sequence[Fraction], b: Sequence[Fraction], rule: Accumulator) -> float:
    """The sum of products of two lists of finite numbers; NaN as soon as something is not finite."""
    to_product, to_sum = rounder(rule.product_number), rounder(rule.sum_number)
    total = owed = Fraction(0)
    for x, y in zip(a, b, strict=True):
        term: Value = x * y if rule.fused else to_product(x * y)
        if not isinstance(term, Fraction):
            return math.nan
        if rule.kahan:
            y_ = to_sum(term - owed)
            t = to_sum(total + y_) if isinstance(y_, Fraction) else y_
            gained = to_sum(t - total) if isinstance(t, Fraction) else t
            left = to_sum(gained - y_) if isinstance(gained, Fraction) and isinstance(y_, Fraction) else gained
            if not (isinstance(t, Fraction) and isinstance(left, Fraction)):
                return math.nan
            total, owed = t, left
        else:
            new = to_sum(total + term)
            if not isinstance(new, Fraction):
                return math.nan
            total = new
    return float(total)
