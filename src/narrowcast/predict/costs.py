"""What a collective costs on a cluster: bytes, steps, encodings and seconds, algorithm by algorithm.

Seconds exist in several versions (draws), as curves do. Shapes: D draws, N sizes.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from narrowcast.collectives import ALGORITHMS, CHUNK_BYTES, MAX_CHUNKS, TREE_SHARE, Cost, Placement, Stage, direct_steps
from narrowcast.predict import speeds, spreads
from narrowcast.predict.cluster import Cluster, CodecSpeed, CollectiveTimings, Level, without_wishes
from narrowcast.predict.curves import Curve, Link, Timed, in_a_row, measured_curve
from narrowcast.predict.model import wire_sizes
from narrowcast.predict.spreads import Spreads

DRAWS = 40
"""Versions of every measurement beside the means: enough for a 5 to 95 % interval."""
QUICKEST = 0.9
"""Of the time that a preset states: it has nearly what its line carries, so other clusters are slower, not quicker."""
NVLINK_GBIT = 500.0
"""Inside a node: above what any PCIe reaches, and below every NVLink."""


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
    return Placement(world, sizes, relative, is_nccl(cluster), cluster.levels[0].bandwidth_gbit >= NVLINK_GBIT)


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
        self.cluster, self._seed, self._unrest = cluster, seed, cluster.unrest
        self._cache: dict[tuple[object, ...], Tensor] = {}
        self.known = (known or spreads.shipped())[spreads.kind_of(cluster)]
        self.draws = draws if bandwidths is None else len(bandwidths) - 1
        self.fixed = bandwidths is not None
        self.levels = [self._level(n, level) for n, level in enumerate(cluster.levels)]
        if bandwidths is not None:
            self.levels[level].gbit_D = bandwidths / cluster.levels[level].oversubscription
        self.device_D = self.spread("device", math.hypot(cluster.device.spread, self._unrest))
        self._codecs: dict[str, tuple[Curve, Curve, float]] = {}
        self._plans: dict[tuple[str, int], Cost] = {}

    def generator(self, name: str) -> torch.Generator:
        """The same for the same name, whatever else is drawn."""
        number = sum(ord(letter) * 257**place % 2**31 for place, letter in enumerate(name))
        return torch.Generator().manual_seed(self._seed + number % 2**31)

    def spread(self, name: str, spread: float, freedom: float = math.inf) -> Tensor:
        key = ("spread", name, spread, freedom)
        if key not in self._cache:
            made = factors(0.0 if self.fixed else spread, self.draws, self.generator(name), freedom)
            self._cache[key] = made
        return self._cache[key]

    def _curve(self, name: str, points: tuple[tuple[float, ...], ...]) -> Curve:
        made = measured_curve(points, 0 if self.fixed else self.draws, self.generator(name))
        return Curve(made.bytes_K, made.seconds_DK.expand(self.draws + 1, -1))

    def _level(self, number: int, level: Level) -> Link:
        tables: dict[str, list[Timed]] = {}
        for table in sorted(level.tables, key=lambda table: table.ranks):
            if table.wire != "fp32":
                continue
            factor = volume(table.name, table.ranks)
            points = tuple((row[0] * factor, *row[1:]) for row in table.points)
            timed = self._curve(f"{self._link_name(number)}.{table.name}", points)
            for stage in self._timed_stages(number, table):
                # where it was timed a tree took as long as a ring: it is one table of what the backend chose
                share = TREE_SHARE if stage.kind == "double_tree" else 1.0
                scaled = Curve(timed.bytes_K / share, timed.seconds_DK)
                tables.setdefault(stage.kind, []).append(Timed(stage.steps, scaled))
        gbit_D = torch.tensor([level.member_gbit], dtype=torch.float64)
        return Link(level, self._link_spread(number, level), tables, gbit_D)

    def _link_name(self, number: int) -> str:
        """Of its draws: common to all wires of a cluster, and of no use to another cluster, whose links are others."""
        return f"level{number} of {self.cluster.name}"

    def _link_spread(self, number: int, level: Level) -> Tensor:
        """What its file says, and no less than links were off elsewhere; more where the probe was disturbed."""
        wide = math.hypot(max(level.spread, self.known.link), self._unrest)
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

    def at(self, bandwidths: Tensor, level: int) -> Costs:
        """These costs where a link has each of some bandwidths in Gb/s, instead of versions of the measurements."""
        made = Costs(self.cluster, bandwidths=bandwidths, level=level)
        made._plans = self._plans  # of links they know the latencies alone
        return made

    def with_bandwidths(self, gbit_D: Tensor) -> Costs:
        """The same versions, in each of them another bandwidth of the outermost link."""
        made = copy.copy(self)
        made._cache = {key: kept for key, kept in self._cache.items() if key[0] != "wire"}
        made.levels = [*self.levels[:-1], replace(self.levels[-1], gbit_D=gbit_D)]
        return made

    def plan(self, algorithm: str, world: int) -> Cost:
        """What an algorithm does on `world` ranks here."""
        if (algorithm, world) not in self._plans:
            self._plans[algorithm, world] = plan(algorithm, self.cluster, world)
        return self._plans[algorithm, world]

    def wire_seconds(self, cost: Cost, wire: str, values_N: Tensor) -> Tensor:
        """Seconds of all stages, [D, N]."""
        key = ("wire", cost, wire, tuple(values_N.tolist()))
        if key not in self._cache:
            sizes = _sizes(wire, values_N), 4 * values_N.trunc()
            total = in_a_row(self.levels, cost.stages, *sizes)
            if cost.otherwise:
                total = total.minimum(in_a_row(self.levels, cost.otherwise, *sizes))
            self._cache[key] = total.expand(self.draws + 1, -1)
        return self._cache[key]

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
            known = speeds.speed_of(wire, self.cluster)
            made = self._from_memory(known) if known.timed is None else self.timed(known.timed)
            self._codecs[wire] = self._with_feedback(*made) if known.feedback else made
        return self._codecs[wire]

    def timed(self, speed: CodecSpeed) -> tuple[Curve, Curve, float]:
        """As `codec`, of what was measured."""
        encode, decode = (self._curve(f"{speed.wire}.{way}", getattr(speed, way)) for way in ("encode", "decode"))
        return encode, decode, speed.busy

    def _with_feedback(self, encode: Curve, decode: Curve, busy: float) -> tuple[Curve, Curve, float]:
        """Error feedback decodes what it sent, and reads and writes the residual: 12 bytes a value more."""
        speed = self.cluster.device.memory_gbyte
        passes = 12 * encode.bytes_K / (speed * 1e9) if speed else torch.zeros_like(encode.bytes_K)
        longer = encode.seconds_DK + decode(encode.bytes_K) + passes
        return Curve(encode.bytes_K, longer), decode, busy

    def _from_memory(self, known: speeds.WireSpeed) -> tuple[Curve, Curve, float]:
        """Nobody measured: a codec reads and writes at its share of the speed of memory, after a launch."""
        device = self.cluster.device
        knots = torch.tensor([2.0**k for k in range(10, 31, 2)], dtype=torch.float64)
        copied = knots * (4 + known.bits / 8) / (device.memory_gbyte * 1e9)
        encode, decode = (
            Curve(knots, (device.launch_us / 1e6 + copied / share).expand(self.draws + 1, -1)) for share in known.share
        )
        return encode, decode, 1.0

    def seconds(self, algorithm: str, wire: str, values_N: Tensor, world: int) -> tuple[Tensor, Tensor]:
        """The duration of each call, and the codec's part in it, [D, N] each; one call after the other."""
        return self.seconds_of(self.plan(algorithm, world), wire, values_N, world)

    def seconds_of(self, cost: Cost, wire: str, values_N: Tensor, world: int) -> tuple[Tensor, Tensor]:
        """The same of what costs so much."""
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


def t_quantile(share_N: Tensor, freedom: float) -> Tensor:
    """Of Student's t-distribution, by its expansion around the normal one (Fisher, Cornish); for three degrees
    of freedom 0.3 % off at 95 % and 1.6 % at 98.75 %."""
    z = torch.special.ndtri(share_N)
    if math.isinf(freedom):
        return z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def factors(spread: float, draws: int, generator: torch.Generator, freedom: float = math.inf) -> Tensor:
    """1, then e to the power of so many quantiles of a t-distribution with this spread, in a random order, [D + 1].

    Evenly spaced quantiles and not random draws: the 5 and 95 % of a few dozen are those of the distribution.
    """
    one = torch.ones(1, dtype=torch.float64)
    if draws == 0 or spread == 0.0:
        return one.expand(draws + 1)
    shares = torch.linspace(0, 1, draws, dtype=torch.float64).clamp(0.5 / draws, 1 - 0.5 / draws)
    noise = t_quantile(shares, freedom)[torch.randperm(draws, generator=generator)]
    return torch.cat([one, torch.exp(spread * noise)])


def _sizes(wire: str, values_N: Tensor) -> Tensor:
    return torch.tensor(wire_sizes(wire, tuple(map(int, values_N.tolist()))), dtype=torch.float64)
