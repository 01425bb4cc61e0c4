"""What a collective costs on a cluster: bytes, steps, encodings and seconds, algorithm by algorithm.

Every curve of seconds against bytes exists in several versions (draws): the first from the means of the measured
timings, the others from timings drawn again with replacement. Means, since a step adds many calls up, and timings of
small messages often have two peaks, between which a median jumps. Shapes: D draws, K knots, N sizes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import ALGORITHMS, CHUNK_BYTES, MAX_CHUNKS, TREE_SHARE, Cost, Placement, Stage, direct_steps
from narrowcast.predict import speeds, spreads
from narrowcast.predict.cluster import Cluster, CodecSpeed, CollectiveTimings, Level, without_wishes
from narrowcast.predict.model import wire_sizes
from narrowcast.predict.spreads import Spreads

DRAWS = 40
"""Versions of every measurement beside the means: enough for a 5 to 95 % interval."""
QUICKEST = 0.9
"""Of the time that a preset states: it has nearly what its line carries, so other clusters are slower, not quicker."""
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


@dataclass
class Link:
    """A level in every version of its measurements."""

    level: Level
    factor_D: Tensor
    tables: dict[str, tuple[Curve, float]]
    """By collective: seconds against bytes a member, and the latencies that are in them."""
    gbit_D: Tensor

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


PASSES = {"all_reduce": 2, "two_shot": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
"""How often each collective moves all parts of the tensor but a member's own."""


def volume(kind: str, ranks: int) -> float:
    """Bytes that a member sends for each byte of the tensor; nccl-tests' bus-bandwidth factors."""
    if kind in PASSES:
        return PASSES[kind] * ((ranks - 1) / ranks)
    return {"broadcast": 1.0, "send": 1.0, "one_shot": float(ranks - 1)}[kind]


def steps(kind: str, ranks: int) -> float:
    """Latencies in a row."""
    if kind in PASSES:
        return float(PASSES[kind] * (direct_steps(ranks) if kind in ("two_shot", "all_to_all") else ranks - 1))
    return {"broadcast": 1.0, "send": 1.0}[kind]


def is_nccl(cluster: Cluster) -> bool:
    """Whether the backend is NCCL, as on every device that is no processor."""
    return not cluster.device.is_cpu


def placement(cluster: Cluster, world: int) -> Placement:
    """So many ranks, node by node."""
    outermost = cluster.levels[cluster.level_of(world)].latency_us
    relative = tuple(level.latency_us / outermost if outermost else 1.0 for level in cluster.levels)
    sizes = cluster.sizes(world) if len(cluster.levels) > 1 else ()
    return Placement(world, sizes, relative, is_nccl(cluster))


def plan(algorithm: str, cluster: Cluster, world: int) -> Cost:
    """What an algorithm does on `world` ranks of a cluster, node by node in rank order."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: unknown {algorithm!r}; take auto, {', '.join(ALGORITHMS)}")
    if ALGORITHMS[algorithm].takes_nodes and len(cluster.levels) == 1:
        raise ValueError(f"algorithm: {algorithm} needs two levels, cluster {cluster.name} has one; take two_shot")
    return ALGORITHMS[algorithm].cost(placement(cluster, world))


def stage_of(kind: str, cluster: Cluster, world: int) -> Stage:
    """One collective by itself: from everybody to everybody, or from rank to rank around a ring."""
    place = placement(cluster, world)
    if kind == "all_to_all":
        return place.direct(kind)
    if kind in PASSES:
        return place.ring(kind, PASSES[kind])
    return place.over_all_levels(kind, [volume(kind, world)] * (place.level + 1), steps(kind, world))


def between_nodes(algorithm: str, cluster: Cluster, world: int) -> Cost:
    """A sum between nodes of what the ranks of a node hold one part of each: together they send all of it."""
    ranks = placement(cluster, world)
    made = ALGORITHMS[algorithm].cost(ranks.of_nodes())

    def outside(stage: Stage) -> Stage:
        return replace(stage, level=stage.level + 1, inner=(stage.own / ranks.inside, *stage.inner))

    stages, otherwise = (tuple(map(outside, each)) for each in (made.stages, made.otherwise))
    return replace(made, stages=stages, otherwise=otherwise, codec_share=1 / ranks.inside)


def is_summed_by_backend(wire: str) -> bool:
    """Whether the backend itself adds it up where nobody asks for more: numbers that it knows."""
    return wire in ("fp32", "as-is", "bf16", "fp16")


def resolve(algorithm: str, wire: str, cluster: Cluster, world: int) -> str:
    """What "auto" means: the backend's own sum for float32, as `attach` chooses otherwise."""
    if algorithm != "auto":
        return algorithm
    if wire in ("fp32", "as-is"):
        return "native"
    inside, nodes = cluster.shape(world)
    return "hierarchical" if inside > 1 and nodes > 1 else "two_shot"


class Costs:
    """A cluster's times in every version of its measurements."""

    def __init__(
        self,
        cluster: Cluster,
        draws: int = DRAWS,
        seed: int = 0,
        bandwidths: Tensor | None = None,
        level: int = -1,
        known: Spreads | None = None,
    ) -> None:
        """bandwidths: instead of versions of the measurements, versions of the link `level`, in Gb/s. known: how far
        predictions were off elsewhere, if not as the shipped file has it."""
        self.cluster, self._seed = cluster, seed
        self._cache: dict[tuple[object, ...], Tensor] = {}
        self.known = (known or spreads.shipped())[spreads.kind_of(cluster)]
        self.draws = draws if bandwidths is None else len(bandwidths) - 1
        self.fixed = bandwidths is not None
        self.levels = [self._level(n, level) for n, level in enumerate(cluster.levels)]
        if bandwidths is not None:
            self.levels[level].gbit_D = bandwidths / cluster.levels[level].oversubscription
        self.device_D = self.spread("device", math.hypot(cluster.device.spread, cluster.unrest))
        self._codecs: dict[str, tuple[Curve, Curve, float]] = {}
        self._plans: dict[tuple[str, int], Cost] = {}

    def generator(self, name: str) -> torch.Generator:
        """The same for the same name, whatever else is drawn."""
        number = sum(ord(letter) * 257**place % 2**31 for place, letter in enumerate(name))
        return torch.Generator().manual_seed(self._seed + number % 2**31)

    def spread(self, name: str, spread: float, freedom: float = math.inf) -> Tensor:
        key = ("spread", name, spread, freedom)
        if key not in self._cache:
            made = spreads.factors(0.0 if self.fixed else spread, self.draws, self.generator(name), freedom)
            self._cache[key] = made
        return self._cache[key]

    def _curve(self, name: str, points: tuple[tuple[float, ...], ...]) -> Curve:
        made = measured_curve(points, 0 if self.fixed else self.draws, self.generator(name))
        return Curve(made.bytes_K, made.seconds_DK.expand(self.draws + 1, -1))

    def _level(self, number: int, level: Level) -> Link:
        tables = {}
        for table in level.tables:
            if table.wire != "fp32":
                continue
            factor = volume(table.name, table.ranks)
            points = tuple((row[0] * factor, *row[1:]) for row in table.points)
            timed = self._curve(f"{self._link_name(number)}.{table.name}", points)
            for stage in self._timed_stages(number, table):
                # where it was timed a tree took as long as a ring: it is one table of what the backend chose
                share = TREE_SHARE if stage.kind == "double_tree" else 1.0
                tables[stage.kind] = (Curve(timed.bytes_K / share, timed.seconds_DK), stage.steps)
        gbit_D = torch.tensor([level.member_gbit], dtype=torch.float64)
        return Link(level, self._link_spread(number, level), tables, gbit_D)

    def _link_name(self, number: int) -> str:
        """Of its draws: common to all wires of a cluster, and of no use to another cluster, whose links are others."""
        return f"level{number} of {self.cluster.name}"

    def _link_spread(self, number: int, level: Level) -> Tensor:
        """What its file says, and no less than links were off elsewhere; more where the probe was disturbed."""
        wide = math.hypot(max(level.spread, self.known.link), self.cluster.unrest)
        if not self.known.link:
            return self.spread(self._link_name(number), wide)
        return self.spread(self._link_name(number), wide, self.known.freedom).clamp_min(QUICKEST)

    def _timed_at(self, number: int, ranks: int) -> Placement:
        """Where the members of a level were when its tables were timed: one of each node, or all of one node."""
        within = len(self.cluster.levels) > 1 and number == 0
        return Placement(ranks, (ranks, 1) if within else (), nccl=is_nccl(self.cluster))

    def _timed_stages(self, number: int, table: CollectiveTimings) -> tuple[Stage, ...]:
        """What happened in the timings of a table: their latencies are in it already."""
        place = self._timed_at(number, table.ranks)
        if table.name == "all_reduce":
            made = ALGORITHMS["native"].cost(place)
            return *made.stages, *made.otherwise
        if table.name == "two_shot":
            return ALGORITHMS["two_shot"].cost(place).stages
        return (Stage(number, table.name, volume(table.name, table.ranks), steps(table.name, table.ranks)),)

    def plan(self, algorithm: str, world: int) -> Cost:
        """What an algorithm does on `world` ranks here."""
        if (algorithm, world) not in self._plans:
            self._plans[algorithm, world] = plan(algorithm, self.cluster, world)
        return self._plans[algorithm, world]

    def wire_seconds(self, cost: Cost, wire: str, values_N: Tensor) -> Tensor:
        """Seconds of all stages, [D, N]."""
        key = ("wire", cost, wire, tuple(values_N.tolist()))
        if key not in self._cache:
            total = self._in_a_row(cost.stages, wire, values_N)
            if cost.otherwise:
                total = total.minimum(self._in_a_row(cost.otherwise, wire, values_N))
            self._cache[key] = total
        return self._cache[key]

    def _in_a_row(self, stages: Sequence[Stage], wire: str, values_N: Tensor) -> Tensor:
        total = torch.zeros(self.draws + 1, len(values_N), dtype=torch.float64)
        for stage in stages:
            total = total + self._stage_seconds(stage, _sizes("fp32" if stage.as_is else wire, values_N))
        return total

    def _stage_seconds(self, stage: Stage, size_N: Tensor) -> Tensor:
        """What a member of each level sends, whichever takes longest: it moves at the same time."""
        link = self.levels[stage.level]
        moving = link.moving(stage.kind, size_N * stage.sent)
        for inner, sent in zip(self.levels, stage.inner, strict=False):
            moving = moving.maximum(inner.moving(stage.kind, size_N * sent))
        return moving + link.latency(stage.steps)

    def codec_seconds(self, cost: Cost, wire: str, values_N: Tensor) -> Tensor:
        """Seconds that a rank encodes and decodes, [D, N]."""
        if cost.encodes == 0 and wire not in ("bf16", "fp16"):
            return torch.zeros(self.draws + 1, len(values_N), dtype=torch.float64)
        key = ("codec", cost, wire, tuple(values_N.tolist()))
        if key not in self._cache:
            encode, decode, slower = self.codec(wire)
            part = values_N * cost.codec_share
            passes = (cost.encodes, cost.decodes) if cost.encodes else (1.0, 1.0)
            total = encode(part) * passes[0] + decode(part) * passes[1]
            self._cache[key] = total * slower * self.device_D[:, None]
        return self._cache[key]

    def codec(self, wire: str) -> tuple[Curve, Curve, float]:
        """Encode and decode times by values, and how much slower they are beside a collective."""
        if wire not in self._codecs:
            speed = speeds.timed_like(wire, self.cluster)
            timed = self._from_memory(wire) if speed is None else self.timed(speed)
            self._codecs[wire] = self._with_feedback(wire, *timed)
        return self._codecs[wire]

    def timed(self, speed: CodecSpeed) -> tuple[Curve, Curve, float]:
        """As `codec`, of what was measured."""
        encode, decode = (self._curve(f"{speed.wire}.{way}", getattr(speed, way)) for way in ("encode", "decode"))
        return encode, decode, speed.busy

    def _with_feedback(self, wire: str, encode: Curve, decode: Curve, busy: float) -> tuple[Curve, Curve, float]:
        """Error feedback decodes what it sent, and reads and writes the residual: 12 bytes a value more."""
        if not codec_named(wire).feedback:
            return encode, decode, busy
        speed = self.cluster.device.memory_gbyte
        passes = 12 * encode.bytes_K / (speed * 1e9) if speed else torch.zeros_like(encode.bytes_K)
        longer = encode.seconds_DK + decode(encode.bytes_K) + passes
        return Curve(encode.bytes_K, longer), decode, busy

    def _from_memory(self, wire: str) -> tuple[Curve, Curve, float]:
        """Nobody measured: a codec reads and writes at its share of the speed of memory, after a launch."""
        device = self.cluster.device
        if device.memory_gbyte <= 0:
            problem = f"neither [[codec]] nor device.memory_gbyte says how fast {wire} is"
            raise ValueError(f"cluster {self.cluster.name}: {problem}")
        knots = torch.tensor([2.0**k for k in range(10, 31, 2)], dtype=torch.float64)
        copied = knots * (4 + speeds.bits_of(wire) / 8) / (device.memory_gbyte * 1e9)
        encode, decode = (
            Curve(knots, (device.launch_us / 1e6 + copied / share).expand(self.draws + 1, -1))
            for share in speeds.share_of(wire, self.cluster)
        )
        return encode, decode, 1.0

    def seconds(self, algorithm: str, wire: str, values_N: Tensor, world: int) -> tuple[Tensor, Tensor]:
        """The duration of each call, and the codec's part in it, [D, N] each; one call after the other."""
        cost = self.plan(algorithm, world)
        composed, code = self._composed(cost, wire, values_N, world)
        return torch.maximum(composed + self._excess(cost, wire, values_N), 0.3 * composed), code

    def inner_seconds(self, algorithm: str, wire: str, values_N: Tensor, world: int) -> Tensor:
        """The part of each call inside nodes, for calls that also leave them, [D, N]."""
        cost = self.plan(algorithm, world)
        inner = tuple(stage for stage in cost.stages if stage.level == 0)
        return self.wire_seconds(replace(cost, stages=inner if len(inner) < len(cost.stages) else ()), wire, values_N)

    def _composed(self, cost: Cost, wire: str, values_N: Tensor, world: int) -> tuple[Tensor, Tensor]:
        """From the link and the codec: in chunks one hides under the other."""
        travel, code = self.wire_seconds(cost, wire, values_N), self.codec_seconds(cost, wire, values_N)
        chunks = torch.ones_like(values_N)
        if cost.chunked:
            chunks = (_sizes(wire, values_N) / world // CHUNK_BYTES).clamp(1, MAX_CHUNKS)
        return torch.maximum(travel, code) + torch.minimum(travel, code) / chunks, code

    def _excess(self, cost: Cost, wire: str, values_N: Tensor) -> Tensor:
        """Seconds by which whole calls with this wire took longer than their parts, where `probe` timed both, [D, N].

        It is work of the processor (buffers, threads, sums), so it depends neither on the link nor on the ranks.
        """
        stage = cost.stages[-1]
        tables = [t for t in self.cluster.levels[stage.level].tables if t.name == stage.kind]
        # options such as +ef and +sr change the codec's time, not what happens around it
        timed = [t for t in tables if t.wire == wire] or [t for t in tables if t.wire == without_wishes(wire)]
        if wire == "fp32" or not cost.encodes or len(cost.stages) > 1 or not timed:
            return torch.zeros(1, 1, dtype=torch.float64)
        key = ("excess", timed[0], tuple(values_N.tolist()))
        if key not in self._cache:
            self._cache[key] = self._as_measured._excess_of(timed[0], stage, values_N)
        return self._cache[key]

    def _excess_of(self, table: CollectiveTimings, stage: Stage, values_N: Tensor) -> Tensor:
        call = ALGORITHMS["two_shot"].cost(self._timed_at(stage.level, table.ranks))
        there = replace(call, stages=(replace(call.stages[0], level=stage.level, kind=stage.kind),))
        # beyond the sizes that were timed it grows in proportion
        timed_N = values_N.clamp(table.points[0][0] / 4, table.points[-1][0] / 4)
        parts, _ = self._composed(there, table.wire, timed_N, table.ranks)
        whole = self._curve(f"{self._link_name(stage.level)}.{table.name}.{table.wire}", table.points)(4 * timed_N)
        return (whole - parts) * (values_N / timed_N).clamp_min(1.0)

    @cached_property
    def _as_measured(self) -> Costs:
        """These costs at the bandwidth at which the tables were timed."""
        timed = self.cluster.as_timed()
        if not self.fixed and timed == self.cluster:
            return self
        return Costs(timed, 0 if self.fixed else self.draws, self._seed)


def _sizes(wire: str, values_N: Tensor) -> Tensor:
    return torch.tensor(wire_sizes(wire, tuple(map(int, values_N.tolist()))), dtype=torch.float64)
