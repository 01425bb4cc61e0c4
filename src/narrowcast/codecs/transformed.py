"""Codecs that change each block of values before another codec encodes it: an option of that codec's spec.

Such an option is one file, with a `Transform` (what it does, in torch) and a `Transformed` (its place in specs), and
one line in registry.py. Wire: that of the inner codec, padded to a multiple of 4 bytes, then the side plane.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch

from narrowcast.codecs.base import Codec
from narrowcast.codecs.cast import Cast
from narrowcast.codecs.spec import Spec, parse, write
from narrowcast.kernels import AnyPlan, CastPlan, Plan, Transform, TransformPlan, check_count

SENDERS = ("ef", "diff")
"""What these ask is asked of whoever sends the outer codec's wires."""


@dataclass(frozen=True)
class Transformed(Codec):
    """The inner codec's wire of the transform's values, then the transform's side plane.

    A subclass supplies `option`, `examples`, `from_inner`, `transform`, where it has a number or changes the block
    `option_text`, `inner_spec` and `written_block`, and its own `exemptions`.
    """

    inner: Codec = field(default=Cast(name="fp32"), kw_only=True)

    option: ClassVar[str]
    """Its name in specs, which `spec.declare` returned."""

    @classmethod
    def inner_spec(cls, spec: Spec) -> Spec:
        """What is left of a spec for the inner codec, which the registry then makes."""
        return spec.without(cls.option, *SENDERS)

    @classmethod
    @abc.abstractmethod
    def from_inner(cls, spec: Spec, inner: Codec) -> Transformed:
        """The codec that `spec` names around its inner codec; ValueError where it is wrong."""

    @classmethod
    def from_spec(cls, spec: Spec) -> Codec | None:
        raise TypeError(f"internal: {cls.__name__} is made by from_inner")

    @property
    @abc.abstractmethod
    def transform(self) -> Transform:
        """What is done to values; equal codecs have equal ones."""

    @property
    def option_text(self) -> str:
        """The option as specs have it, with its number."""
        return self.option

    @property
    def written_block(self) -> int | None:
        """What stands after the slash."""
        return parse(self.inner.spec).block

    def __str__(self) -> str:
        inner = parse(self.inner.spec)
        options = [*inner.written_options, self.option_text, *self.wishes]
        return write(inner.head, self.written_block, inner.scale, options)

    @cached_property
    def plan(self) -> TransformPlan:
        """One object, since kernels keep on it what they derive."""
        inner = self.inner.plan_for(torch.float32)
        if not isinstance(inner, Plan | CastPlan):
            raise TypeError(f"internal: {self.inner} has no plan that a transform could go before")
        return TransformPlan(self.transform, inner)

    def plan_for(self, dtype: torch.dtype) -> AnyPlan:
        return self.plan

    @property
    def transformed_by(self) -> str:
        return self.option_text

    @property
    def block(self) -> int:
        return self.transform.block

    @property
    def stochastic(self) -> bool:
        return self.inner.stochastic

    @property
    def code_bits(self) -> int:
        return self.inner.code_bits

    @property
    def largest_value(self) -> float:
        return self.inner.largest_value

    @property
    def bits_per_value(self) -> float:
        many = self.block or 1 << 26
        share, side = self.transform.count(many) / many, self.transform.side_bytes(many) / many
        return self.inner.bits_per_value * share + 8.0 * side

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return self.plan.layout(n if type(n) is int and n >= 0 else check_count(self, n)).nbytes

    @property
    def exemptions(self) -> dict[str, str]:
        return self.inner.exemptions


def wishes_of(spec: Spec) -> dict[str, Any]:
    """What a `from_inner` passes on to its class, after a look at it."""
    spec.allow({*spec.options - {"diff"}, "ef"}, scale=True)
    return spec.wishes
