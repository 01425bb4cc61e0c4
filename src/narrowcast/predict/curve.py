"""Seconds against bytes: measured points inside their range, latency + bytes / bandwidth outside; and links.

Every curve exists in several versions (draws): the first from the means of the measured timings, the others from
timings drawn again with replacement. Means, since a step adds many calls up, and timings of small messages often have
two peaks, between which a median jumps. Shapes: D draws, K knots, N sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.predict.cluster import Level

DRAWS = 40
"""Versions of every measurement beside the means: enough for a 5 to 95 % interval."""
FAR_OUT = 8.0
"""Timings so many times above the median belong to something else that ran."""


@dataclass(frozen=True)
class Curve:
    """Knots in bytes, ascending, and the seconds of each in every draw."""

    bytes_K: Tensor
    seconds_DK: Tensor

    def __call__(self, bytes_N: Tensor) -> Tensor:
        """Seconds of each size in each draw, [D, N]: a straight line between knots on logarithmic axes."""
        x, y = self.bytes_K.log(), self.seconds_DK.log()
        if len(x) == 1:
            return self.seconds_DK * torch.ones_like(bytes_N)
        at = torch.searchsorted(self.bytes_K, bytes_N.clamp_min(1.0)).clamp(1, len(x) - 1)
        share = (bytes_N.clamp_min(1.0).log() - x[at - 1]) / (x[at] - x[at - 1])
        inside = torch.exp(y[:, at - 1] + share * (y[:, at] - y[:, at - 1]))
        inside = torch.where(bytes_N < self.bytes_K[0], self.seconds_DK[:, :1], inside)
        return torch.where(bytes_N > self.bytes_K[-1], self._beyond(bytes_N), inside)

    def _beyond(self, bytes_N: Tensor) -> Tensor:
        """Above the largest knot: the slope of the last two, never below the largest knot's own rate."""
        (x0, x1), (y0, y1) = self.bytes_K[-2:], (self.seconds_DK[:, -2:-1], self.seconds_DK[:, -1:])
        slope = torch.maximum((y1 - y0) / (x1 - x0), 0.5 * y1 / x1)
        return y1 + slope * (bytes_N - x1)


def draw_means(samples: Sequence[float], draws: int, generator: torch.Generator) -> Tensor:
    """The mean of the samples, then of `draws` bootstrap samples, [D + 1]; what is far out is left out."""
    middle = statistics.median(samples)
    x = torch.tensor([s for s in samples if s <= FAR_OUT * middle], dtype=torch.float64)
    again = x[torch.randint(len(x), (draws, len(x)), generator=generator)]
    return torch.cat([x.mean()[None], again.mean(dim=1)])


def measured_curve(points: Sequence[Sequence[float]], draws: int, generator: torch.Generator) -> Curve:
    """A curve through points [bytes, seconds, seconds, ...], one timing after the other."""
    ordered = sorted(points, key=lambda point: point[0])
    knots = torch.tensor([float(p[0]) for p in ordered], dtype=torch.float64)
    return Curve(knots, torch.stack([draw_means(p[1:], draws, generator) for p in ordered], dim=1))


def spread_factor(spread: float, draws: int, generator: torch.Generator) -> Tensor:
    """1, then factors of a lognormal with this relative spread, [D + 1]: for what nobody has measured."""
    noise = torch.randn(draws, generator=generator, dtype=torch.float64)
    return torch.cat([torch.ones(1, dtype=torch.float64), torch.exp(spread * noise)])


@dataclass
class Link:
    """A level in every version of its measurements."""

    level: Level
    factor_D: Tensor
    tables: dict[str, tuple[Curve, float]]
    """By collective: seconds against bytes a member, and the latencies that are in them."""
    gbit_D: Tensor

    def seconds(self, kind: str, sent_N: Tensor, steps: float) -> Tensor:
        """Seconds to send so many bytes a member in so many steps, [D, N]."""
        return self.moving(kind, sent_N) + self.latency(steps)

    def latency(self, steps: float) -> float:
        return self.level.latency_us / 1e6 * steps

    def moving(self, kind: str, sent_N: Tensor) -> Tensor:
        """What `sent_N` bytes take beyond latencies, [D, N]; below 0 where a table is quicker than those."""
        timed = self.tables.get(kind) or self.tables.get("all_reduce" if kind == "two_shot" else "two_shot")
        if timed is None:
            return sent_N * 8 / (self.gbit_D[:, None] * 1e9) * self.factor_D[:, None]
        table, known = timed
        whole = table(sent_N) * self.factor_D[:, None]
        fixed = torch.full_like(whole, self.latency(known)).minimum(whole)
        # on another link the bytes take longer or shorter; what the processors do for them does not
        slower_D1 = (self.level.measured_gbit / self.gbit_D)[:, None]
        wire = sent_N * 8 / (self.level.measured_gbit * 1e9) * self.factor_D[:, None]
        saved = (wire * (1 - slower_D1)).minimum(whole - fixed)
        return whole - saved - self.latency(known)
