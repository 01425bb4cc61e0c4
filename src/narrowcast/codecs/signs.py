"""One bit a value: `onebit`, 1-bit SGD as CNTK has it (Seide et al. 2014), and `sign`, signSGD with the mean magnitude.

Wire: bits (1 where x >= 0), padded to a multiple of 4 bytes, then for each block the means of its negative and of its
other values (onebit) or its mean magnitude (sign), as float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from narrowcast.codecs.base import Codec, Law
from narrowcast.codecs.planned import PlanCodec
from narrowcast.codecs.spec import Spec, write
from narrowcast.formats import format as format_named
from narrowcast.kernels import Method, Plan

METHODS = {"onebit": Method.MEANS, "sign": Method.SIGN}


@dataclass(frozen=True)
class Signs(PlanCodec):
    """One bit a value and what stands for each bit in a block."""

    name: str = "onebit"
    size: int = 64

    examples: ClassVar[tuple[str, ...]] = ("onebit/64", "onebit/64+ef", "sign/4096", "sign/4096+ef", "sign/64")
    heads: ClassVar[tuple[str, ...]] = tuple(METHODS)

    @classmethod
    def from_spec(cls, spec: Spec) -> Codec | None:
        if spec.head not in cls.heads:
            return None
        spec.allow({"ef"})
        return cls(name=spec.head, size=spec.need_block(), **spec.wishes)

    def __str__(self) -> str:
        return write(self.name, self.size, None, self.wishes)

    @cached_property
    def plan(self) -> Plan:
        return Plan(format_named("uint1"), METHODS[self.name], self.size)

    @property
    def exemptions(self) -> dict[str, str]:
        return {
            Law.IDEMPOTENT: "the mean of equal values is rounded",
            Law.ZERO: "one bit has no zero; a block of zeros is kept",
        }
