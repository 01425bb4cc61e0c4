"""What one collective call works on, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.collectives.residuals import Residuals
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.segments import Coder, Range, Times
from narrowcast.kernels import NO_NOISE, Finish, Noise


class Reduction(Finish):
    """What becomes of the sum: SUM as it is, AVG divided, PREMUL_SUM multiplied."""

    @property
    def gain(self) -> float:
        """By how much one rank's value must differ, so that the result differs by one."""
        return self.divide / self.multiply if self.multiply else 0.0

    def finish(self, total: Tensor) -> Tensor:
        return self.apply(total)


@dataclass
class Call:
    """A flat tensor, a codec, and the exchange to use. Algorithms read `x` and write the result into it."""

    x: Tensor
    codec: Codec
    exchange: Exchange
    segments: Sequence[int]
    reduction: Reduction = field(default_factory=Reduction)
    noise: Noise = NO_NOISE
    """Of the call; each rank and phase derives its own."""
    residuals: Residuals | None = None
    accumulator: str = "float32"
    nodes: Sequence[Sequence[int]] | None = None
    inner: Codec | None = None
    """The codec inside a node, for hierarchical calls; None: as it is."""
    times: Times = field(default_factory=Times)
    origin: tuple[int, int] | None = None
    """The rank in the whole group and the first phase, for noise: a part of a larger call must not repeat its noise."""

    def coder(self, codec: Codec | None = None, dtype: torch.dtype | None = None) -> Coder:
        return Coder(codec or self.codec, self.segments, dtype or self.x.dtype, self.times)

    def noise_in(self, phase: int) -> Noise:
        """What this rank draws in a phase."""
        rank, first = self.origin or (self.exchange.rank, 0)
        return self.noise.derive(rank, first + phase)


Algorithm = Callable[[Call], None]


def take(x: Tensor, part: Range) -> Tensor:
    return x[part[0] : part[1]]
