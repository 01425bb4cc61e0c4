"""Exact matrix products, rounded once: what posits call a quire, for any float32 operands.

1. Each operand is cut into slices, whole numbers of at most WIDTH bits times powers of two, until nothing is left.
2. A product of two slices is one float64 matmul, which is exact as long as TERMS terms are added.
3. Products of equal weight are added as 64-bit integers, the digits of a long number in base 2**WIDTH.
4. Carries are passed on, and the long number is made float64, rounded to odd: a second rounding to 50 bits or fewer
   cannot tell that from the exact sum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.kernels.matmul.accumulator import Accumulator
from narrowcast.kernels.reference.matmul import odd_sum, round_exact

WIDTH, TERMS = 20, 4096
"""Slices of 20 bits have products of 40, of which 4096 add up to 52."""
SPARE = 3
"""Digits above the first: room for the carries of sums below 2**(WIDTH * SPARE)."""


def slices(x: Tensor) -> tuple[list[Tensor], int]:
    """Whole numbers in float64, and the exponent of the first's unit; each later unit is 2**-WIDTH of that before."""
    rest = x.double()
    largest = float(rest.abs().amax()) if rest.numel() else 0.0
    top = (math.frexp(largest)[1] if largest else 0) - WIDTH
    found: list[Tensor] = []
    exponent = top
    while not found or bool((rest != 0).any()):
        part = torch.trunc(torch.ldexp(rest, torch.tensor(-exponent, device=x.device)))
        rest = rest - torch.ldexp(part, torch.tensor(exponent, device=x.device))
        found.append(part)
        exponent -= WIDTH
    return found, top


def _carry(digits: list[Tensor]) -> list[Tensor]:
    """The same number; all digits but the first are of WIDTH bits and not negative."""
    result, carry = list(digits), torch.zeros_like(digits[0])
    for at in reversed(range(1, len(digits))):
        total = digits[at] + carry
        carry = total >> WIDTH
        result[at] = total - (carry << WIDTH)
    result[0] = digits[0] + carry
    return result


def exact_product(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    """a @ b of finite numbers, in float64, rounded to odd once."""
    (parts_a, top_a), (parts_b, top_b) = slices(a_BMK), slices(b_BKN)
    shape = (*a_BMK.shape[:2], b_BKN.shape[2])
    count = SPARE + len(parts_a) + len(parts_b) - 1
    digits = [torch.zeros(shape, dtype=torch.int64, device=a_BMK.device) for _ in range(count)]
    for begin in range(0, a_BMK.shape[2], TERMS):
        for i, left in enumerate(parts_a):
            for j, right in enumerate(parts_b):
                chunk = slice(begin, begin + TERMS)
                digits[SPARE + i + j] += torch.matmul(left[:, :, chunk], right[:, chunk, :]).long()
        digits = _carry(digits)
    negative = digits[0] < 0
    digits = _carry([torch.where(negative, -digit, digit) for digit in digits])
    total = torch.zeros(shape, dtype=torch.float64, device=a_BMK.device)
    # from the least: what a sum loses is then below the digits that follow
    for at in reversed(range(count)):
        exponent = top_a + top_b + WIDTH * (SPARE - at)
        total = odd_sum(torch.ldexp(digits[at].double(), torch.tensor(exponent, device=total.device)), total)
    return torch.where(negative, -total, total)


def matmul(a_BMK: Tensor, b_BKN: Tensor, rule: Accumulator, out: Tensor) -> Tensor:
    """See `kernels.matmul.matmul`."""
    a, b = (torch.where(torch.isfinite(x), x, 0.0) for x in (a_BMK, b_BKN))
    total = exact_product(a, b)
    if not (bool(torch.isfinite(a_BMK).all()) and bool(torch.isfinite(b_BKN).all())):
        plain = torch.matmul(a_BMK.double(), b_BKN.double())
        total = torch.where(torch.isfinite(plain), total, plain)
    return out.copy_(round_exact(total, rule.sum_number))
