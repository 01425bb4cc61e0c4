"""`FORMAT/BLOCK+mstopK`: K values for each BLOCK, as `+topK`, but chosen over the whole tensor by thresholds: MSTopK.

Shi et al. (arXiv 2010.10458) bisect between the mean and the largest magnitude for a threshold that too many values
reach and one that too few do, and fill up with a run of those between, in their order (here the first ones; there from
a random place). It needs no sorting, so it suits GPUs; here it is in the reference, to be studied beside `+topK`. Wire:
as `+topK` has it for one block, the tensor, with a scale for each K values that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs.base import Law
from narrowcast.codecs.places import place_code
from narrowcast.codecs.spec import declare
from narrowcast.codecs.top import MAX_SIZE, Top, put_back
from narrowcast.kernels import Transform, blocks

STEPS = 30
"""Of the bisection, as in the paper."""


@dataclass(frozen=True)
class MsTopK(Transform):
    """As many values as `TopK(size, kept)` keeps, chosen over all of the tensor. What is not finite is chosen first."""

    name: ClassVar[str] = "mstop"

    size: int
    kept: int

    @property
    def block(self) -> int:
        return 0

    def count(self, n: int) -> int:
        return n // self.size * self.kept + min(self.kept, n % self.size)

    def side_bytes(self, n: int) -> int:
        return place_code(self.count(n), n).nbytes if n else 0

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        place = between_thresholds(x, self.count(len(x)))
        side.copy_(place_code(len(place), len(x)).write(place.view(1, -1)).flatten())
        return x[place]

    def inverse(self, kept: Tensor, side: Tensor, n: int) -> Tensor:
        return put_back(kept.view(1, -1), side.view(1, -1), n)


def between_thresholds(x: Tensor, k: int) -> Tensor:
    """The places of k values of x, ascending."""
    finite = x.isfinite()
    lost = (~finite).nonzero().flatten()
    if len(lost) >= k:
        return lost[:k]
    # in double, by a tree: no overflow, and the same with any number of threads
    magnitude = torch.where(finite, x.abs(), 0.0).double()
    mean, top = float(blocks.tree_sum(magnitude.view(1, -1))) / len(x), float(magnitude.max())
    magnitude = torch.where(finite, magnitude, torch.inf)
    few, many = torch.inf, 0.0
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        ratio = low + (high - low) / 2
        tried = mean + ratio * (top - mean)
        if int((magnitude >= tried).sum()) <= k:
            few, high = min(few, tried), ratio
        else:
            many, low = max(many, tried), ratio
    sure = (magnitude >= few).nonzero().flatten()
    between = ((magnitude >= many) & (magnitude < few)).nonzero().flatten()
    return torch.cat([sure, between[: k - len(sure)]]).sort().values


@dataclass(frozen=True)
class MsTop(Top):
    """K values for each BLOCK, chosen by thresholds."""

    option: ClassVar[str] = declare(
        "mstop", "as many as +top keeps, chosen over the tensor by thresholds", range(1, MAX_SIZE), example=64,
        transforms=True,
    )  # fmt: skip
    examples: ClassVar[tuple[str, ...]] = ("fp32/64+mstop4", "int2/64+mstop32+ef")

    @property
    def transform(self) -> Transform:
        return MsTopK(self.size, self.kept)

    @property
    def exemptions(self) -> dict[str, str]:
        exempt = {**super().exemptions, Law.BLOCKS: "thresholds are those of the tensor"}
        if not self.inner.lossless:
            exempt[Law.IDEMPOTENT] = "what rounds to zero may be kept in place of a value further on"
        return exempt
