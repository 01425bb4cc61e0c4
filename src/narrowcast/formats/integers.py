"""Evenly spaced formats: int2..int8, uint1..uint8, fixed point, and the sign-magnitude levels of QSGD and TernGrad."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.formats.base import MAX_BITS, Format, Kind, as_float32
from narrowcast.formats.registry import NUMBER, Family, parser, register, register_family


class Coding(enum.Enum):
    """How a signed integer becomes a code."""

    TWOS_COMPLEMENT = "two's complement"
    SIGN_MAGNITUDE = "sign bit on top, magnitude below"
    UNSIGNED = "unsigned"


@dataclass(frozen=True)
class UniformFormat(Format):
    """An integer of `width` bits times `1 / steps_per_unit`. Codecs count in steps, so their scale is the step."""

    width: int
    coding: Coding = Coding.TWOS_COMPLEMENT
    steps_per_unit: int = 1
    symmetric: bool = True
    stochastic_only: bool = False
    """The method that this format belongs to is defined with stochastic rounding."""

    kind: ClassVar[Kind] = Kind.UNIFORM

    @property
    def bits(self) -> int:
        return self.width

    @cached_property
    def integers(self) -> Tensor:
        """The integer that each code stands for (int64); a negative zero is just 0 here."""
        code = torch.arange(2**self.width)
        if self.coding is Coding.UNSIGNED:
            return code
        half = 2 ** (self.width - 1)
        if self.coding is Coding.TWOS_COMPLEMENT:
            return torch.where(code >= half, code - 2 * half, code)
        return torch.where(code >= half, half - code, code)

    @cached_property
    def values(self) -> Tensor:
        value = as_float32(self.integers.double() / self.steps_per_unit)
        negative_zero = (self.coding is Coding.SIGN_MAGNITUDE) & (torch.arange(2**self.width) == 2 ** (self.width - 1))
        return torch.where(negative_zero, -0.0, value)

    @property
    def levels(self) -> Tensor:
        return torch.copysign(self.integers.abs().double(), self.values)

    @property
    def reserved(self) -> frozenset[int]:
        unused = self.symmetric and self.coding is Coding.TWOS_COMPLEMENT
        return frozenset({2 ** (self.width - 1)}) if unused else frozenset()

    @property
    def high(self) -> int:
        """Largest integer."""
        return 2 ** (self.width - (self.coding is not Coding.UNSIGNED)) - 1

    @property
    def low(self) -> int:
        """Smallest integer."""
        if self.coding is Coding.UNSIGNED:
            return 0
        return -self.high - (not self.symmetric)

    @property
    def target(self) -> float:
        # in steps: the largest magnitude that both signs reach
        return float(self.high)


def _integer(name: str, unsigned: str, bits: str) -> Format:
    width, least = int(bits), 1 if unsigned else 2
    if not least <= width <= 8:
        raise ValueError(f"format {name!r}: {unsigned}int takes {least} to 8 bits, got {width}")
    return UniformFormat(name, width, Coding.UNSIGNED if unsigned else Coding.TWOS_COMPLEMENT)


def _fixed(name: str, before: str, after: str) -> Format:
    whole, fraction = int(before), int(after)
    if whole < 1 or not 2 <= whole + fraction <= MAX_BITS:
        raise ValueError(
            f"format {name!r}: fixedI.F takes I >= 1 (the sign bit counts) and I + F from 2 to {MAX_BITS}, "
            f"got I={whole}, F={fraction}"
        )
    return UniformFormat(name, whole + fraction, steps_per_unit=2**fraction, symmetric=False)


def _qsgd(name: str, bits: str) -> Format:
    width = int(bits)
    if not 2 <= width <= 8:
        raise ValueError(f"format {name!r}: qsgd takes 2 to 8 bits (a sign and the level), got {width}")
    return UniformFormat(name, width, Coding.SIGN_MAGNITUDE, stochastic_only=True)


def _all(prefix: str, least: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{width}" for width in range(least, 9))


_INTEGERS, _LEVELS = _all("int", 2) + _all("uint", 1), _all("qsgd", 2)
_PLACES, _FIXED = "two's complement, I whole and F binary places", ("fixed4.4", "fixed2.6", "fixed8.8")
_LEVELS_MEAN = "QSGD levels: a sign and N - 1 bits, stochastic"
register_family(
    Family("intN", parser(rf"(u?)int{NUMBER}", _integer), _INTEGERS, "integers: int symmetric, uint affine")
)
register_family(Family("fixedI.F", parser(rf"fixed{NUMBER}\.{NUMBER}", _fixed), _FIXED, _PLACES))
register_family(Family("qsgdN", parser(rf"qsgd{NUMBER}", _qsgd), _LEVELS, _LEVELS_MEAN))

TERNARY = register(UniformFormat("ternary", 2, Coding.SIGN_MAGNITUDE, stochastic_only=True))
LINEAR8 = register(UniformFormat("linear8", 8, Coding.SIGN_MAGNITUDE, steps_per_unit=127))
