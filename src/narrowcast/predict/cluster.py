"""What a cluster is to the predictor: its links, its device and its codecs, in a file that people can read and edit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from narrowcast.codecs import codec as codec_named
from narrowcast.toml_file import Document, FileError, brief, parse_toml, read_text, toml_lines

FORMAT = 1
COLLECTIVES = ("all_reduce", "two_shot", "all_gather", "reduce_scatter", "send")
PRESETS = Path(__file__).with_name("data") / "clusters"
SMALLEST, LARGEST, WIDEST = 1e-15, 1e18, 10.0
"""Of sizes, seconds and speeds: further out products of a few of them are no numbers any more. And of spreads."""

Points = tuple[tuple[float, ...], ...]
"""[size, seconds, seconds, ...]: each timing of each size."""


@dataclass(frozen=True)
class CollectiveTimings:
    """Timings of one collective over `ranks` members, by the bytes of the float32 tensor."""

    name: str
    ranks: int
    points: Points
    wire: str = "fp32"


@dataclass(frozen=True)
class Level:
    """One kind of link: what joins the devices of a node, or the nodes."""

    name: str
    ranks: int
    """How many members it joins at most; 0: any number."""
    bandwidth_gbit: float
    """Gb/s each way for each member, as collectives reach it."""
    latency_us: float
    spread: float = 0.0
    """Relative standard deviation of what was not measured."""
    tables: tuple[CollectiveTimings, ...] = ()
    timed_gbit: float = 0.0
    """The bandwidth at which the tables were timed; 0: `bandwidth_gbit`. Where the two differ, tables are scaled."""

    @property
    def measured_gbit(self) -> float:
        return self.timed_gbit or self.bandwidth_gbit


@dataclass(frozen=True)
class CodecSpeed:
    """Timings by the number of values."""

    wire: str
    encode: Points
    decode: Points
    busy: float = 1.0
    """How many times slower while a collective runs."""
    compute: float = 0.0
    """How many times slower compute is beside calls with this wire; 0: as [overlap] says."""
    collective: float = 0.0
    """How many times slower calls with this wire are beside compute; 0: as [overlap] says."""


@dataclass(frozen=True)
class Device:
    """What computes."""

    name: str = "unknown"
    flops: float = 0.0
    """Floating-point operations a second as training reaches them; for model descriptions only."""
    memory_gbyte: float = 0.0
    """Bytes read and written a second by a large copy, in GB/s."""
    launch_us: float = 10.0
    codec_stream: str = "side"
    """Where codecs run: "side" (beside the backward pass) or "compute" (they hold it up)."""
    spread: float = 0.0


@dataclass(frozen=True)
class Overlap:
    """What runs at the same time slows each other down."""

    compute: float = 1.0
    """How many times slower compute is while a collective runs."""
    collective: float = 1.0
    """How many times slower a collective is while the device computes."""
    together: float = 1.0
    """How many times slower a rank computes while all the others do: they may share processors."""


@dataclass(frozen=True)
class Cluster:
    """Everything that a prediction needs to know about machines. Levels go from the inside out."""

    name: str
    levels: tuple[Level, ...]
    device: Device = field(default_factory=Device)
    overlap: Overlap = field(default_factory=Overlap)
    codecs: tuple[CodecSpeed, ...] = ()
    measured: bool = False
    source: str = ""
    price_per_hour: float = 0.0
    """Dollars for a node."""

    @property
    def node(self) -> int:
        """Devices of a node."""
        return self.levels[0].ranks if len(self.levels) > 1 else 1

    def shape(self, world: int) -> tuple[int, int]:
        """Ranks of a node, and nodes."""
        most = math.prod(level.ranks for level in self.levels)
        if most and world > most:
            raise ValueError(
                f"cluster {self.name}: joins at most {most}, got {world} workers; take fewer or edit `ranks`"
            )
        inside = min(self.node, world)
        return inside, math.ceil(world / inside)

    def level_of(self, world: int) -> int:
        """The outermost link that so many workers use."""
        return 0 if self.shape(world)[1] == 1 else len(self.levels) - 1

    def slowdowns(self, wire: str) -> Overlap:
        """What compute and calls with this wire do to one another."""
        by_wire = {speed.wire: speed for speed in self.codecs}
        own = by_wire.get(wire) or by_wire.get(wire.partition("+")[0])
        if wire == "fp32" or own is None or not own.compute:
            return self.overlap
        return replace(self.overlap, compute=own.compute, collective=own.collective or self.overlap.collective)

    def with_bandwidth(self, gbit: float) -> Cluster:
        """The same with another outermost link, which nobody measured: what was timed on it is scaled."""
        outer = self.levels[-1]
        outer = replace(outer, bandwidth_gbit=gbit, timed_gbit=outer.measured_gbit if outer.tables else 0.0)
        levels = (*self.levels[:-1], outer)
        return replace(self, name=f"{self.name} at {gbit:g} Gb/s", levels=levels, measured=False)

    def as_timed(self) -> Cluster:
        """The same at the bandwidths at which its tables were timed."""
        return replace(self, levels=tuple(replace(one, bandwidth_gbit=one.measured_gbit) for one in self.levels))


def presets() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load(name: str | Path) -> Cluster:
    """A cluster from a file, or a preset by its name."""
    path = Path(name)
    if not path.exists() and (PRESETS / f"{name}.toml").exists():
        path = PRESETS / f"{name}.toml"
    if not path.is_file():
        raise FileError(f"cluster: {name} is no file and no preset; there are {', '.join(presets())}")
    return parse(read_text(path, name), str(name))


def parse(text: str, name: str = "cluster.toml") -> Cluster:
    return ClusterReader(parse_toml(text, name)).cluster()


class ClusterReader:
    """Takes a document apart; whatever is missing, unknown or out of range fails with its line."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def cluster(self) -> Cluster:
        values = self.document.values
        self.known(
            values,
            "",
            ("format", "name", "measured", "source", "price_per_hour", "device", "overlap", "level", "codec"),
        )
        if values.get("format") != FORMAT:
            self.document.fail("format", f"this version reads format = {FORMAT}, got {values.get('format')}")
        levels = self.tables(values, "level")
        if not levels:
            self.document.fail("level", "a cluster needs at least one [[level]]")
        if len(levels) > 2:
            self.document.fail("level.2", "take one or two [[level]]: inside a node, and between nodes")
        made = tuple(self.level(table, path) for table, path in levels)
        if len(made) == 2 and not made[0].ranks:
            self.document.fail("level.0.ranks", "must be the devices of a node, 1 or more, where there are two levels")
        return Cluster(
            name=self.text(values, "", "name", "cluster"),
            levels=made,
            device=self.device(self.table(values, "device")),
            overlap=self.overlap(self.table(values, "overlap")),
            codecs=tuple(self.codec(table, path) for table, path in self.tables(values, "codec")),
            # an edited bandwidth is what somebody thinks
            measured=self.truth(values, "measured") and all(one.measured_gbit == one.bandwidth_gbit for one in made),
            source=self.text(values, "", "source", ""),
            price_per_hour=self.number(values, "", "price_per_hour", 0.0, low=0.0),
        )

    def level(self, table: dict[str, Any], path: str) -> Level:
        self.known(table, path, ("name", "ranks", "bandwidth_gbit", "latency_us", "spread", "timed_gbit", "collective"))
        return Level(
            name=self.text(table, path, "name", path),
            ranks=int(self.number(table, path, "ranks", 0, low=0)),
            bandwidth_gbit=self.number(table, path, "bandwidth_gbit", None, above=0.0),
            latency_us=self.number(table, path, "latency_us", None, low=0.0),
            spread=self.number(table, path, "spread", 0.0, low=0.0, most=WIDEST),
            tables=tuple(self.collective(t, p) for t, p in self.tables(table, f"{path}.collective")),
            timed_gbit=self.number(table, path, "timed_gbit", 0.0, low=0.0),
        )

    def collective(self, table: dict[str, Any], path: str) -> CollectiveTimings:
        self.known(table, path, ("name", "ranks", "wire", "points"))
        name = self.text(table, path, "name", None)
        if name not in COLLECTIVES:
            self.document.fail(f"{path}.name", f"unknown collective {name!r}; take {', '.join(COLLECTIVES)}")
        ranks = int(self.number(table, path, "ranks", None, low=2))
        return CollectiveTimings(name, ranks, self.points(table, path, "points"), self.wire(table, path, "fp32"))

    def wire(self, table: dict[str, Any], path: str, default: str | None) -> str:
        wire = self.text(table, path, "wire", default)
        try:
            codec_named(wire)
        except ValueError as error:
            self.document.fail(f"{path}.wire", str(error))
        return wire

    def codec(self, table: dict[str, Any], path: str) -> CodecSpeed:
        self.known(table, path, ("wire", "encode", "decode", "busy", "compute", "collective"))
        wire = self.wire(table, path, None)
        encode, decode = (self.points(table, path, key) for key in ("encode", "decode"))
        slower = (self.number(table, path, key, 0.0, low=0.0) for key in ("compute", "collective"))
        return CodecSpeed(wire, encode, decode, self.number(table, path, "busy", 1.0, above=0.0), *slower)

    def device(self, table: dict[str, Any]) -> Device:
        plain = Device()
        self.known(table, "device", tuple(vars(plain)))
        stream = self.text(table, "device", "codec_stream", plain.codec_stream)
        if stream not in ("side", "compute"):
            self.document.fail("device.codec_stream", f'take "side" or "compute", got {stream!r}')
        most = {"flops": LARGEST, "memory_gbyte": LARGEST, "launch_us": LARGEST, "spread": WIDEST}
        numbers = {
            key: self.number(table, "device", key, getattr(plain, key), low=0.0, most=limit)
            for key, limit in most.items()
        }
        return Device(name=self.text(table, "device", "name", plain.name), codec_stream=stream, **numbers)

    def overlap(self, table: dict[str, Any]) -> Overlap:
        self.known(table, "overlap", tuple(vars(Overlap())))
        return Overlap(**{key: self.number(table, "overlap", key, 1.0, above=0.0) for key in vars(Overlap())})

    # -- values

    def tables(self, values: dict[str, Any], path: str) -> list[tuple[dict[str, Any], str]]:
        listed = values.get(path.rpartition(".")[2], [])
        if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
            self.document.fail(path, f"write [[{path.rpartition('.')[2]}]]: there may be several")
        return [(table, f"{path}.{number}") for number, table in enumerate(listed)]

    def table(self, values: dict[str, Any], key: str) -> dict[str, Any]:
        inner = values.get(key, {})
        if not isinstance(inner, dict):
            self.document.fail(key, f"write [{key}], once, and its keys below")
        return inner

    def truth(self, values: dict[str, Any], key: str) -> bool:
        value = values.get(key, False)
        if not isinstance(value, bool):
            self.document.fail(key, f"must be true or false, got {brief(value)}")
        return value

    def known(self, table: dict[str, Any], path: str, names: Iterable[str]) -> None:
        allowed = list(names)
        for key in table:
            if key not in allowed:
                self.document.fail(f"{path}.{key}".lstrip("."), f"unknown; there are {', '.join(allowed)}")

    def text(self, table: dict[str, Any], path: str, key: str, default: str | None) -> str:
        where = f"{path}.{key}".lstrip(".")
        value = table.get(key, default)
        if not isinstance(value, str):
            self.document.fail(where, "is missing" if value is None else f'must be a "string", got {brief(value)}')
        return value

    def number(
        self,
        table: dict[str, Any],
        path: str,
        key: str,
        default: float | None,
        low: float | None = None,
        above: float | None = None,
        most: float = LARGEST,
    ) -> float:
        where, value = f"{path}.{key}".lstrip("."), table.get(key, default)
        if value is None:
            self.document.fail(where, "is missing; give a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            self.document.fail(where, f"must be a number, got {brief(value)}")
        if value > most:
            self.document.fail(where, f"must be {most:g} or less, got {value:g}")
        if (low is not None and value < low) or (above is not None and value < above + SMALLEST):
            limit = f"{low:g} or more" if low is not None else f"more than {above:g}"
            self.document.fail(where, f"must be {limit}, got {value!r}")
        return float(value)

    def points(self, table: dict[str, Any], path: str, key: str) -> Points:
        where, rows = f"{path}.{key}", table.get(key)
        if not isinstance(rows, list) or not rows:
            self.document.fail(where, "give a list of [size, seconds, ...]")
        for number, row in enumerate(rows):
            good = (
                isinstance(row, list)
                and len(row) > 1
                and all(isinstance(v, (int, float)) and SMALLEST <= v <= LARGEST for v in row)
            )
            if not good:
                self.document.fail(f"{where}.{number}", f"must be [size, seconds, ...], all above 0, got {brief(row)}")
        return tuple(sorted(tuple(float(v) for v in row) for row in rows))


def _points(points: Points) -> list[list[object]]:
    return [[int(row[0]), *row[1:]] for row in points]


def _slower(speed: CodecSpeed) -> dict[str, object]:
    return {key: getattr(speed, key) for key in ("busy", "compute", "collective") if getattr(speed, key)}


def dump(cluster: Cluster) -> str:
    """The file's text: `parse(dump(c))` is c, up to six digits of a number."""
    head: dict[str, object] = {"format": FORMAT, "name": cluster.name, "measured": cluster.measured}
    head |= {"source": cluster.source, "price_per_hour": cluster.price_per_hour}
    lines = [
        "# Made by `narrowcast probe`, to be read and edited. Sizes in bytes, times in seconds unless the name says."
    ]
    lines += [*toml_lines(head), "", "[device]", *toml_lines(vars(cluster.device))]
    lines += ["", "[overlap]", *toml_lines(vars(cluster.overlap))]
    for level in cluster.levels:
        own = {key: value for key, value in vars(level).items() if key != "tables"}
        lines += ["", "[[level]]", *toml_lines(own)]
        for table in level.tables:
            facts = {"name": table.name, "wire": table.wire, "ranks": table.ranks, "points": _points(table.points)}
            lines += ["", "[[level.collective]]", *toml_lines(facts)]
    for speed in cluster.codecs:
        facts = {"wire": speed.wire, "encode": _points(speed.encode), "decode": _points(speed.decode)}
        lines += ["", "[[codec]]", *toml_lines(facts), *toml_lines(_slower(speed))]
    return "\n".join(lines) + "\n"
