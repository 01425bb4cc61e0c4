"""Rounding by definition: search the format's grid. Slow, readable, and what every kernel is tested against.

The random bits: Philox4x32-7 (Salmon et al. 2011), a function of (seed, stream, element index) and nothing else.
Element i of a tensor takes 16 bits: with i = 128 g + 16 p + l (p < 8, l < 16), the counter is
(c lo, c hi, stream lo, stream hi) with c = 16 g + l, the key is (seed lo, seed hi), and the bits are the low
(p even) or high (p odd) half of output word p // 2. So 16 neighbours come from 16 neighbouring counters, which is what
a vector unit wants.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.formats import FloatFormat, Format, Kind
from narrowcast.kernels.arithmetic import keeps_subnormals, put

FRACTION = 23
HIDDEN = 1 << FRACTION
SR_BITS = 17
"""A stochastic rounding compares 17 bits: the 16 random ones and a half, so that it has no bias."""

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF

LANES = 16
PIECES = 8


def _mulhilo(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    # 32 x 32 bits in int64: the sum wraps modulo 2**64, which is what the two halves need
    product = word * multiplier
    return (product >> 32) & MASK, product & MASK


def philox(counters: Tensor, seed: int, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 random bits for each 64-bit counter (all held in int64)."""
    c0, c1 = counters & MASK, (counters >> 32) & MASK
    c2, c3 = torch.full_like(c0, stream & MASK), torch.full_like(c0, (stream >> 32) & MASK)
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(ROUNDS):
        hi0, lo0 = _mulhilo(c0, MULTIPLIERS[0])
        hi1, lo1 = _mulhilo(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def random_bits(n: int, seed: int, stream: int, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """The 16 random bits (int64, 0 to 65535) of elements offset .. offset + n - 1."""
    span = LANES * PIECES
    first = offset // span
    groups = -(-(offset + n) // span) - first
    counters = LANES * first + torch.arange(LANES * groups, device=device)
    words = torch.stack(philox(counters, seed, stream))
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=1).view(PIECES, groups, LANES)
    ordered = halves.permute(1, 0, 2).reshape(-1)
    skip = offset - first * span
    return ordered[skip : skip + n]


class RoundingGrid:
    """A rising list of values, with where nearest rounding changes over (`starts`, float32)."""

    def __init__(self, values: Tensor, starts: Tensor) -> None:
        self.values = values
        self.starts = starts

    def nearest(self, t: Tensor) -> Tensor:
        return torch.bucketize(t, self.starts, right=True)

    def below(self, t: Tensor) -> Tensor:
        """Index of the largest value <= t, or of the smallest value where t lies below all."""
        return (torch.bucketize(t.double(), self.values, right=True) - 1).clamp(min=0)

    def above(self, t: Tensor) -> Tensor:
        """Index of the smallest value >= t, or of the largest value where t lies above all."""
        return torch.bucketize(t.double(), self.values, right=False).clamp(max=len(self.values) - 1)

    def toward_zero(self, t: Tensor) -> Tensor:
        return torch.where(t < 0, self.above(t), self.below(t))

    def nearest_away(self, t: Tensor) -> Tensor:
        low, high = self.below(t), self.above(t)
        to_low, to_high = t.double() - self.values[low], self.values[high] - t.double()
        return torch.where((to_low > to_high) | ((to_low == to_high) & (t > 0)), high, low)

    def stochastic(self, t: Tensor, random: Tensor) -> Tensor:
        """Away from zero iff fraction + (random + 1/2) / 2**16 >= 1, the fraction cut to 17 bits."""
        low, high = self.below(t), self.above(t)
        near, far = torch.where(t < 0, high, low), torch.where(t < 0, low, high)
        gap = (self.values[far] - self.values[near]).abs()
        inverse_gap = torch.where(gap > 0, 1.0 / gap, 0.0)
        fraction = (t.double() - self.values[near]).abs() * inverse_gap
        steps = (fraction * 2**SR_BITS).floor().long()
        return torch.where(steps + 2 * random + 1 >= 2**SR_BITS, far, near)

    def index(self, t: Tensor, rounding: str, random: Tensor | None) -> Tensor:
        if rounding == "stochastic":
            assert random is not None
            return self.stochastic(t, random)
        rules = {
            "nearest": self.nearest,
            "nearest-away": self.nearest_away,
            "toward-zero": self.toward_zero,
            "up": self.above,
            "down": self.below,
        }
        return rules[rounding](t)


def level_grid(fmt: Format) -> RoundingGrid:
    """The grid on which codecs round: the format's values, or integers where it counts in steps."""
    if fmt.kind is not Kind.UNIFORM:
        return RoundingGrid(fmt.grid, fmt.starts)
    values = fmt.levels[fmt.grid_codes]
    middle = ((values[:-1] + values[1:]) / 2).float()
    up = values[1:] % 2 == 0
    return RoundingGrid(
        values, torch.where(up, middle, torch.nextafter(middle, torch.tensor(math.inf, dtype=torch.float32)))
    )


def codes_of(fmt: Format, t: Tensor, random: Tensor | None) -> Tensor:
    """The code (int64) of each finite scaled value; nearest, or stochastic where there are random bits."""
    grid = level_grid(fmt)
    t = t.clamp(float(grid.values[0]), float(grid.values[-1]))
    index = grid.index(t, "nearest" if random is None else "stochastic", random)
    code = fmt.grid_codes[index]
    if fmt.negative_zero_code is None:
        return code
    return torch.where((grid.values[index] == 0) & torch.signbit(t), fmt.negative_zero_code, code)


def special_codes(fmt: Format, x: Tensor, code: Tensor) -> Tensor:
    """Put the codes of NaN and Inf where x has them (a format without such codes takes its largest value)."""
    bottom, top = int(fmt.grid_codes[0]), int(fmt.grid_codes[-1])
    nan = fmt.nan_code if fmt.nan_code is not None else fmt.inf_code
    positive = fmt.inf_code if fmt.inf_code is not None else fmt.nan_code
    negative = positive if fmt.inf_code is None else fmt.inf_code + 2 ** (fmt.bits - 1)
    code = torch.where(torch.isposinf(x), top if positive is None else positive, code)
    code = torch.where(torch.isneginf(x), bottom if negative is None else negative, code)
    return torch.where(torch.isnan(x), top if nan is None else nan, code)


def _with_overflow(fmt: FloatFormat) -> RoundingGrid:
    """The grid with one more step at each end: what lands there has overflowed."""
    # the unit in the last place of the largest value, which may be wider than the gap below it
    step = math.ldexp(1.0, fmt.max_exponent - fmt.man_bits)
    beyond = torch.tensor([fmt.max + step], dtype=torch.float64)
    boundary = fmt.max + step / 2
    start = torch.tensor([boundary], dtype=torch.float64).float()
    # the code after the largest one is even exactly where the largest is odd: then a tie overflows
    if int(fmt.grid_codes[-1]) % 2 == 0:
        start = torch.nextafter(start, torch.tensor([math.inf], dtype=torch.float32))
    past = torch.nextafter(-start, torch.tensor([math.inf], dtype=torch.float32))
    return RoundingGrid(torch.cat([-beyond, fmt.grid, beyond]), torch.cat([past, fmt.starts, start]))


def _overflows(index: Tensor, grid: RoundingGrid, rounding: str) -> Tensor:
    """Where a finite x went over the top. Rounding towards zero or away from that end never does."""
    high, low = index == len(grid.values) - 1, index == 0
    return {"toward-zero": high & low, "down": low, "up": high}.get(rounding, high | low)


def _finite_values(x: Tensor, fmt: Format, rounding: str, overflow: str, random: Tensor | None) -> Tensor:
    if overflow == "saturate":
        t = x.clamp(fmt.min, fmt.max)
        return fmt.grid[RoundingGrid(fmt.grid, fmt.starts).index(t, rounding, random)]
    assert isinstance(fmt, FloatFormat)
    grid = _with_overflow(fmt)
    # the step beyond may lie outside float32, which x does not
    limit = min(float(grid.values[-1]), torch.finfo(torch.float32).max)
    index = grid.index(x.clamp(-limit, limit), rounding, random)
    value = grid.values[index].clamp(fmt.min, fmt.max)
    lost = torch.copysign(torch.full_like(value, math.inf), x) if overflow == "inf" else math.nan
    return torch.where(_overflows(index, grid, rounding), lost, value)


@keeps_subnormals
def round_to(x: Tensor, fmt: Format, rounding: str, overflow: str, rules: str, seed: int, out: Tensor) -> Tensor:
    """See `kernels.ops.round_to`."""
    wide = x.float()
    if rules == "cpd":
        assert isinstance(fmt, FloatFormat)
        return put(out, round_cpd(wide, fmt.exp_bits, fmt.man_bits))
    random = random_bits(x.numel(), seed, 0).view(x.shape) if rounding == "stochastic" else None
    finite = torch.isfinite(wide)
    value = _finite_values(torch.where(finite, wide, 0.0), fmt, rounding, overflow, random).float()
    if fmt.negative_zero_code is not None:
        value = torch.where(value == 0, torch.copysign(value, wide), value)
    special = fmt.values.float()[special_codes(fmt, wide, torch.zeros_like(wide, dtype=torch.int64))]
    value = torch.where(finite, value, special)
    return put(out, torch.where(wide <= 0, math.nan, value) if fmt.positive_only else value)


def _round_even(significand: Tensor, drop: int) -> Tensor:
    """Round away `drop` low bits, ties to even of what is kept (the hidden bit counts, hence ties up for m = 0)."""
    half, kept = 1 << (drop - 1), significand >> drop
    rest = significand & ((1 << drop) - 1)
    return kept + ((rest > half) | ((rest == half) & (kept % 2 == 1)))


def round_cpd(x: Tensor, exp_bits: int, man_bits: int) -> Tensor:
    """`cast_precision` of CPD (Han et al.) on float32, corner cases included, to compare with published numbers.

    Differs from ours: overflow is tested before rounding (so a carry may leave the format), sticky bits of subnormals
    are lost, float32 subnormals become zero, and with no mantissa bit ties go up.
    """
    bits = x.contiguous().view(torch.int32).long() & 0x7FFFFFFF
    exponent = (bits >> FRACTION) - 127
    bias = (1 << (exp_bits - 1)) - 1
    field = exponent + bias
    significand = (bits & (HIDDEN - 1)) | HIDDEN
    shift = torch.where(field <= 0, 1 - field, 0).clamp(max=31)
    kept = _round_even(significand >> shift, FRACTION - man_bits)
    power = torch.where(field <= 0, 1 - bias, exponent) - man_bits
    value = torch.ldexp(kept.double(), power)
    value = torch.where(field >= 2**exp_bits - 1, torch.inf, value)
    value = torch.where(bits >> FRACTION == 0, 0.0, value)
    value = torch.copysign(value, x.double()).float()
    unchanged = (x == 0) | ~torch.isfinite(x)
    return torch.where(unchanged, x, value)
