"""Transform coding: each block of values is changed before a plan encodes it, and changed back after it was decoded.

What a transform keeps of a block, say the largest values, is encoded by the inner plan; what it must remember besides,
say their places, are bytes of its own, the side plane.
"""

from __future__ import annotations

import abc
from typing import ClassVar

from torch import Tensor


class Transform(abc.ABC):
    """A frozen value. `forward` and `inverse` are the definition, in torch; faster ones are found by `name`."""

    name: ClassVar[str]
    """As in the option of a spec; an implementation that is faster than the reference knows it by this."""

    keeps_places: ClassVar[bool] = False
    """Whether n values give n, and no side plane: then a value keeps its random bits wherever a part of x begins."""

    @property
    @abc.abstractmethod
    def block(self) -> int:
        """Values that are changed together; 0: the whole tensor."""

    @abc.abstractmethod
    def count(self, n: int) -> int:
        """How many values the inner plan gets for n values. Of whole blocks it is a multiple of the inner block."""

    def side_bytes(self, n: int) -> int:
        """Bytes of the side plane of n values; those of a block begin on a byte."""
        return 0

    def written(self, m: int) -> tuple[int, ...]:
        """For kernels: how the side plane of a block of m values is written, in numbers that they understand."""
        raise NotImplementedError(f"internal: +{self.name} has no kernels beside the reference")

    @abc.abstractmethod
    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        """The `count(n)` float32 that stand for the n float32 of x; fills the side plane. x stays as it is."""

    @abc.abstractmethod
    def inverse(self, kept: Tensor, side: Tensor, n: int) -> Tensor:
        """n float32 out of what came back of `forward`'s. The side plane comes from a peer: any bytes must do."""
