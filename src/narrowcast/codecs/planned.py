"""Codecs whose work is one kernel plan: most of them; the small ones are here, those with a scale in `scaled`."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec, Law
from narrowcast.codecs.spec import Spec, write
from narrowcast.formats import Coding, Format, UniformFormat
from narrowcast.formats import format as format_named
from narrowcast.kernels import AnyPlan, Method, Plan, Store, check_count, pack


@dataclass(frozen=True)
class PlanCodec(Codec):
    """A codec whose work is one kernel plan. A subclass supplies `__str__` and `plan`."""

    @cached_property
    @abc.abstractmethod
    def plan(self) -> Plan:
        """The plan; one object, since kernels keep on it what they derive."""

    @property
    def block(self) -> int:
        return self.plan.block

    @property
    def stochastic(self) -> bool:
        return self.plan.stochastic

    @property
    def code_bits(self) -> int:
        return self.plan.bits

    @cached_property
    def bits_per_value(self) -> float:
        scales = self.plan.n_scales(self.plan.block) if self.plan.block else 0
        return self.plan.bits + (8.0 * self.plan.store.value * scales / self.plan.block if scales else 0.0)

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return self.plan.layout(n if type(n) is int and n >= 0 else check_count(self, n)).nbytes

    def planes(self, n: int, dtype: torch.dtype = torch.float32) -> tuple[tuple[int, int], ...] | None:
        if not (self.block and self.plan.block):
            return None
        layout = self.plan.layout(n)
        return (0, self.plan.code_bytes(n)), (layout.scales, layout.nbytes)

    def limits(self, wire: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
        if self.plan.bits == 1:
            return None  # every value is as far out as one bit can say
        ends = self.plan.format.grid_codes[[0, -1]].tolist()
        low, high = (self.decode(self._with_codes(wire, n, code), n) for code in ends)
        return low, high

    def _with_codes(self, wire: Tensor, n: int, code: int) -> Tensor:
        """The same scales under n times the same code."""
        eight = pack(torch.full((8,), code), self.plan.bits)
        changed = wire.clone()
        codes = changed[: self.plan.code_bytes(n)]
        codes.copy_(eight.repeat(-(-n // 8))[: len(codes)])
        return changed

    def plan_for(self, dtype: torch.dtype) -> AnyPlan:
        return self.plan


METHODS = {"onebit": Method.MEANS, "sign": Method.SIGN}


@dataclass(frozen=True)
class Signs(PlanCodec):
    """One bit a value: `onebit`, 1-bit SGD as CNTK has it (Seide et al. 2014), and `sign`, signSGD with the mean
    magnitude.

    Wire: bits (1 where x >= 0), padded to a multiple of 4 bytes, then for each block the means of its negative and of
    its other values (onebit) or its mean magnitude (sign), as float32.
    """

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


@dataclass(frozen=True)
class Affine(PlanCodec):
    """Affine integers: value = minimum + code * step, as in QSGD-TF and most quantisation libraries.

    Wire: packed codes, padded to a multiple of 4 bytes, then (minimum, step) as float32 for each block.
    """

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


BLOCK = 16


@dataclass(frozen=True)
class NvFp4(PlanCodec):
    """NVFP4: e2m1fn codes, an e4m3fn scale for each 16 values, and one float32 scale for the tensor: value = level *
    block scale * tensor scale.

    Wire: packed codes, padded to a multiple of 4 bytes, one byte a block, padded likewise, then the tensor's scale.
    """

    rounds_stochastically: bool = False

    examples: ClassVar[tuple[str, ...]] = ("nvfp4", "nvfp4+sr", "nvfp4+ef")
    heads: ClassVar[tuple[str, ...]] = ("nvfp4",)

    @classmethod
    def from_spec(cls, spec: Spec) -> Codec | None:
        if spec.head not in cls.heads:
            return None
        spec.allow({"sr", "ef"}, block=False)
        return cls(rounds_stochastically="sr" in spec.options, **spec.wishes)

    def __str__(self) -> str:
        return write("nvfp4", None, None, ["sr"] * self.rounds_stochastically + self.wishes)

    @cached_property
    def plan(self) -> Plan:
        # the block scales take one byte each
        return Plan(
            format_named("e2m1fn"), Method.NVFP4, BLOCK, store=Store.E8M0, stochastic=self.rounds_stochastically
        )

    @property
    def block(self) -> int:
        return 0

    @property
    def exemptions(self) -> dict[str, str]:
        return {
            Law.BLOCKS: "one scale for the tensor above those of the blocks",
            Law.IDEMPOTENT: "block scales are rounded, so the tensor's scale changes",
        }
