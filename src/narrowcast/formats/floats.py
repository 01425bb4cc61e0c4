"""Small binary floats: any `eXmY`, in the variants and with the names of ml_dtypes, and the scale type `e8m0fnu`."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.formats.base import MAX_BITS, Format, Kind
from narrowcast.formats.registry import NUMBER, Family, register, register_family


class Specials(enum.Enum):
    """What the top of the code space means; the value is the suffix of the name."""

    IEEE = ""
    """Top exponent is Inf (mantissa 0) and NaN."""
    FN = "fn"
    """Only the all-ones code of each sign is NaN; no Inf."""
    FNUZ = "fnuz"
    """The code of -0 is the one NaN; no Inf; the bias is one higher."""
    FINITE = "f"
    """Every code is a number. Below 8 bits written `fn`, as OCP and ml_dtypes do."""


OVERFLOW = {Specials.IEEE: "inf", Specials.FN: "nan", Specials.FNUZ: "nan", Specials.FINITE: "saturate"}
"""What ml_dtypes does with a finite number that is too large."""


@dataclass(frozen=True)
class FloatFormat(Format):
    """A signed binary float of at most 16 bits: sign, `exp_bits`, `man_bits`; subnormals are always there."""

    exp_bits: int
    man_bits: int
    specials: Specials = Specials.IEEE
    bias_override: int | None = None

    kind: ClassVar[Kind] = Kind.FLOAT

    @property
    def bits(self) -> int:
        return 1 + self.exp_bits + self.man_bits

    @property
    def bias(self) -> int:
        if self.bias_override is not None:
            return self.bias_override
        return (1 << (self.exp_bits - 1)) - (self.specials is not Specials.FNUZ)

    @cached_property
    def values(self) -> Tensor:
        code = torch.arange(2**self.bits)
        negative = code >> (self.bits - 1) == 1
        exp = (code >> self.man_bits) & (2**self.exp_bits - 1)
        man = code & (2**self.man_bits - 1)
        significand = man + 2**self.man_bits * (exp > 0)
        value = torch.ldexp(significand.double(), exp.clamp(min=1) - self.bias - self.man_bits)
        value = torch.where(negative, -value, value)
        top, ones = exp == 2**self.exp_bits - 1, man == 2**self.man_bits - 1
        if self.specials is Specials.IEEE:
            return torch.where(top, torch.where(man == 0, value.sign() * torch.inf, torch.nan), value)
        if self.specials is Specials.FN:
            return torch.where(top & ones, torch.nan, value)
        if self.specials is Specials.FNUZ:
            return torch.where(negative & (exp == 0) & (man == 0), torch.nan, value)
        return value

    @property
    def default_overflow(self) -> str:  # type: ignore[override]  # a property where the base has a constant
        # eXm0 in IEEE style has an Inf but no code left for NaN; a one-code `nan` rule always exists for fn and fnuz
        return OVERFLOW[self.specials]

    @property
    def overflows(self) -> tuple[str, ...]:
        can = [("saturate", True), ("inf", self.inf_code is not None), ("nan", self.nan_code is not None)]
        return tuple(name for name, possible in can if possible)

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float | None:
        return math.ldexp(1.0, 1 - self.bias - self.man_bits) if self.man_bits else None

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)): APS's upper bound, `2**(exp_bits - 1) - 1` for IEEE-style formats."""
        return math.frexp(self.max)[1] - 1


NAMED = {"fp16": (5, 10), "bf16": (8, 7)}
"""Formats better known by another name than `eXmY`."""

_PATTERN = re.compile(rf"e{NUMBER}m{NUMBER}(?:b{NUMBER})?(fnuz|fn|f)?")


def parse_float(name: str) -> FloatFormat | None:
    """`eXmY[bBIAS][fn|fnuz|f]`, or None where the name is no such thing."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return None
    exp, man = int(match[1]), int(match[2])
    bits, suffix = 1 + exp + man, match[4] or ""
    if suffix == "f" and bits < 8:
        raise ValueError(f"format {name!r}: below 8 bits the finite-only variant is written {name}n")
    # ml_dtypes: float8_e4m3fn has a NaN, float6_e2m3fn and float4_e2m1fn have none
    specials = Specials.FINITE if suffix == "fn" and bits < 8 else Specials(suffix)
    least = 1 if specials is Specials.FINITE else 2
    if not (least <= exp <= 8 and 0 <= man <= 10 and bits <= MAX_BITS):
        allowed = f"X from {least} to 8, Y from 0 to 10, at most {MAX_BITS} bits in all"
        raise ValueError(f"format {name!r}: got X={exp}, Y={man}; eXmY{suffix} takes {allowed}")
    for known, fields in NAMED.items():
        if fields == (exp, man) and not suffix and not match[3]:
            return FloatFormat(known, exp, man)
    fmt = FloatFormat(name, exp, man, specials, int(match[3]) if match[3] else None)
    # only formats whose every value is a float32 number: kernels compute in float32
    if fmt.bias + fmt.man_bits > 1 + 149 or fmt.largest > torch.finfo(torch.float32).max:
        raise ValueError(f"format {fmt.name!r}: its values reach outside float32; take a smaller bias or exponent")
    return fmt


@dataclass(frozen=True)
class ScaleFormat(Format):
    """Unsigned powers of two, 2**-127 to 2**127, code 255 is NaN: the scale type of OCP MX. It has no zero."""

    positive_only: ClassVar[bool] = True

    @property
    def bits(self) -> int:
        return 8

    @cached_property
    def values(self) -> Tensor:
        code = torch.arange(256)
        return torch.where(code == 255, torch.nan, torch.ldexp(torch.ones(256, dtype=torch.float64), code - 127))

    @property
    def rules(self) -> dict[str, str]:
        return super().rules | {"-0": "nan", "0": "nan", "negative": "nan"}


E8M0 = register(ScaleFormat("e8m0fnu"))

_COMMON = ["fp16", "bf16", "e5m2", "e5m2fnuz", "e4m3", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e3m4", "e3m2fn", "e2m3fn"]
_COMMON += ["e2m1fn", "e3m0", "e6m1", "e2m5", "e4m3f", "e1m2fn", "e6m9"]

register_family(
    Family(
        pattern="eXmY[bBIAS][fn|fnuz|f]",
        parse=lambda name: FloatFormat(name, *NAMED[name]) if name in NAMED else parse_float(name),
        examples=tuple(_COMMON),
        meaning="signed binary float, X exponent and Y mantissa bits",
    )
)
