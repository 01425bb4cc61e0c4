"""Low rank, `+rankR` and `+acpR`: a matrix travels as R pairs of vectors, which the rest of the spec encodes.

Not a codec of flat values but a kind of call (`collectives.low_rank`): what travels follows from a tensor's shape, and
from what all ranks have. So `encode` refuses, with the reason, and whoever can make such a call asks for `rank` and
`factors`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from narrowcast.codecs.base import Codec, Law
from narrowcast.codecs.cast import Cast
from narrowcast.codecs.spec import Spec, declare, parse, write
from narrowcast.kernels import AnyPlan

RANKS = range(1, 257)
TYPICAL = 1024
"""Rows and columns of the matrix by which `bits_per_value` counts."""
CLEARLY = 2.0
"""So many times fewer bits than the rest of the spec has, or it is not worth its products."""


@dataclass(frozen=True)
class LowRank(Codec):
    """`vectors` pairs of vectors for a matrix: both factors at each step, or where it `alternates` one of them."""

    inner: Codec = field(default=Cast(name="fp32"), kw_only=True)
    vectors: int = field(default=1, kw_only=True)

    option: ClassVar[str]
    alternates: ClassVar[bool]

    @classmethod
    def inner_spec(cls, spec: Spec) -> Spec:
        """What is left of a spec for the factors."""
        return spec.without(cls.option, "ef")

    @classmethod
    def from_inner(cls, spec: Spec, inner: Codec) -> LowRank:
        """The codec that `spec` names around that of its factors."""
        if "diff" in spec.options:
            raise spec.error(f"+{cls.option} is for gradients, +diff for parameters; leave one of them out")
        if spec.numbers.get("ef") is not None:
            raise spec.error(f"with +{cls.option} all of the residual is kept; write +ef without a number")
        if inner.is_identity:
            raise spec.error("factors are float32, whatever the type of the tensor; write fp32 instead of as-is")
        return cls(feedback="ef" in spec.options, inner=inner, vectors=spec.numbers[cls.option])

    @classmethod
    def from_spec(cls, spec: Spec) -> Codec | None:
        raise TypeError(f"internal: {cls.__name__} is made by from_inner")

    def __str__(self) -> str:
        inner = parse(self.inner.spec)
        options = [*inner.written_options, self.transformed_by, *self.wishes]
        return write(inner.head, inner.block, inner.scale, options)

    @property
    def transformed_by(self) -> str:
        return f"{self.option}{self.vectors}"

    @property
    def rank(self) -> int:
        return self.vectors

    @property
    def sends_one_factor(self) -> bool:
        return self.alternates

    @property
    def factors(self) -> Codec:
        return self.inner

    @property
    def rest(self) -> Codec:
        """For tensors that are no matrices, or too small."""
        return replace(self.inner, feedback=self.feedback)

    def bits_for(self, shape: Sequence[int]) -> float:
        rows, columns = shape[0], math.prod(shape[1:])
        values = self.vectors * (rows + columns) * (0.5 if self.alternates else 1.0)
        return self.inner.bits_per_value * values / (rows * columns)

    def for_shape(self, shape: Sequence[int]) -> tuple[Codec, str]:
        if len(shape) < 2 or math.prod(shape) == 0:
            return self.rest, "is no matrix"
        if CLEARLY * self.bits_for(shape) > self.rest.bits_per_value:
            return self.rest, f"is {shape[0]} x {math.prod(shape[1:])}, where rank {self.vectors} saves too little"
        return self, ""

    @property
    def bits_per_value(self) -> float:
        """Of a matrix of 1024 x 1024; `bits_for` says it of others."""
        return self.bits_for((TYPICAL, TYPICAL))

    @property
    def code_bits(self) -> int:
        return self.inner.code_bits

    @property
    def block(self) -> int:
        return 0

    @property
    def stochastic(self) -> bool:
        return self.inner.stochastic

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        raise self.refusal("nbytes")

    def plan_for(self, dtype: torch.dtype) -> AnyPlan:
        raise self.refusal("encode and decode")

    def refusal(self, what: str) -> ValueError:
        return ValueError(
            f"{what} with {self}: +{self.option} is for gradients (`attach`, `LocalSGD`), where matrices are summed "
            f"over ranks; flat values have no rank. Leave out +{self.option}{self.vectors}"
        )

    @property
    def exemptions(self) -> dict[str, str]:
        inherited = {law: why for law, why in self.inner.exemptions.items() if law == Law.NONFINITE}
        return {
            Law.SIZE: "the bytes follow from the shape of a matrix",
            Law.BLOCKS: "each vector follows from the whole matrix",
            Law.NEAREST: "what comes back is the nearest matrix of a low rank, about",
            Law.IDEMPOTENT: "a call starts from the factor of the last one",
            Law.BYTES: "matrix products of a GPU add in an order of their own; on one kind of device bits are the same",
            **inherited,
        }


@dataclass(frozen=True)
class Rank(LowRank):
    """PowerSGD (Vogels et al. 2019): the left factor travels, then the right one."""

    option: ClassVar[str] = declare(
        "rank", "low rank: so many pairs of vectors for a matrix", RANKS, example=4, transforms=True
    )
    alternates: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = ("fp32+rank4", "bf16+rank4+ef", "int8/256+rank4+ef")


@dataclass(frozen=True)
class AlternatingRank(LowRank):
    """ACP-SGD (Zhang et al. 2023): the left factor travels at one step, the right one at the next."""

    option: ClassVar[str] = declare(
        "acp", "low rank of which one factor travels a step", RANKS, example=4, transforms=True
    )
    alternates: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = ("fp32+acp4+ef", "bf16+acp4+ef")
