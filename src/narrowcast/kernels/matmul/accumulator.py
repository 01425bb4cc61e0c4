"""How a matrix product multiplies and adds: an `Accumulator` is a frozen value, written and read as a string; and
`How` simple its arithmetic may be. Kernels are called with it and leave out what cannot matter: no bit depends on it.

`SUMS[/BLOCK][+OPTION]...`, for example `bf16`, `fp16+kahan`, `e5m10/128+fma`, `fp32+pairwise`:

| part | meaning |
|---|---|
| `SUMS` | format of every sum: a format's name, or `fp32` |
| `/BLOCK` | K is cut into blocks; each is summed from zero, then the blocks are added in order |
| `+mul=FORMAT` | format of every product; without it that of the sums |
| `+outer=FORMAT` | with `/BLOCK`: format in which the blocks are added; without it that of the sums |
| `+fma` | products are not rounded: one rounding for multiply and add |
| `+kahan` | compensated sums, every step of them rounded |
| `+pairwise` | neighbours are added in a tree |
| `+sr` | stochastic rounding, of every product and every sum |
| `+mogami` | multiplication by adding bit patterns (Mogami 2020) |
| `+saturate` | overflow gives the largest number instead of each format's own rule |
| `+quire` | the exact sum of the exact products, rounded once (posits' quire) |
| `+sequential` | k = 0, 1, 2, ... This is how all but `fp32` sum; `fp32` alone means torch's own matmul, in its order |
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from narrowcast.formats import FloatFormat, Format, UniformFormat
from narrowcast.formats import format as format_named

FLOAT32 = "fp32"
_LARGEST = torch.finfo(torch.float32).max
ORDERS = ("sequential", "blocked", "pairwise", "quire", "any")
FLAGS = ("kahan", "fma", "pairwise", "quire", "sequential", "sr", "mogami", "saturate")


@dataclass(frozen=True)
class Number:
    """What a kernel must know to round to a format by arithmetic, float32 included; all of it follows from the format.

    Multiples of 2**(e - man_bits), e being x's exponent and at least `min_exponent` (always, if `even_steps`).
    """

    name: str
    format: Format | None
    """None: float32 itself."""
    overflow: str
    precision: int
    """Significant bits of the widest value."""
    man_bits: int
    min_exponent: int
    high: float
    low: float
    even_steps: bool = False
    signed_zero: bool = True
    parity: int = -1
    """Without mantissa bits: the parity of the exponents whose code is even, for ties."""
    by_arithmetic: bool = True
    """False: a table of values, which only the reference can round to."""

    @property
    def lost(self) -> tuple[float, float]:
        """What becomes of a finite x above the largest and below the smallest number."""
        if self.overflow == "saturate":
            return self.high, self.low
        return (math.inf, -math.inf) if self.overflow == "inf" else (math.nan, math.nan)

    @property
    def specials(self) -> tuple[float, float, float]:
        """What becomes of Inf, -Inf and NaN."""
        if self.format is None:
            return math.inf, -math.inf, math.nan
        if self.format.inf_code is not None:
            return math.inf, -math.inf, math.nan if self.format.nan_code is not None else math.inf
        if self.format.nan_code is not None:
            return math.nan, math.nan, math.nan
        return self.high, self.low, self.high

    @property
    def holds_nonfinite(self) -> bool:
        return self.format is None or self.format.holds_nonfinite


@lru_cache(maxsize=256)
def number(fmt: str | Format, overflow: str | None = None) -> Number:
    """The description of "fp32" or of a format, with its own overflow rule unless another is named."""
    if fmt == FLOAT32:
        if overflow not in (None, "inf"):
            raise ValueError(f"fp32 overflows to Inf and cannot follow overflow={overflow!r}")
        return Number(FLOAT32, None, "inf", 24, 23, -126, _LARGEST, -_LARGEST)
    fmt = format_named(fmt) if isinstance(fmt, str) else fmt
    overflow = fmt.default_overflow if overflow is None else overflow
    if overflow not in fmt.overflows:
        raise ValueError(f"{fmt} cannot follow overflow={overflow!r}; take one of {', '.join(fmt.overflows)}")
    if fmt.positive_only:
        raise ValueError(f"{fmt} has neither a zero nor negative numbers, so that nothing can be summed in it")
    return _describe(fmt, overflow)


def _describe(fmt: Format, overflow: str) -> Number:
    has_zero = fmt.negative_zero_code is not None
    if isinstance(fmt, FloatFormat):
        parity = fmt.bias % 2 if fmt.man_bits == 0 else -1
        precision, least = fmt.man_bits + 1, 1 - fmt.bias
        return Number(
            fmt.name, fmt, overflow, precision, fmt.man_bits, least, fmt.max, fmt.min, False, has_zero, parity
        )
    if isinstance(fmt, UniformFormat) and fmt.steps_per_unit & (fmt.steps_per_unit - 1) == 0:
        places = fmt.steps_per_unit.bit_length() - 1
        return Number(fmt.name, fmt, overflow, fmt.bits, places, 0, fmt.max, fmt.min, True, has_zero)
    return Number(fmt.name, fmt, overflow, 24, 0, 0, fmt.max, fmt.min, signed_zero=has_zero, by_arithmetic=False)


@dataclass(frozen=True)
class Accumulator:
    """The rule of every product and sum. With R rounding once to the format and all else exact:

    p = R_products(a[i,k] * b[k,j]);  s = R_sums(s + p)                   from s = 0
    kahan:  y = R(p - c);  t = R(s + y);  c = R(R(t - s) - y);  s = t     from s = c = 0
    fused:  p is not rounded
    quire:  R_sums(the exact sum of all exact products)
    """

    sums: str = FLOAT32
    products: str | None = None
    """None: as the sums."""
    order: str = "sequential"
    """"any": torch's own matmul, in whatever order it sums (float32 alone)."""
    block: int = 0
    outer: str | None = None
    kahan: bool = False
    fused: bool = False
    stochastic: bool = False
    multiply: str = "ieee"
    saturate: bool = False
    numbers: tuple[Number, Number, Number] = field(init=False, repr=False, compare=False)
    """Of products, of sums, and of sums of blocks."""

    def __post_init__(self) -> None:
        self._check()
        names = self.products or self.sums, self.sums, self.outer or self.sums
        object.__setattr__(self, "numbers", tuple(self._number(name) for name in names))

    def _number(self, name: str) -> Number:
        return number(name, "saturate" if self.saturate and name != FLOAT32 else None)

    def _check(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"accumulator: unknown order {self.order!r}; take one of {', '.join(ORDERS)}")
        if self.multiply not in ("ieee", "mogami"):
            raise ValueError(f"accumulator: unknown multiply {self.multiply!r}; take 'ieee' or 'mogami'")
        if (self.order == "blocked") != (self.block > 0):
            raise ValueError(f"accumulator: a block goes with order='blocked', got {self.order!r} and {self.block}")
        if self.outer is not None and self.order != "blocked":
            raise ValueError("accumulator: outer= is the format in which blocks are added; give a block, as fp16/128")
        if self.kahan and self.order == "pairwise":
            raise ValueError("accumulator: Kahan's method follows a running sum; it does not go with pairwise")
        if self.order == "quire" and (
            self.kahan or self.fused or self.products or self.stochastic or self.multiply != "ieee"
        ):
            raise ValueError(
                "accumulator: a quire rounds once, at the end, to nearest; leave every other option but saturate out"
            )
        if self.fused and self.products is not None:
            raise ValueError("accumulator: a fused product is not rounded; leave either fma or mul= out")
        if self.saturate and all(name in (None, FLOAT32) for name in (self.sums, self.products, self.outer)):
            raise ValueError("accumulator: fp32 overflows to Inf; +saturate is for narrower formats, leave it out")
        if self.order == "any" and not self._is_plain_float32():
            raise ValueError("accumulator: order 'any' is torch's own float32 matmul and goes with no other option")

    def _is_plain_float32(self) -> bool:
        options = self.kahan, self.fused, self.stochastic, self.saturate, self.multiply != "ieee"
        return self.sums == FLOAT32 and self.products in (None, FLOAT32) and not any(options)

    @property
    def product_number(self) -> Number:
        return self.numbers[0]

    @property
    def sum_number(self) -> Number:
        return self.numbers[1]

    @property
    def outer_number(self) -> Number:
        return self.numbers[2]

    @property
    def is_torch(self) -> bool:
        """Whether torch's own matmul does it."""
        return self.order == "any"

    def __str__(self) -> str:
        text = self.sums + (f"/{self.block}" if self.block else "")
        text += f"+mul={self.products}" if self.products else ""
        text += f"+outer={self.outer}" if self.outer else ""
        pairwise, quire = self.order == "pairwise", self.order == "quire"
        # what a bare fp32 would mean otherwise
        sequential = self.order == "sequential" and self._is_plain_float32()
        mogami = self.multiply == "mogami"
        flags = self.kahan, self.fused, pairwise, quire, sequential, self.stochastic, mogami, self.saturate
        return text + "".join(f"+{flag}" for flag, on in zip(FLAGS, flags, strict=True) if on)


_HEAD = re.compile(r"(?P<sums>[a-z][a-z0-9.]*)(?:/(?P<block>[1-9][0-9]*))?")


def _wrong_option(options: list[str]) -> str | None:
    parts = [option.partition("=") for option in options]
    names = [name for name, _, _ in parts]
    for name, equals, value in parts:
        if name not in (("mul", "outer") if equals else FLAGS):
            return f"unknown option {name!r}"
        if equals and not value:
            return f"{name}= names no format"
        if names.count(name) > 1:
            return f"option {name!r} stands twice"
    return None


@lru_cache(maxsize=256)
def _parse(text: str) -> Accumulator:
    head, *options = text.split("+")
    match = _HEAD.fullmatch(head)
    if match is None:
        raise ValueError(
            f"accumulator {text!r}: got {head!r}; write SUMS[/BLOCK][+OPTION]..., as fp16 or bf16/128+kahan"
        )
    values = dict(option.split("=", 1) for option in options if "=" in option)
    flags = [option for option in options if "=" not in option]
    wrong = _wrong_option(options)
    if wrong is not None:
        raise ValueError(f"accumulator {text!r}: {wrong}; options are mul=FORMAT, outer=FORMAT, {', '.join(FLAGS)}")
    block = int(match["block"] or 0)
    orders = ["blocked"] * bool(block) + [name for name in ("pairwise", "quire", "sequential") if name in flags]
    if len(orders) > 1:
        raise ValueError(f"accumulator {text!r}: {' and '.join(orders)} exclude one another")
    is_torch = text == FLOAT32
    return Accumulator(
        match["sums"], values.get("mul"), "any" if is_torch else (orders or ["sequential"])[0], block,
        values.get("outer"), "kahan" in flags, "fma" in flags, "sr" in flags,
        "mogami" if "mogami" in flags else "ieee", "saturate" in flags,
    )  # fmt: skip


def accumulator(what: str | Accumulator) -> Accumulator:
    """The accumulator that a string names; `str` of it gives the string back."""
    if isinstance(what, Accumulator):
        return what
    if not isinstance(what, str):
        raise TypeError(f"accumulator: got {what!r}; give a string such as 'fp32' or 'bf16+kahan', or an Accumulator")
    return _parse(what)


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


def _serves_float32(number: Number) -> bool:
    return number.by_arithmetic and number.precision < NARROW_BITS and number.min_exponent >= -126


def _terms_fit(rule: Accumulator) -> bool:
    """Whether no term is wider than its sum: it might lie exactly between two, where a smaller one would decide."""
    products, sums, outer = rule.numbers
    if products.even_steps != sums.even_steps or outer.even_steps != sums.even_steps:
        return False
    return products.precision <= sums.precision <= outer.precision


def _numbers_suit_float32(rule: Accumulator) -> bool:
    """Whether sums of two numbers, rounded to float32 first, round to the same number (Figueroa: 2 p + 2 <= 24)."""
    if rule.stochastic or rule.fused or not all(map(_serves_float32, rule.numbers)):
        return False
    return _terms_fit(rule)


def _numbers_suit_float32_on_cpu(rule: Accumulator) -> bool:
    """The same where float32's sums are sums of the definition, and where inexact stochastic sums are noticed."""
    numbers = rule.numbers
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
    if rule.stochastic or not all(number.by_arithmetic for number in rule.numbers) or not _terms_fit(rule):
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
    products, sums, outer = rule.numbers
    pairs = ((products, sums), (sums, sums), (sums, outer), (outer, outer))
    careful = not (finite and all(_same_specials(*pair) for pair in pairs))
    suit = not careful and _products_suit_float32(a, b, a_BMK.shape[2], rule)
    return How(
        suit and _numbers_suit_float32(rule),
        careful,
        _sums_suit_float64(a, b, rule),
        suit and _numbers_suit_float32_on_cpu(rule),
    )
