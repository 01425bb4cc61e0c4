"""What a code means: a format is frozen data, and its table of values is its definition.

Everything a kernel needs (largest value, where a float rounds up, which code is NaN) is derived here from
`Format.values`, so that nothing derived is ever typed in.
"""

from __future__ import annotations

import abc
import enum
import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

MAX_BITS = 16
"""The widest format: `values` has 2**16 entries."""


class Kind(enum.Enum):
    """How a kernel may compute the codes of a format."""

    FLOAT = "sign, exponent and mantissa fields"
    UNIFORM = "evenly spaced: an integer times a step"
    TABLE = "any values: search"


@dataclass(frozen=True)
class Format(abc.ABC):
    """A way to write a real number in `bits` bits.

    A subclass supplies `bits` and `values`; the rest follows. `values[code]` is float64 but always a float32 number,
    since that is what kernels multiply by a scale.
    """

    name: str

    kind: ClassVar[Kind] = Kind.TABLE
    default_overflow: ClassVar[str] = "saturate"
    positive_only: ClassVar[bool] = False
    """Zero and negative numbers have no place here and become NaN."""

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """Width of a code."""

    @property
    @abc.abstractmethod
    def values(self) -> Tensor:
        """The value of every code, in code order: what all kernels are tested against."""

    def __str__(self) -> str:
        return self.name

    def __getstate__(self) -> dict[str, object]:
        # what kernels cache on a format stays in this process
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def reserved(self) -> frozenset[int]:
        """Codes that decode to a number but are never produced."""
        return frozenset()

    @property
    def levels(self) -> Tensor:
        """What a codec's scale multiplies, by code (float64): the value, unless the format counts in steps."""
        return self.values

    @cached_property
    def _grid(self) -> tuple[Tensor, Tensor]:
        """Distinct finite values in rising order, and the code of each (the lowest where several stand for one)."""
        code = torch.arange(len(self.values))
        usable = torch.isfinite(self.values)
        usable[list(self.reserved)] = False
        usable &= ~((self.values == 0) & torch.signbit(self.values))
        code = code[usable]
        value, order = torch.sort(self.values[code], stable=True)
        code = code[order]
        first = torch.ones(len(value), dtype=torch.bool)
        first[1:] = value[1:] != value[:-1]
        return value[first], code[first]

    @property
    def grid(self) -> Tensor:
        """Every finite value once, rising (float64)."""
        return self._grid[0]

    @property
    def grid_codes(self) -> Tensor:
        """The code of each value of `grid` (int64)."""
        return self._grid[1]

    def boundaries(self) -> Tensor:
        """Between each two neighbours of `grid`, the point where nearest rounding changes over (float64)."""
        return (self.grid[:-1] + self.grid[1:]) / 2

    def tie_goes_up(self) -> Tensor:
        """Whether a number exactly on a boundary rounds to the upper neighbour: to the even code."""
        return self.grid_codes[1:] % 2 == 0

    @cached_property
    def starts(self) -> Tensor:
        """`starts[i]` is the smallest float32 that rounds to `grid[i + 1]` or above: index = count of starts <= x.

        With the tie rule folded in, one comparison decides exactly.
        """
        boundary = self.boundaries()
        start = boundary.float()
        inside = torch.where(self.tie_goes_up(), start.double() >= boundary, start.double() > boundary)
        return torch.where(inside, start, torch.nextafter(start, torch.full_like(start, math.inf)))

    @property
    def max(self) -> float:
        """Largest value."""
        return float(self.grid[-1])

    @property
    def min(self) -> float:
        """Smallest (most negative) value."""
        return float(self.grid[0])

    @property
    def largest(self) -> float:
        """Largest magnitude."""
        return max(abs(self.min), abs(self.max))

    @property
    def smallest(self) -> float:
        """Smallest positive value."""
        return float(self.grid[self.grid > 0][0])

    @property
    def smallest_normal(self) -> float | None:
        """Smallest positive value with full precision, where the format has such a notion."""
        return None

    @property
    def smallest_subnormal(self) -> float | None:
        """Smallest positive value below the normal ones, where the format has such a notion."""
        return None

    @property
    def target(self) -> float:
        """What the largest magnitude of a block is scaled to."""
        return min(self.largest, 2.0**15)

    @property
    def signed(self) -> bool:
        return self.min < 0

    def _code_where(self, mask: Tensor) -> int | None:
        places = mask.nonzero()
        return int(places[0]) if len(places) else None

    @cached_property
    def nan_code(self) -> int | None:
        """The code of NaN, or None."""
        return self._code_where(torch.isnan(self.values))

    @cached_property
    def inf_code(self) -> int | None:
        """The code of +Inf, or None. The code of -Inf has the sign bit set as well."""
        return self._code_where(torch.isposinf(self.values))

    @cached_property
    def negative_zero_code(self) -> int | None:
        """The code of -0, or None."""
        return self._code_where((self.values == 0) & torch.signbit(self.values))

    @property
    def holds_nonfinite(self) -> bool:
        return self.nan_code is not None or self.inf_code is not None

    @property
    def overflows(self) -> tuple[str, ...]:
        """The overflow rules that this format can follow."""
        return ("saturate",)

    @property
    def nan_becomes(self) -> str:
        """What a NaN turns into: kept where there is a code, else Inf, else the largest value (as hardware does)."""
        if self.nan_code is not None:
            return "nan"
        return "inf" if self.inf_code is not None else f"{self.max:g}"

    @property
    def inf_becomes(self) -> str:
        """What +Inf turns into under `overflow="saturate"`."""
        if self.inf_code is not None:
            return "inf"
        return "nan" if self.nan_code is not None else f"{self.max:g}"

    @property
    def rules(self) -> dict[str, str]:
        """Every corner rule, for the listing and for whoever compares formats."""
        return {
            "overflow": self.default_overflow,
            "nan": self.nan_becomes,
            "inf": self.inf_becomes,
            "-0": "-0" if self.negative_zero_code is not None else "0",
        }


def as_float32(values: Tensor) -> Tensor:
    """Round a table to float32 numbers, kept as float64."""
    return values.to(torch.float32).to(torch.float64)
