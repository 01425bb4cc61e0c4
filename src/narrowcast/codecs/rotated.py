"""`+rot`: each block goes through a random-sign Hadamard rotation before it is rounded.

A rotated block looks normally distributed, whatever it was: one large value no longer decides the step of all others
(EDEN, Vargaftik et al. 2022; SDP4Bit, Jia et al. 2024). Wire: that of the inner codec. docs/wire-format.md has the
arithmetic and docs/design/058-rotation.md the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from narrowcast.codecs.base import Codec, Law
from narrowcast.codecs.spec import Spec, declare
from narrowcast.codecs.transformed import Transformed, wishes_of
from narrowcast.kernels import MAX_ROTATED, MIN_ROTATED, Method, Plan, Rotation

OPTION = declare("rot", "each block through a random-sign Hadamard rotation first", transforms=True)


@dataclass(frozen=True)
class Rotated(Transformed):
    """`FORMAT/BLOCK+rot`: the wire of the inner codec, of rotated blocks."""

    option: ClassVar[str] = OPTION
    examples: ClassVar[tuple[str, ...]] = (
        *("int4/128+rot", "int4/128+rot+sr+ef", "int3/64+rot", "int2/64+rot", "int8/256+rot+sbf16", "e4m3fn/128+rot"),
        *("e2m1fn/32+rot", "nf4/64+rot", "int4/16+rot", "int4/4096+rot+se8m0", "qsgd4/512+rot+l2", "sign/1024+rot"),
    )

    @classmethod
    def from_inner(cls, spec: Spec, inner: Codec) -> Rotated:
        wishes = wishes_of(spec)
        if why := _why_not(inner):
            raise spec.error(f"+rot {why}")
        return cls(**wishes, inner=inner)

    @property
    def transform(self) -> Rotation:
        return Rotation(self.inner.block)

    @property
    def exemptions(self) -> dict[str, str]:
        return {
            **self.inner.exemptions,
            Law.IDEMPOTENT: "what was rounded in rotated blocks lies between the levels when it is rotated again",
            Law.ZERO: "a zero takes its part in what rounding did to its block",
        }


def _why_not(inner: Codec) -> str | None:
    """Why a codec cannot encode rotated blocks."""
    plan = inner.plan_for(torch.float32)
    if not isinstance(plan, Plan) or plan.constant is not None or not plan.block:
        return "rotates blocks that have a scale of their own; write /BLOCK, for example int4/128+rot"
    if plan.method is Method.NVFP4:
        return "rotates blocks that have a scale of their own, and nvfp4 has one for the tensor, too; take mxfp4"
    if plan.method is Method.AFFINE or (plan.method is Method.SCALED and not plan.format.signed):
        return f"gives values of both signs, and {plan.format} has no negative ones; take int{max(2, plan.bits)}"
    if plan.cpd:
        return "spreads an Inf over its block, and +cpd overflows to Inf; leave out one of them"
    if plan.block & (plan.block - 1) or not MIN_ROTATED <= plan.block <= MAX_ROTATED:
        return f"needs a block that is a power of two from {MIN_ROTATED} to {MAX_ROTATED}, got {plan.block}"
    return None
