"""What one collective call works on, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.collectives.residuals import Residuals
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.segments import Coder, Range, Scales, Times
from narrowcast.kernels import NO_NOISE, Feedback, Finish, Noise


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
    """The codec inside a node, for algorithms that know nodes; None: as it is."""
    times: Times = field(default_factory=Times)
    origin: tuple[int, int] | None = None
    """The rank in the whole group and the first phase, for noise: a part of a larger call must not repeat its noise."""
    scales: Scales = None
    """Of this rank's own values: its own ones, or those that all ranks agreed on."""

    @cached_property
    def coder(self) -> Coder:
        return Coder.of(self.codec, tuple(self.segments), self.x.dtype, self.times)

    @property
    def sum_scales(self) -> Scales:
        """The scales that hold for sums, too: those that all ranks agreed on."""
        return self.scales if self.coder.shares_scales else None

    def noise_in(self, phase: int) -> Noise:
        """What this rank draws in a phase."""
        if self.noise is NO_NOISE:
            return NO_NOISE
        rank, first = self.origin or (self.exchange.rank, 0)
        return self.noise.derive(rank, first + phase)

    def feedback(self, shot: int, part: Range) -> Feedback | None:
        return None if self.residuals is None else self.residuals.of(shot, part)

    def encode(
        self,
        values: Tensor,
        part: Range,
        phase: int,
        scales: Scales = None,
        feedback: Feedback | None = None,
        wire: Tensor | None = None,
    ) -> Tensor:
        """The message of a part, with this rank's noise of a phase; in `wire`, or in memory of its own."""
        wire = self.exchange.wire(self.coder.nbytes(part)) if wire is None else wire
        self.coder.encode(values, part, wire, self.noise_in(phase), scales, feedback)
        return wire
