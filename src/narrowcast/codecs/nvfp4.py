"""NVFP4: e2m1fn codes, an e4m3fn scale for each 16 values, and one float32 scale for the tensor.

Wire: packed codes, padded to a multiple of 4 bytes, one byte a block, padded likewise, then the tensor's scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from narrowcast.codecs.base import Codec, Law
from narrowcast.codecs.planned import PlanCodec
from narrowcast.codecs.spec import Spec, write
from narrowcast.formats import format as format_named
from narrowcast.kernels import Method, Plan, Store

BLOCK = 16


@dataclass(frozen=True)
class NvFp4(PlanCodec):
    """value = level * block scale * tensor scale."""

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
