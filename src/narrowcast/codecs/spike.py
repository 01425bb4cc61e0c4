"""`FORMAT/BLOCK+spikeS`: the S values of largest magnitude of each block travel apart, in bfloat16, with their places.

For the inner codec there is a zero in their place, so that the others have a finer scale (FlashCommunication V2, arXiv
2508.03760). Wire: that of the inner codec, padded to a multiple of 4 bytes, then for each block its S values in
bfloat16, by place, and the places, as codes of as many bits as BLOCK - 1 has, ending on a byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec, Law
from narrowcast.codecs.places import as_bits, as_bytes
from narrowcast.codecs.spec import Spec, declare
from narrowcast.codecs.top import largest_places
from narrowcast.codecs.transformed import Transformed, wishes_of
from narrowcast.kernels import Method, Plan, Transform, saturate, with_one_nan_

MAX_SPIKES = 16
VALUE_BYTES = 2


@dataclass(frozen=True)
class Spikes(Transform):
    """Of each `size` values the `spikes` largest go into the side plane; of fewer values as many as there are.

    They are chosen as `TopK` chooses. Where the places of a block do not ascend or are too large, all of it is NaN.
    """

    name: ClassVar[str] = "spike"

    size: int
    spikes: int

    @property
    def block(self) -> int:
        return self.size

    @property
    def place_bits(self) -> int:
        return (self.size - 1).bit_length()

    def count(self, n: int) -> int:
        return n

    def bytes_of(self, spikes: int) -> int:
        """Of a block with so many spikes."""
        return VALUE_BYTES * spikes + -(-spikes * self.place_bits // 8)

    def side_bytes(self, n: int) -> int:
        rest = min(self.spikes, n % self.size)
        return n // self.size * self.bytes_of(self.spikes) + self.bytes_of(rest)

    def written(self, m: int) -> tuple[int, ...]:
        spikes = min(self.spikes, m)
        return spikes, self.place_bits, 0, -(-spikes * self.place_bits // 8), VALUE_BYTES * spikes

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        cut, last = len(x) // self.size * self.size, len(x) // self.size * self.bytes_of(self.spikes)
        kept = x.clone()
        for values, plane, size in ((kept[:cut], side[:last], self.size), (kept[cut:], side[last:], len(x) - cut)):
            if len(values):
                self._take_out(values.view(-1, size), plane)
        return kept

    def _take_out(self, x_NB: Tensor, side: Tensor) -> None:
        """Zero in the place of each spike."""
        place_NS = largest_places(x_NB, min(self.spikes, x_NB.shape[1]))
        value_NS = with_one_nan_(saturate(x_NB.gather(1, place_NS), torch.bfloat16).to(torch.bfloat16))
        bit_NSP = (place_NS[:, :, None] >> torch.arange(self.place_bits)) & 1
        bytes_NB = torch.cat([value_NS.view(torch.uint8), as_bytes(bit_NSP.flatten(1))], dim=1)
        side.copy_(bytes_NB.flatten())
        x_NB.scatter_(1, place_NS, 0.0)

    def inverse(self, kept: Tensor, side: Tensor, n: int) -> Tensor:
        cut, last = n // self.size * self.size, n // self.size * self.bytes_of(self.spikes)
        values = kept.clone()
        for part, plane, size in ((values[:cut], side[:last], self.size), (values[cut:], side[last:], n - cut)):
            if len(part):
                self._put_back(part.view(-1, size), plane)
        return values

    def _put_back(self, x_NB: Tensor, side: Tensor) -> None:
        spikes, bits = min(self.spikes, x_NB.shape[1]), self.place_bits
        side_NB = side.view(len(x_NB), -1)
        value = side_NB[:, : VALUE_BYTES * spikes].flatten().clone().view(torch.bfloat16)
        value_NS = with_one_nan_(value.float().view(-1, spikes))
        bit_NSP = as_bits(side_NB[:, VALUE_BYTES * spikes :])[:, : spikes * bits].view(-1, spikes, bits)
        place_NS = (bit_NSP << torch.arange(bits)).sum(dim=2)
        right_N = (place_NS.diff(dim=1) > 0).all(dim=1) & (place_NS[:, -1] < x_NB.shape[1])
        x_NB.scatter_(1, torch.where(right_N[:, None], place_NS, torch.arange(spikes)), value_NS)
        x_NB[~right_N] = math.nan


@dataclass(frozen=True)
class Spike(Transformed):
    """The S largest of each block apart."""

    spikes: int = 2

    option: ClassVar[str] = declare(
        "spike", "the largest values of each block apart, in bfloat16", range(1, MAX_SPIKES + 1), example=2,
        transforms=True,
    )  # fmt: skip
    examples: ClassVar[tuple[str, ...]] = (
        *("int4/128+spike2", "int2/64+spike4+sr+ef", "e2m1fn/512+spike3+sbf16", "int8/64+spike16", "mxfp4+spike1"),
    )

    @classmethod
    def from_inner(cls, spec: Spec, inner: Codec) -> Transformed:
        spikes = spec.numbers[cls.option]
        plan = inner.plan_for(torch.float32)
        # zeros in the places of spikes would count in a mean, and in a minimum
        by_largest = isinstance(plan, Plan) and plan.method in (Method.SCALED, Method.NVFP4) and not plan.l2
        if inner.block < MAX_SPIKES or inner.constant_scale is not None or not by_largest:
            raise spec.error(
                f"+{cls.option} goes with formats whose scale follows from the largest value of each block, for "
                f"example int4/128+{cls.option}{spikes}"
            )
        if spikes >= inner.block:
            raise spec.error(f"+{cls.option}{spikes} leaves nothing of a block of {inner.block}; give a smaller number")
        return cls(**wishes_of(spec), inner=inner, spikes=spikes)

    @property
    def option_text(self) -> str:
        return f"{self.option}{self.spikes}"

    @property
    def transform(self) -> Transform:
        return Spikes(self.inner.block, self.spikes)

    @property
    def exemptions(self) -> dict[str, str]:
        why = "a spike that bfloat16 rounds down may be smaller than what was left, and others are chosen"
        return {**super().exemptions, Law.IDEMPOTENT: why}
