"""A link that is described instead of measured, so that the autopilot can be studied on one machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from narrowcast.codecs import codec as codec_named
from narrowcast.parallel.autopilot.pilot import Autopilot
from narrowcast.parallel.autopilot.plan import Measurements, StepPlan
from narrowcast.parallel.autopilot.times import HALF, PLAIN, Fit, Layout
from narrowcast.parallel.policy import TensorInfo

FORWARD = 1 / 3
"""Of compute; gradients become ready in the rest of it, value by value."""


@dataclass(frozen=True)
class DescribedLink:
    """Between any two workers, and what they compute beside it."""

    gbit: float
    latency: float = 5e-5
    """Seconds of a message."""
    compute: float = 0.1
    """Seconds of forward and backward."""
    codec_gbyte: float = 4.0
    """Float32 values that are encoded, or decoded, in a second."""

    def __post_init__(self) -> None:
        numbers = self.gbit, self.latency, self.compute, self.codec_gbyte
        if not all(isinstance(one, int | float) and math.isfinite(one) for one in numbers):
            raise ValueError(f"link: got {self}; all of it must be finite numbers")
        if min(self.gbit, self.latency, self.codec_gbyte) <= 0 or self.compute < 0:
            raise ValueError(f"link: got {self}; rate, latency and the codecs' speed must be above 0")

    def fit(self, name: str, world: int, width: float = 32.0) -> Fit:
        """Of a road or a wire: both shots of a sum, and the codec where it rounds. width: bits of a value as it is."""
        bits = {PLAIN: width, HALF: 16.0}.get(name) or codec_named(name).bits_for((1024, 1024))
        sends = 2 * (world - 1) / world
        codes = 0.0 if bits >= 16 else 2 * 4 / (1e9 * self.codec_gbyte)
        rounds = 2 * (world - 1) if name in (PLAIN, HALF) else 2
        return Fit(rounds * self.latency, sends * min(bits, width) / (1e9 * self.gbit) + codes)


class DescribedRoad:
    """Steps on a described link, which may change: seconds are computed, and watching costs none."""

    together, is_real, shares, skips = False, False, True, False

    def __init__(
        self,
        link: DescribedLink | Callable[[int], DescribedLink],
        world: int,
        pilot: Autopilot,
        tensors: Sequence[TensorInfo],
        buckets: Callable[[], Sequence[Sequence[TensorInfo]]],
        step: Callable[[], int],
    ) -> None:
        """tensors: those that may change. buckets: with all tensors, as they are now. step: the one under way."""
        self._at = link if callable(link) else lambda _: link
        self._world, self._pilot, self._step = world, pilot, step
        self._tensors, self._buckets = list(tensors), buckets
        self.halves = all(info.dtype.itemsize > 2 for info in tensors)
        pilot.claim()
        pilot.start(self, self._tensors)

    @property
    def link(self) -> DescribedLink:
        return self._at(self._step())

    def layout(self, stalls: bool = False) -> Layout:
        buckets = self._buckets()
        values = [sum(info.numel for info in members) for members in buckets]
        total, ready, seen = max(1, sum(values)), list[float](), 0
        for count in values:
            seen += count
            ready.append(self.link.compute * (FORWARD + (1 - FORWARD) * seen / total))
        names = tuple(tuple(info.name for info in members) for members in buckets)
        return Layout(tuple(ready), names, tuple(values))

    def fits(self, wires: Sequence[str], values: int) -> dict[str, Fit]:
        return {name: self.link.fit(name, self._world, self._pilot.known.width) for name in (PLAIN, HALF, *wires)}

    def numbers(self) -> tuple[float, float, float]:
        codecs = self._pilot.known.codecs
        real = Measurements(codecs, fits=self.fits([str(codec) for codec in codecs], 0), layout=self.layout())
        cost = real.cost(StepPlan() if self._pilot.dry_run else self._pilot.plan, self._tensors)
        return 1.0, cost.step, cost.busy
