"""Measured times as curves, in several versions each, and a level of links made of them.

Every curve of seconds against bytes exists in several versions (draws): the first from the means of the measured
timings, the others from timings drawn again with replacement. Means, since a step adds many calls up, and timings of
small messages often have two peaks, between which a median jumps. Shapes: D draws, K knots, N sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.collectives import Stage
from narrowcast.predict.cluster import Level

FAR_OUT = 8.0
"""Timings so many times above the median belong to something else that ran."""


FIRST_BYTES = 14_480
"""Of a stream of TCP that has been idle: ten packets (RFC 6928), as Linux has it after a pause."""


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


class Timed(NamedTuple):
    """A collective over one number of members: the latencies that are in it, and seconds against bytes a member."""

    steps: float
    curve: Curve


@dataclass
class Link:
    """A level in every version of its measurements."""

    level: Level
    factor_D: Tensor
    tables: dict[str, list[Timed]]
    """By collective, one for each number of members that was timed, the fewest first."""
    gbit_D: Tensor

    def latency(self, steps: float, trips: float = 0.0) -> float:
        """trips: how often bytes cross the link in a row; 0: at every step."""
        return self.level.latency_us / 1e6 * steps + self.level.rtt_ms / 2e3 * (trips or steps)

    def moving(self, kind: str, sent_N: Tensor, steps: float, peers: float = 1.0) -> Tensor:
        """What `sent_N` bytes take beyond latencies, [D, N]; below 0 where a table is quicker than those. peers: to how
        many they go at once.

        Between two numbers of members that were timed it lies between their tables, beyond them it is the nearest's.
        """
        timed = self.tables.get(kind) or self.tables.get("all_reduce" if kind == "two_shot" else "two_shot")
        if timed is None:
            return sent_N * 8 / (self.reached_D(peers)[:, None] * 1e9) * self.factor_D[:, None]
        few = next((one for one in reversed(timed) if one.steps <= steps), timed[0])
        many = next((one for one in timed if one.steps >= steps), few)
        if few.steps >= many.steps:
            return self._moving(few, sent_N, peers)
        share = (steps - few.steps) / (many.steps - few.steps)
        return torch.lerp(self._moving(few, sent_N, peers), self._moving(many, sent_N, peers), share)

    def reached_D(self, peers: float) -> Tensor:
        """Gb/s of a member that sends to so many others: what its streams to them carry, if that is less."""
        if not self.level.window_mb:
            return self.gbit_D
        return self.gbit_D.clamp_max(peers * self.level.stream_gbit * self.level.streams)

    def ramp(self, sent_N: Tensor, peers: float, took_DN: Tensor) -> Tensor:
        """How much longer bytes that took `took_DN` by themselves take after a pause, [D, N]: each stream of TCP begins
        with a few packets, and sends twice as much in each round trip until it has what the link or its window holds.
        """
        rtt, begun = self.level.rtt_ms / 1e3, FIRST_BYTES * peers * self.level.streams
        if not rtt:
            return torch.zeros_like(took_DN)
        trips_DN = took_DN.clamp_min(0) / rtt
        # under way in a round trip is what leaves in one: all, where they leave at once
        grown = torch.log2(1 + sent_N / trips_DN.clamp_min(1) / begun) - 1
        # and no link is slower than another with less bandwidth
        at_once = torch.log2(1 + sent_N / begun) - trips_DN.clamp_min(1)
        return rtt * grown.maximum(at_once).clamp_min(0)

    def _moving(self, timed: Timed, sent_N: Tensor, peers: float) -> Tensor:
        whole = timed.curve(sent_N) * self.factor_D[:, None]
        known = self.latency(timed.steps)
        fixed = torch.full_like(whole, known).minimum(whole)
        # on another link the bytes take longer or shorter; what the processors do for them does not
        slower_D1 = (self.level.measured_gbit / self.reached_D(peers))[:, None]
        wire = sent_N * 8 / (self.level.measured_gbit * 1e9) * self.factor_D[:, None]
        saved = (wire * (1 - slower_D1)).minimum(whole - fixed)
        return whole - saved - known


def in_a_row(links: Sequence[Link], stages: Sequence[Stage], own_N: Tensor, plain_N: Tensor) -> Tensor:
    """Seconds of stages one after the other, [D, N]. own_N, plain_N: bytes of each call by its wire, and in float32.

    What a member of each level sends, whichever takes longest: it moves at the same time.
    """
    total = torch.zeros(1, len(own_N), dtype=torch.float64)
    for stage in stages:
        size_N, link = plain_N if stage.as_is else own_N, links[stage.level]
        moving = link.moving(stage.kind, size_N * stage.sent, stage.steps, stage.peers)
        for inner, sent in zip(links, stage.inner, strict=False):
            moving = moving.maximum(inner.moving(stage.kind, size_N * sent, stage.steps))
        total = total + (moving + link.latency(stage.steps, stage.trips))
    return total
