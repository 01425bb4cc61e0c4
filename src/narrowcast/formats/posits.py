"""Posits `positN.ES` (Gustafson and Yonemoto 2017), N from 3 to 16, ES from 0 to 3."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from narrowcast.formats.base import MAX_BITS, Format
from narrowcast.formats.registry import NUMBER, Family, parser, register_family


def posit_value(code: int, width: int, es: int) -> Fraction | None:
    """The exact value of one posit code; None for NaR (not a real)."""
    if code == 0:
        return Fraction(0)
    if code == 1 << (width - 1):
        return None
    negative = code >> (width - 1) == 1
    bits = format((1 << width) - code if negative else code, f"0{width}b")[1:]
    run = len(bits) - len(bits.lstrip(bits[0]))
    regime = run - 1 if bits[0] == "1" else -run
    rest = bits[run + 1 :]
    exponent = int(rest[:es].ljust(es, "0") or "0", 2)
    fraction = rest[es:]
    significand = 1 + Fraction(int(fraction or "0", 2), 2 ** len(fraction))
    power = regime * 2**es + exponent
    value = significand * (Fraction(2) ** power)
    return -value if negative else value


@dataclass(frozen=True)
class PositFormat(Format):
    """A posit of `width` bits with `es` exponent bits. Nothing overflows and nothing but zero rounds to zero."""

    width: int
    es: int

    @property
    def bits(self) -> int:
        return self.width

    @cached_property
    def values(self) -> Tensor:
        exact = (posit_value(code, self.width, self.es) for code in range(2**self.width))
        return torch.tensor([float("nan") if v is None else float(v) for v in exact], dtype=torch.float64)

    def boundaries(self) -> Tensor:
        """Posits round on the bit string: the boundary is the (N+1)-bit posit between two neighbours."""
        wider = [posit_value(2 * int(code) + 1, self.width + 1, self.es) for code in self.grid_codes[:-1]]
        return torch.tensor([float(v or 0) for v in wider], dtype=torch.float64)

    @cached_property
    def starts(self) -> Tensor:
        starts = super().starts.clone()
        # anything above zero is at least the smallest posit, and likewise below
        zero = int((self.grid == 0).nonzero()[0])
        starts[zero] = torch.nextafter(starts.new_tensor(0.0), starts.new_tensor(1.0))
        starts[zero - 1] = -0.0
        return starts

    @property
    def target(self) -> float:
        return 1.0  # where posits are densest

    @property
    def inf_becomes(self) -> str:
        return "nan"


def _posit(name: str, n: str, exponent_bits: str) -> Format:
    width, es = int(n), int(exponent_bits)
    if not (3 <= width <= MAX_BITS and es <= 3):
        raise ValueError(
            f"format {name!r}: positN.ES takes N from 3 to {MAX_BITS} and ES from 0 to 3 "
            f"(beyond, values leave float32), got N={width}, ES={es}"
        )
    return PositFormat(name, width, es)


_EXAMPLES = ("posit8.0", "posit8.1", "posit8.2", "posit6.2", "posit16.1")
register_family(Family("positN.ES", parser(rf"posit{NUMBER}\.{NUMBER}", _posit), _EXAMPLES, "posit, ES exponent bits"))
