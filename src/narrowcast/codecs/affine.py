"""Affine integers: a minimum and a step for each block, as in QSGD-TF and most quantisation libraries.

Wire: packed codes, padded to a multiple of 4 bytes, then (minimum, step) as float32 for each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from narrowcast.codecs.base import Codec, Law
from narrowcast.codecs.planned import PlanCodec
from narrowcast.codecs.spec import Spec, write
from narrowcast.formats import Coding, Format, UniformFormat
from narrowcast.formats import format as format_named
from narrowcast.kernels import Method, Plan


@dataclass(frozen=True)
class Affine(PlanCodec):
    """value = minimum + code * step."""

    format: Format = format_named("uint8")
    size: int | None = None
    rounds_stochastically: bool = False

    examples: ClassVar[tuple[str, ...]] = (
        "uint8/512",
        "uint8",
        "uint4/64",
        "uint1/64",
        "uint3/64+sr",
        "uint8/512+sr+ef",
    )

    @classmethod
    def from_spec(cls, spec: Spec) -> Codec | None:
        fmt = format_named(spec.head) if spec.head.startswith("uint") else None
        if not isinstance(fmt, UniformFormat) or fmt.coding is not Coding.UNSIGNED:
            return None
        spec.allow({"sr", "ef"})
        return cls(format=fmt, size=spec.block, rounds_stochastically="sr" in spec.options, **spec.wishes)

    def __str__(self) -> str:
        return write(self.format.name, self.size, None, ["sr"] * self.rounds_stochastically + self.wishes)

    @cached_property
    def plan(self) -> Plan:
        return Plan(self.format, Method.AFFINE, self.size or 0, stochastic=self.rounds_stochastically)

    @property
    def exemptions(self) -> dict[str, str]:
        exempt = {} if self.block else {Law.BLOCKS: "one pair for the tensor"}
        if self.format.bits > 1:
            exempt[Law.IDEMPOTENT] = "minimum + code * step rounds, so the step changes a little"
        exempt[Law.ZERO] = "zero lies between two codes unless the block is all zeros"
        return exempt
