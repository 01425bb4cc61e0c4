"""What a kernel needs to know to round to a format by arithmetic, float32 included; derived from the format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from narrowcast.formats import FloatFormat, Format, UniformFormat
from narrowcast.formats import format as format_named

FLOAT32 = "fp32"
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Number:
    """Multiples of 2**(e - man_bits), e being x's exponent and at least `min_exponent` (always, if `even_steps`)."""

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
    """The description of "fp32" or of a format, with its own overflow rule unless another is given."""
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
