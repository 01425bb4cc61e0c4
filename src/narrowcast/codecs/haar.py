"""`FORMAT/BLOCK+haar`: each 8 blocks as sub-bands, means of neighbours and what they lack, with steps of their own.

Three levels of the Haar wavelet, in the reference only: to study what a split into frequency bands (Chai et al. 2017)
brings, at the size of the codec without it. Wire: that of the inner codec, for the bands of each 8 * BLOCK values:
means of eight (1/8 of the values), what means of four lack (1/8), of two (1/4), of one (1/2). Each band is whole
blocks, so no step serves two. Of a last, shorter part blocks may lie in two bands. See docs/design/059-sub-bands.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec, Law
from narrowcast.codecs.spec import MAX_BLOCK, Spec, declare
from narrowcast.codecs.transformed import Transformed, wishes_of
from narrowcast.kernels import Method, Plan, Transform, plus

LEVELS = 3


@dataclass(frozen=True)
class HaarBands(Transform):
    """Of `size` values and of the rest: the band of means first, then what they lack, the coarsest first."""

    name: ClassVar[str] = "haar"
    keeps_places: ClassVar[bool] = True
    size: int

    @property
    def block(self) -> int:
        return self.size

    def count(self, n: int) -> int:
        return n

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return torch.cat([_bands(part_NS).flatten() for part_NS in self._parts(x)])

    def inverse(self, kept: Tensor, side: Tensor, n: int) -> Tensor:
        return torch.cat([_values(part_NS).flatten() for part_NS in self._parts(kept)])

    def _parts(self, x: Tensor) -> list[Tensor]:
        """All whole blocks, and a shorter last one."""
        cut = len(x) // self.size * self.size
        return [part.view(-1, min(self.size, len(part))) for part in (x[:cut], x[cut:]) if len(part)]


def _bands(x_NS: Tensor) -> Tensor:
    bands: list[Tensor] = []
    for _ in range(LEVELS):
        pairs = x_NS.shape[1] // 2
        # halves first, so that no sum is too large
        first, second = (x_NS[:, : 2 * pairs] * 0.5).view(len(x_NS), pairs, 2).unbind(dim=2)
        bands.insert(0, first - second)
        # the last of an odd number counts as the mean of a pair
        x_NS = torch.cat([first + second, x_NS[:, 2 * pairs :]], dim=1)
    return torch.cat([x_NS, *bands], dim=1)


def _values(y_NS: Tensor) -> Tensor:
    sizes = [y_NS.shape[1]]
    for _ in range(LEVELS):
        sizes.append((sizes[-1] + 1) // 2)
    mean_NS = y_NS[:, : sizes[-1]]
    for means, values in zip(reversed(sizes[1:]), reversed(sizes[:-1]), strict=True):
        lack = y_NS[:, means:values]
        pair = mean_NS[:, : values - means]
        both = torch.stack([plus(pair, lack), plus(pair, -lack)], dim=2).flatten(1)
        mean_NS = torch.cat([both, mean_NS[:, values - means :]], dim=1)
    return mean_NS


@dataclass(frozen=True)
class Haar(Transformed):
    """Sub-bands of each 8 blocks of the inner codec."""

    option: ClassVar[str] = declare("haar", "sub-bands of each 8 blocks, with steps of their own", transforms=True)
    examples: ClassVar[tuple[str, ...]] = ("int4/128+haar", "int4/64+haar+sr+ef", "int2/64+haar", "e4m3fn/32+haar")

    @classmethod
    def from_inner(cls, spec: Spec, inner: Codec) -> Haar:
        wishes, plan = wishes_of(spec), inner.plan_for(torch.float32)
        if not isinstance(plan, Plan) or plan.constant is not None or not plan.block or plan.method is Method.NVFP4:
            raise spec.error("+haar has a step for each band; write a format with /BLOCK, for example int4/128+haar")
        if plan.cpd or (plan.method is Method.SCALED and not plan.format.signed):
            raise spec.error("+haar takes differences, which need both signs and no overflow; take int4 or e4m3fn")
        if plan.block << LEVELS > MAX_BLOCK:
            raise spec.error(f"+haar takes {1 << LEVELS} blocks at once; give a BLOCK of up to {MAX_BLOCK >> LEVELS}")
        return cls(**wishes, inner=inner)

    @property
    def transform(self) -> HaarBands:
        return HaarBands(self.inner.block << LEVELS)

    @property
    def exemptions(self) -> dict[str, str]:
        return {
            **self.inner.exemptions,
            Law.IDEMPOTENT: "sums of means and what they lack are rounded, so other bands come out of them",
            Law.ZERO: "a zero takes its part in what rounding did to the means that it is in",
        }
