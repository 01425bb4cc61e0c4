"""What a collective costs on a cluster: bytes, steps, encodings and seconds, algorithm by algorithm.

Shapes: D versions of the measurements (see curve.py), N sizes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import ALGORITHMS, CHUNK_BYTES, MAX_CHUNKS, Cost, Placement, Stage, direct_steps
from narrowcast.predict import curve
from narrowcast.predict.cluster import Cluster, CodecSpeed, CollectiveTimings, Level
from narrowcast.predict.curve import Curve, Link
from narrowcast.predict.model import wire_bytes


def volume(kind: str, ranks: int) -> float:
    """Bytes that a member sends for each byte of the tensor; nccl-tests' bus-bandwidth factors."""
    share = (ranks - 1) / ranks
    return {
        "all_reduce": 2 * share,
        "two_shot": 2 * share,
        "reduce_scatter": share,
        "all_gather": share,
        "all_to_all": share,
        "broadcast": 1.0,
        "send": 1.0,
        "one_shot": float(ranks - 1),
    }[kind]


def steps(kind: str, ranks: int) -> float:
    """Latencies in a row."""
    return {
        "all_reduce": 2.0 * (ranks - 1),
        "two_shot": 2.0 * direct_steps(ranks),
        "reduce_scatter": float(ranks - 1),
        "all_gather": float(ranks - 1),
        "all_to_all": direct_steps(ranks),
        "broadcast": 1.0,
        "send": 1.0,
    }[kind]


def placement(cluster: Cluster, inside: int, nodes: int, world: int) -> Placement:
    """So many ranks on each of so many nodes."""
    inner, outer = cluster.levels[0].latency_us, cluster.levels[-1].latency_us
    return Placement(
        world,
        inside,
        nodes,
        level=0 if nodes == 1 else len(cluster.levels) - 1,
        inner_latency=inner / outer if outer else 1.0,
        backend_has_trees=not cluster.device.name.startswith("cpu"),
    )


def plan(algorithm: str, cluster: Cluster, world: int) -> Cost:
    """What an algorithm does on `world` ranks of a cluster, node by node in rank order."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: unknown {algorithm!r}; take auto, {', '.join(ALGORITHMS)}")
    if ALGORITHMS[algorithm].takes_nodes and len(cluster.levels) == 1:
        raise ValueError(f"algorithm: {algorithm} needs two levels, cluster {cluster.name} has one; take two_shot")
    return ALGORITHMS[algorithm].cost(placement(cluster, *cluster.shape(world), world))


def ring_stage(kind: str, cluster: Cluster, world: int) -> Stage:
    """One collective by itself, from rank to rank: every link on the way carries the same bytes."""
    sent = volume(kind, world)
    return Stage(cluster.level_of(world), kind, sent, steps(kind, world), own=sent)


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
        draws: int = curve.DRAWS,
        seed: int = 0,
        bandwidths: Tensor | None = None,
        level: int = -1,
    ) -> None:
        """bandwidths: instead of versions of the measurements, versions of the link `level`, in Gb/s."""
        self.cluster, self._seed = cluster, seed
        self.draws = draws if bandwidths is None else len(bandwidths) - 1
        self.fixed = bandwidths is not None
        self.levels = [self._level(n, level) for n, level in enumerate(cluster.levels)]
        if bandwidths is not None:
            self.levels[level].gbit_D = bandwidths
        device = cluster.device
        self.device_D = self._spread("device", device.spread)
        self._codecs: dict[str, tuple[Curve, Curve, float]] = {}
        self._cache: dict[tuple[object, ...], Tensor] = {}

    def generator(self, name: str) -> torch.Generator:
        """The same for the same name, whatever else is drawn."""
        number = sum(ord(letter) * 257**place % 2**31 for place, letter in enumerate(name))
        return torch.Generator().manual_seed(self._seed + number % 2**31)

    def _spread(self, name: str, spread: float) -> Tensor:
        return curve.spread_factor(0.0 if self.fixed else spread, self.draws, self.generator(name))

    def _curve(self, name: str, points: tuple[tuple[float, ...], ...]) -> Curve:
        if self.fixed:
            made = curve.measured_curve(points, 0, self.generator(name))
            return Curve(made.bytes_K, made.seconds_DK.expand(self.draws + 1, -1))
        return curve.measured_curve(points, self.draws, self.generator(name))

    def _level(self, number: int, level: Level) -> Link:
        tables = {}
        for table in level.tables:
            if table.wire != "fp32":
                continue
            factor = volume(table.name, table.ranks)
            points = tuple((row[0] * factor, *row[1:]) for row in table.points)
            timed = self._curve(f"level{number}.{table.name}", points)
            tables[table.name] = (timed, self._known_steps(number, table))
        gbit_D = torch.tensor([level.bandwidth_gbit], dtype=torch.float64)
        return Link(level, self._spread(f"level{number}", level.spread), tables, gbit_D)

    def _known_steps(self, number: int, table: CollectiveTimings) -> float:
        """The latencies that are in a table already."""
        if table.name != "all_reduce":
            return steps(table.name, table.ranks)
        within = len(self.cluster.levels) > 1 and number == 0
        shape = (table.ranks, 1) if within else (1, table.ranks)
        return placement(self.cluster, *shape, table.ranks).backend_steps

    def wire_seconds(self, cost: Cost, wire: str, values_N: Tensor) -> Tensor:
        """Seconds of all stages, [D, N]."""
        key = ("wire", cost, wire, tuple(values_N.tolist()))
        if key not in self._cache:
            total = torch.zeros(self.draws + 1, len(values_N), dtype=torch.float64)
            sizes = {name: _sizes(name, values_N) for name in (wire, "fp32")}
            for stage in cost.stages:
                total = total + self._stage_seconds(stage, sizes["fp32" if stage.as_is else wire])
            self._cache[key] = total
        return self._cache[key]

    def _stage_seconds(self, stage: Stage, size_N: Tensor) -> Tensor:
        """The node's bytes between nodes or a member's inside, whichever takes longer: they move at the same time."""
        link = self.levels[stage.level]
        moving = link.moving(stage.kind, size_N * stage.sent)
        if stage.level and stage.own is not None:
            moving = moving.maximum(self.levels[0].moving(stage.kind, size_N * stage.own))
        return moving + link.latency(stage.steps)

    def codec_seconds(self, cost: Cost, wire: str, values_N: Tensor, busy: bool = True) -> Tensor:
        """Seconds that a rank encodes and decodes, [D, N]."""
        if cost.encodes == 0 and not _casts(wire):
            return torch.zeros(self.draws + 1, len(values_N), dtype=torch.float64)
        key = ("codec", cost, wire, tuple(values_N.tolist()), busy)
        if key not in self._cache:
            encode, decode, slower = self.codec(wire)
            part = values_N * cost.codec_share
            passes = (cost.encodes, cost.decodes) if cost.encodes else (1.0, 1.0)
            total = encode(part) * passes[0] + decode(part) * passes[1]
            self._cache[key] = total * (slower if busy else 1.0) * self.device_D[:, None]
        return self._cache[key]

    def codec(self, wire: str) -> tuple[Curve, Curve, float]:
        """Encode and decode times by values, and how much slower they are beside a collective."""
        if wire not in self._codecs:
            self._codecs[wire] = self._codec(wire)
        return self._codecs[wire]

    def _codec(self, wire: str) -> tuple[Curve, Curve, float]:
        speeds = {speed.wire: speed for speed in self.cluster.codecs}
        if not speeds:
            return self._with_feedback(wire, *self._from_memory(wire))
        if wire in speeds:
            return self._with_feedback(wire, *self._timed(speeds[wire]))
        # a wire that was not measured runs like the measured one with the nearest number of bits
        plain = [speed for name, speed in speeds.items() if not codec_named(name).feedback and name != "fp32"]
        near = min(plain or speeds.values(), key=lambda speed: abs(_bits(speed.wire) - _bits(wire)))
        return self._with_feedback(wire, *self._timed(near))

    def _timed(self, speed: CodecSpeed) -> tuple[Curve, Curve, float]:
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
        """Nobody measured: a codec reads and writes at the speed of memory, after a launch."""
        device = self.cluster.device
        if device.memory_gbyte <= 0:
            raise ValueError(
                f"cluster {self.cluster.name}: neither [[codec]] nor device.memory_gbyte says how fast {wire} is"
            )
        values = torch.tensor([1.0, 2.0**30], dtype=torch.float64)
        seconds = device.launch_us / 1e6 + values * (4 + _bits(wire) / 8) / (device.memory_gbyte * 1e9)
        knots = torch.tensor([2.0**k for k in range(10, 31, 2)], dtype=torch.float64)
        times = device.launch_us / 1e6 + knots * (seconds[1] - seconds[0]) / (values[1] - values[0])
        both = Curve(knots, times.expand(self.draws + 1, -1))
        return both, both, 1.0

    def seconds(self, algorithm: str, wire: str, values_N: Tensor, world: int) -> tuple[Tensor, Tensor]:
        """The duration of each call, and the codec's part in it, [D, N] each; one call after the other."""
        cost = plan(algorithm, self.cluster, world)
        composed, code = self._composed(cost, wire, values_N, world)
        return torch.maximum(composed + self._excess(cost, wire, values_N), 0.3 * composed), code

    def inner_seconds(self, algorithm: str, wire: str, values_N: Tensor, world: int) -> Tensor:
        """The part of each call inside nodes, for calls that also leave them, [D, N]."""
        cost = plan(algorithm, self.cluster, world)
        inner = tuple(stage for stage in cost.stages if stage.level == 0)
        return self.wire_seconds(replace(cost, stages=inner if len(inner) < len(cost.stages) else ()), wire, values_N)

    def _composed(self, cost: Cost, wire: str, values_N: Tensor, world: int) -> tuple[Tensor, Tensor]:
        """From the link and the codec: in chunks one hides under the other."""
        travel, code = self.wire_seconds(cost, wire, values_N), self.codec_seconds(cost, wire, values_N)
        chunks = _chunks(wire, values_N, world) if cost.chunked else torch.ones_like(values_N)
        return torch.maximum(travel, code) + torch.minimum(travel, code) / chunks, code

    def _excess(self, cost: Cost, wire: str, values_N: Tensor) -> Tensor:
        """Seconds by which whole calls with this wire took longer than their parts, where `probe` timed both, [D, N].

        It is work of the processor (buffers, threads, sums), so it depends neither on the link nor on the ranks.
        """
        stage = cost.stages[-1]
        tables = [t for t in self.cluster.levels[stage.level].tables if t.name == stage.kind]
        # +ef and +sr change the codec's time, not what happens around it
        timed = [t for t in tables if t.wire == wire] or [t for t in tables if t.wire == wire.partition("+")[0]]
        if wire == "fp32" or not cost.encodes or len(cost.stages) > 1 or not timed:
            return torch.zeros(1, 1, dtype=torch.float64)
        key = ("excess", timed[0], tuple(values_N.tolist()))
        if key not in self._cache:
            self._cache[key] = self._as_measured._excess_of(timed[0], stage, values_N)
        return self._cache[key]

    def _excess_of(self, table: CollectiveTimings, stage: Stage, values_N: Tensor) -> Tensor:
        sent, rounds = volume("two_shot", table.ranks), steps("two_shot", table.ranks)
        call = ALGORITHMS["two_shot"].cost(Placement(table.ranks, 1, table.ranks))
        there = replace(call, stages=(replace(stage, sent=sent, steps=rounds, own=None),))
        # beyond the sizes that were timed it grows in proportion
        timed_N = values_N.clamp(table.points[0][0] / 4, table.points[-1][0] / 4)
        parts, _ = self._composed(there, table.wire, timed_N, table.ranks)
        whole = self._curve(f"level{stage.level}.{table.name}.{table.wire}", table.points)(4 * timed_N)
        return (whole - parts) * (values_N / timed_N).clamp_min(1.0)

    @cached_property
    def _as_measured(self) -> Costs:
        """These costs at the bandwidth at which the tables were timed."""
        timed = self.cluster.as_timed()
        if not self.fixed and timed == self.cluster:
            return self
        return Costs(timed, 0 if self.fixed else self.draws, self._seed)


def _sizes(wire: str, values_N: Tensor) -> Tensor:
    return torch.tensor([wire_bytes(wire, int(n)) for n in values_N.tolist()], dtype=torch.float64)


def _bits(wire: str) -> float:
    return codec_named(wire).bits_per_value if wire != "as-is" else 32.0


def _casts(wire: str) -> bool:
    return wire in ("bf16", "fp16")


def _chunks(wire: str, values_N: Tensor, world: int) -> Tensor:
    """In how many pieces two_shot overlaps codec and wire."""
    return (_sizes(wire, values_N) / world // CHUNK_BYTES).clamp(1, MAX_CHUNKS)
