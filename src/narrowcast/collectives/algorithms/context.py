"""What one collective call works on, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.collectives.residuals import Residuals
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.segments import Coder, Range, Scales, Times, host_waits, segment_ranges
from narrowcast.kernels import NO_NOISE, Feedback, Finish, Noise


class Reduction(Finish):
    """What becomes of the sum: SUM as it is, AVG divided, PREMUL_SUM multiplied."""

    @property
    def gain(self) -> float:
        """By how much one rank's value must differ, so that the result differs by one."""
        return self.divide / self.multiply if self.multiply else 0.0

    def finish(self, total: Tensor) -> Tensor:
        return self.apply(total)


class Flat:
    """Tensors as one flat tensor, where they are, that can be written back."""

    def __init__(self, tensors: list[Tensor], buffer: Tensor | None = None) -> None:
        self.tensors = tensors
        self.lengths = [t.numel() for t in tensors]
        self.numel = sum(self.lengths)
        like = tensors[0] if tensors else torch.empty(0)
        self.dtype, self.device = like.dtype, like.device
        one = buffer if buffer is not None else like.detach() if len(tensors) < 2 else None
        self.is_view = one is not None and one.is_contiguous() and not one.is_neg()
        self._x = one.view(-1) if one is not None and self.is_view else None

    def host_waits(self, *codecs: Codec) -> bool:
        return host_waits(codecs, self.device, self.dtype)

    @property
    def x(self) -> Tensor:
        """Gathered where it must be, at the first use: not before the call has its turn, since what it is to read may
        still be written by the one before.
        """
        if self._x is None:
            self._x = torch.cat([t.detach().reshape(-1) for t in self.tensors])
        return self._x

    @property
    def memory(self) -> list[Tensor]:
        """The caller's memory, all that is read and written of it."""
        return [self.x] if self.is_view else self.tensors

    def write_back(self) -> None:
        if self.is_view:
            return
        for tensor, (low, high) in zip(self.tensors, segment_ranges(self.lengths), strict=True):
            tensor.detach().copy_(self.x[low:high].view(tensor.shape))


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
