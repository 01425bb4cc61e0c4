"""Matrix products step by step in float64: the oracle. One Python step for each k, all outputs at once.

Float64 holds every product of two float32 numbers. A sum may need more bits: it is then rounded to odd, which a second
rounding to 50 bits or fewer cannot tell from the exact sum.

Shapes: B batch, M rows, N columns, K terms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.formats import Format
from narrowcast.kernels.matmul.accumulator import Accumulator, Number
from narrowcast.kernels.reference.rounding import LANES, PIECES, SR_BITS, RoundingGrid, random_bits

PRODUCT, TERM, SUM, GAIN, CARRY = range(5)
"""Which rounding of a step: each has random bits of its own, under the stream SLOTS * step + slot."""
SLOTS = 8


def odd_sum(a: Tensor, b: Tensor) -> Tensor:
    """a + b in float64; where that is not exact, the neighbour of the exact sum whose last bit is 1."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    bits = total.view(torch.int64)
    step = torch.where(torch.signbit(error) == torch.signbit(total), 1, -1)
    inexact = (error < 0) | (error > 0)
    return torch.where(inexact & (bits % 2 == 0), bits + step, bits).view(torch.float64)


def mogami_product(a: Tensor, b: Tensor) -> Tensor:
    """Float32 a * b by adding bit patterns (Mogami 2020); what leaves the normal float32 numbers is zero or Inf."""
    bits_a, bits_b = (x.view(torch.int32).long() & 0x7FFFFFFF for x in (a, b))
    one, least, infinite = 0x3F800000, 0x00800000, 0x7F800000
    total = bits_a + bits_b - one
    zero = (bits_a < least) | (bits_b < least) | (total < least)
    size = torch.where(zero, 0, total.clamp(max=infinite)).to(torch.int32).view(torch.float32)
    product = torch.where(torch.signbit(a) ^ torch.signbit(b), -size, size)
    special = (bits_a >= infinite) | (bits_b >= infinite)
    # an operand that counts as zero is zero beside an Inf, too
    flushed_a, flushed_b = (torch.where(bits < least, x * 0, x) for x, bits in ((a, bits_a), (b, bits_b)))
    return torch.where(special, flushed_a * flushed_b, product).double()


def _grid_of(number: Number, fmt: Format) -> RoundingGrid:
    """The numbers and one step beyond each end, with where nearest rounding changes over, in float64; kept there."""
    kept: RoundingGrid | None = number.__dict__.get("_grid")
    if kept is not None:
        return kept
    # where ties are: exact in float64, since neighbours have at most 24 bits
    boundary, values = fmt.boundaries(), fmt.grid
    up = fmt.tie_goes_up()
    if number.overflow != "saturate":
        step = math.ldexp(1.0, math.frexp(fmt.max)[1] - 1 - number.man_bits)
        tie_overflows = int(fmt.grid_codes[-1]) % 2 == 1
        ends = torch.tensor([fmt.max + step], dtype=torch.float64)
        half = torch.tensor([fmt.max + step / 2], dtype=torch.float64)
        values = torch.cat([-ends, values, ends])
        boundary = torch.cat([-half, boundary, half])
        up = torch.cat([torch.tensor([not tie_overflows]), up, torch.tensor([tie_overflows])])
    starts = torch.where(up, boundary, torch.nextafter(boundary, torch.full_like(boundary, math.inf)))
    number.__dict__["_grid"] = grid = RoundingGrid(values, starts)
    return grid


def _stochastic_float32(x: Tensor, random: Tensor) -> Tensor:
    size = x.abs()
    exponent = torch.frexp(size)[1].clamp(min=-125) - 1
    steps = torch.ldexp(size, 23 - exponent)
    counted = (torch.floor(steps * 2.0**SR_BITS) + 2 * random + 1) * 2.0**-SR_BITS
    return torch.copysign(torch.ldexp(torch.floor(counted), exponent - 23), x)


def round_exact(x: Tensor, number: Number, random: Tensor | None = None) -> Tensor:
    """Float64 x to a number, once: nearest with ties to the even code, or stochastic where random bits are given."""
    finite = torch.isfinite(x)
    t = torch.where(finite, x, 0.0)
    if number.format is None:
        value = t.float().double() if random is None else _stochastic_float32(t, random)
    else:
        grid = _grid_of(number, number.format)
        t = t.clamp(float(grid.values[0]), float(grid.values[-1]))
        value = grid.values[grid.index(t, "nearest" if random is None else "stochastic", random)]
    high, low = number.lost
    value = torch.where(value > number.high, high, torch.where(value < number.low, low, value))
    if number.signed_zero:
        value = torch.where(value == 0, torch.copysign(value, x), value)
    inf, neg_inf, nan = number.specials
    special = torch.where(x > 0, inf, torch.where(x < 0, neg_inf, nan))
    return torch.where(finite, value, special)


class MatmulSteps:
    """The arithmetic of one matrix product, with the random bits of each rounding."""

    def __init__(self, rule: Accumulator, shape: torch.Size, seed: int) -> None:
        self.rule, self.shape, self.seed = rule, shape, seed

    def random(self, step: int, slot: int) -> Tensor | None:
        """16 bits an output; rows count as if padded to whole spans of the generator."""
        if not self.rule.stochastic:
            return None
        span = LANES * PIECES
        batch, rows, columns = self.shape
        padded = -(-columns // span) * span
        bits = random_bits(batch * rows * padded, self.seed, SLOTS * step + slot)
        return bits.view(batch, rows, padded)[:, :, :columns]

    def product(self, a_BM: Tensor, b_BN: Tensor, k: int) -> Tensor:
        if self.rule.multiply == "mogami":
            exact = mogami_product(*torch.broadcast_tensors(a_BM[:, :, None], b_BN[:, None, :]))
        else:
            exact = a_BM.double()[:, :, None] * b_BN.double()[:, None, :]
        return exact if self.rule.fused else round_exact(exact, self.rule.product_number, self.random(k, PRODUCT))

    def add(self, total: Tensor, carry: Tensor, term: Tensor, number: Number, step: int) -> tuple[Tensor, Tensor]:
        """The new sum, and with Kahan's method its carry."""

        def round_in(x: Tensor, slot: int) -> Tensor:
            return round_exact(x, number, self.random(step, slot))

        if not self.rule.kahan:
            return round_in(odd_sum(total, term), SUM), carry
        y = round_in(odd_sum(term, -carry), TERM)
        t = round_in(odd_sum(total, y), SUM)
        gained = round_in(odd_sum(t, -total), GAIN)
        return t, round_in(odd_sum(gained, -y), CARRY)


def _run(steps: MatmulSteps, a: Tensor, b: Tensor, begin: int, end: int) -> Tensor:
    total = carry = torch.zeros(steps.shape, dtype=torch.float64)
    for k in range(begin, end):
        product = steps.product(a[:, :, k], b[:, k, :], k)
        total, carry = steps.add(total, carry, product, steps.rule.sum_number, k)
    return total


def _sum_blocks(steps: MatmulSteps, a: Tensor, b: Tensor, terms: int) -> Tensor:
    total = carry = torch.zeros(steps.shape, dtype=torch.float64)
    for i, begin in enumerate(range(0, terms, steps.rule.block)):
        part = _run(steps, a, b, begin, min(begin + steps.rule.block, terms))
        total, carry = steps.add(total, carry, part, steps.rule.outer_number, terms + i)
    return total


def _sum_pairwise(steps: MatmulSteps, a: Tensor, b: Tensor, terms: int) -> Tensor:
    """A counter in binary: when a bit falls, two sums of equally many neighbours are added."""
    stack: list[Tensor] = []
    merges = 0

    def merge() -> None:
        nonlocal merges
        right, left = stack.pop(), stack.pop()
        stack.append(steps.add(left, left, right, steps.rule.sum_number, terms + merges)[0])
        merges += 1

    for k in range(terms):
        stack.append(_run(steps, a, b, k, k + 1))
        done = k + 1
        while done % 2 == 0:
            merge()
            done //= 2
    while len(stack) > 1:
        merge()
    return stack[0] if stack else torch.zeros(steps.shape, dtype=torch.float64)


def matmul(a_BMK: Tensor, b_BKN: Tensor, rule: Accumulator, seed: int, out: Tensor) -> Tensor:
    """See `kernels.matmul.matmul`."""
    terms = a_BMK.shape[2]
    steps = MatmulSteps(rule, out.shape, seed)
    if rule.order == "pairwise":
        total = _sum_pairwise(steps, a_BMK, b_BKN, terms)
    elif rule.order == "blocked":
        total = _sum_blocks(steps, a_BMK, b_BKN, terms)
    else:
        total = _run(steps, a_BMK, b_BKN, 0, terms)
    return out.copy_(total)
