"""What a cluster is to the predictor: its links, its device and its codecs, in a file that people can read and edit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from narrowcast.codecs import codec as codec_named
from narrowcast.toml_file import SMALLEST, FileError, Section, brief, parse_toml, read_text, toml_lines

FORMAT = 1
COLLECTIVES = ("all_reduce", "two_shot", "all_gather", "reduce_scatter", "send")
PRESETS = Path(__file__).with_name("data") / "clusters"
RARE = ("fitted_rows", "codec_system")
"""What `probe` never writes."""
TABLES = ("device", "overlap", "loop", "level", "codec")
MOST_BUSY = 0.99
MOST_LEVELS = 3
MOST_STREAMS = 1024
LARGEST, WIDEST = 1e18, 10.0
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

    oversubscription: float = 1.0
    """How many times more its members send together than the switches between them carry: each gets so much less."""

    rtt_ms: float = 0.0
    """Milliseconds that a signal takes there and back, beside `latency_us`; 0: all are near one another."""
    window_mb: float = 0.0
    """What TCP has under way in one stream, in MB: it sends no more in a round trip. 0: no limit."""
    streams: int = 1
    """Streams of TCP to each peer."""

    @property
    def stream_gbit(self) -> float:
        """What one stream carries at most: a window in each round trip."""
        return 8 * self.window_mb / self.rtt_ms if self.window_mb and self.rtt_ms else math.inf

    @property
    def member_gbit(self) -> float:
        """What is left for a member while all of them send."""
        return self.bandwidth_gbit / self.oversubscription

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
    memory_gib: float = 0.0
    """Its size; 0: not known."""
    jitter: float = 0.0
    """Relative standard deviation of a rank's compute from step to step: all wait for the slowest."""

    @property
    def is_cpu(self) -> bool:
        """What has no name is taken for a GPU, and answers say so."""
        return self.name.startswith("cpu")

    @property
    def is_named(self) -> bool:
        return self.name != Device.name


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
class Loop:
    """What real DDP steps took beyond what bare calls and bare compute tell."""

    step_ms: float = 0.0
    """DDP's own cost of a step: its hooks and its bookkeeping."""
    plain: float = 1.0
    """How many times longer the backend's own sums take in a step."""
    wires: float = 1.0
    """And calls with fewer bits."""


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
    busy: float | None = None
    """The share of the processors that others used while it was measured; None: nobody looked."""
    drift: float = 0.0
    """By how much the same timings differed between the begin and the end of the measurement, as a share."""
    loop: Loop = field(default_factory=Loop)
    fitted_rows: int = 0
    """How many measured steps its link was fitted on; 0: none."""
    codec_system: str = ""
    """Whose codecs these are, if another system's: then wires that it does not cover are refused."""

    @property
    def probed_ranks(self) -> int:
        """The largest number of members whose calls were timed on the outermost link; 0: none."""
        return max((table.ranks for table in self.levels[-1].tables), default=0)

    @property
    def unrest(self) -> float:
        """The relative standard deviation that a disturbed measurement adds to what it timed: who gets a share of the
        processors may see anything between their own speed and that share of it."""
        return math.hypot(-math.log1p(-(self.busy or 0.0)), self.drift) if self.measured else 0.0

    @property
    def node(self) -> int:
        """Devices of a node."""
        return self.levels[0].ranks if len(self.levels) > 1 else 1

    def shape(self, world: int) -> tuple[int, int]:
        """Ranks of a node, and nodes."""
        self.sizes(world)
        inside = min(self.node, world)
        return inside, math.ceil(world / inside)

    def sizes(self, world: int) -> tuple[int, ...]:
        """How many members each level joins where workers fill node after node, from the inside out."""
        most = math.prod(level.ranks for level in self.levels)
        if most and world > most:
            raise ValueError(
                f"cluster {self.name}: joins at most {most}, got {world} workers; take fewer or edit `ranks`"
            )
        left, sizes = world, list[int]()
        for level in self.levels[:-1]:
            sizes.append(min(level.ranks, left))
            left = math.ceil(left / sizes[-1])
        return (*sizes, left)

    def level_of(self, world: int) -> int:
        """The outermost link that so many workers use."""
        return max((number for number, size in enumerate(self.sizes(world)) if size > 1), default=0)

    def slowdowns(self, wire: str) -> Overlap:
        """What compute and calls with this wire do to one another."""
        # on a GPU a thread that calls waits for the interpreter while another launches: in training it is one thread
        if wire == "fp32" or not self.codecs or not self.device.is_cpu:
            return self.overlap
        by_wire = {speed.wire: speed for speed in self.codecs}
        own = by_wire.get(wire) or by_wire.get(without_wishes(wire))
        if own is None or not own.compute:
            return self.overlap
        return replace(self.overlap, compute=own.compute, collective=own.collective or self.overlap.collective)

    def with_bandwidth(self, gbit: float) -> Cluster:
        """The same with another outermost link, which nobody measured: what was timed on it is scaled."""
        outer = self.levels[-1]
        outer = replace(outer, bandwidth_gbit=gbit, timed_gbit=outer.measured_gbit if outer.tables else 0.0)
        levels = (*self.levels[:-1], outer)
        return replace(self, name=f"{self.name} at {gbit:g} Gb/s", levels=levels, measured=False)

    def with_link(self, rtt: float | None = None, window: float | None = None, streams: int | None = None) -> Cluster:
        """The same whose outermost link is so long, in seconds, and has such streams of TCP, of so many bytes each."""
        outer, given = self.levels[-1], {"rtt_ms": rtt and 1e3 * rtt, "window_mb": window and window / 1e6}
        changed = {key: value for key, value in {**given, "streams": streams}.items() if value is not None}
        outer = replace(outer, **changed)  # type: ignore[arg-type]
        named = f"{self.name}, {outer.rtt_ms:g} ms there and back"
        return replace(self, name=named, levels=(*self.levels[:-1], outer), measured=False)

    def as_timed(self) -> Cluster:
        """The same at the bandwidths at which its tables were timed."""
        return replace(self, levels=tuple(replace(one, bandwidth_gbit=one.measured_gbit) for one in self.levels))


def without_wishes(wire: str) -> str:
    """A spec without what leaves its codec what it is: `int4/128+rot` of `int4/128+rot+sr+ef`."""
    head, option = wire.partition("+")[0], codec_named(wire).transformed_by
    return f"{head}+{option}" if option else head


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
    document = parse_toml(text, name)
    top = Section(document, document.values)
    top.check_keys("format", "name", "measured", "source", "price_per_hour", "busy", "drift", *RARE, *TABLES)
    top.check_format(FORMAT)
    tables = top.tables("level")
    if not tables:
        top.fail("level", "a cluster needs at least one [[level]]")
    if len(tables) > MOST_LEVELS:
        top.fail(
            f"level.{MOST_LEVELS}", "take one to three [[level]]: inside a node, between nodes, between racks or sites"
        )
    levels = tuple(map(_level, tables))
    for number, (level, members) in enumerate(zip(levels[:-1], ("devices of a node", "nodes of a rack"), strict=False)):
        if not level.ranks:
            top.fail(f"level.{number}.ranks", f"must be the {members}, 1 or more, where there is a level around it")
    return Cluster(
        name=top.text("name", "cluster"),
        levels=levels,
        device=_device(top.table("device")),
        overlap=_overlap(top.table("overlap")),
        codecs=tuple(map(_codec, top.tables("codec"))),
        # an edited bandwidth is what somebody thinks
        measured=top.truth("measured") and all(level.measured_gbit == level.bandwidth_gbit for level in levels),
        source=top.text("source", ""),
        price_per_hour=float(top.number("price_per_hour", 0.0)),
        busy=float(top.number("busy", most=MOST_BUSY)) if "busy" in top.values else None,
        drift=float(top.number("drift", 0.0, most=WIDEST)),
        loop=_loop(top.table("loop")),
        fitted_rows=top.whole("fitted_rows", 0),
        codec_system=top.text("codec_system", ""),
    )


def _level(table: Section) -> Level:
    table.check_keys(*(key for key in Level.__dataclass_fields__ if key != "tables"), "collective")
    return Level(
        name=table.text("name", table.path),
        ranks=int(table.number("ranks", 0)),
        bandwidth_gbit=float(table.number("bandwidth_gbit", above=0.0)),
        latency_us=float(table.number("latency_us")),
        spread=float(table.number("spread", 0.0, most=WIDEST)),
        tables=tuple(map(_collective, table.tables("collective"))),
        oversubscription=float(table.number("oversubscription", 1.0, low=1.0)),
        streams=table.whole("streams", 1, low=1, most=MOST_STREAMS),
        **{key: float(table.number(key, 0.0)) for key in ("timed_gbit", "rtt_ms", "window_mb")},
    )


def _collective(table: Section) -> CollectiveTimings:
    table.check_keys("name", "ranks", "wire", "points")
    name = table.text("name")
    if name not in COLLECTIVES:
        table.fail("name", f"unknown collective {name!r}; take {', '.join(COLLECTIVES)}")
    ranks = int(table.number("ranks", low=2))
    return CollectiveTimings(name, ranks, _read_points(table, "points"), _wire(table, "fp32"))


def _wire(table: Section, default: str | None = None) -> str:
    wire = table.text("wire", default)
    try:
        codec_named(wire)
    except ValueError as error:
        table.fail("wire", str(error))
    return wire


def _codec(table: Section) -> CodecSpeed:
    table.check_keys(*CodecSpeed.__dataclass_fields__)
    wire = _wire(table)
    encode, decode = (_read_points(table, key) for key in ("encode", "decode"))
    slower = (float(table.number(key, 0.0)) for key in ("compute", "collective"))
    return CodecSpeed(wire, encode, decode, float(table.number("busy", 1.0, above=0.0)), *slower)


NAMES = ("name", "codec_stream")
"""What is no number of a device."""


def _device(table: Section) -> Device:
    plain = Device()
    table.check_keys(*vars(plain))
    stream = table.text("codec_stream", plain.codec_stream)
    if stream not in ("side", "compute"):
        table.fail("codec_stream", f'take "side" or "compute", got {stream!r}')
    most = {key: WIDEST if key in ("spread", "jitter") else LARGEST for key in vars(plain) if key not in NAMES}
    numbers = {key: float(table.number(key, getattr(plain, key), most=limit)) for key, limit in most.items()}
    return Device(name=table.text("name", plain.name), codec_stream=stream, **numbers)


def _overlap(table: Section) -> Overlap:
    table.check_keys(*vars(Overlap()))
    return Overlap(**{key: float(table.number(key, 1.0, above=0.0)) for key in vars(Overlap())})


def _loop(table: Section) -> Loop:
    table.check_keys(*vars(Loop()))
    slower = {key: float(table.number(key, 1.0, above=0.0)) for key in ("plain", "wires")}
    return Loop(float(table.number("step_ms", 0.0)), **slower)


def _read_points(table: Section, key: str) -> Points:
    rows = table.values.get(key)
    if not isinstance(rows, list) or not rows:
        table.fail(key, "give a list of [size, seconds, ...]")
    for number, row in enumerate(rows):
        is_a_row = isinstance(row, list) and len(row) > 1
        if not is_a_row or not all(isinstance(v, (int, float)) and SMALLEST <= v <= LARGEST for v in row):
            table.fail(f"{key}.{number}", f"must be [size, seconds, ...], all above 0, got {brief(row)}")
    return tuple(sorted(tuple(float(v) for v in row) for row in rows))


def _points(points: Points) -> list[list[object]]:
    return [[int(row[0]), *row[1:]] for row in points]


def dump(cluster: Cluster) -> str:
    """The file's text: `parse(dump(c))` is c, up to six digits of a number."""
    head: dict[str, object] = {"format": FORMAT, "name": cluster.name, "measured": cluster.measured}
    head |= {"source": cluster.source, "price_per_hour": cluster.price_per_hour}
    head |= {"busy": cluster.busy} if cluster.busy is not None else {}
    # each by itself where it says something: one may be known without the others
    head |= {key: getattr(cluster, key) for key in ("drift", *RARE) if getattr(cluster, key)}
    lines = [
        "# Made by `narrowcast probe`, to be read and edited. Sizes in bytes, times in seconds unless the name says."
    ]
    lines += [*toml_lines(head), "", "[device]", *toml_lines(vars(cluster.device))]
    lines += ["", "[overlap]", *toml_lines(vars(cluster.overlap))]
    if cluster.loop != Loop():
        lines += ["", "[loop]", *toml_lines(vars(cluster.loop))]
    for level in cluster.levels:
        own = {key: value for key, value in vars(level).items() if key != "tables"}
        lines += ["", "[[level]]", *toml_lines(own)]
        for table in level.tables:
            facts = {"name": table.name, "wire": table.wire, "ranks": table.ranks, "points": _points(table.points)}
            lines += ["", "[[level.collective]]", *toml_lines(facts)]
    for speed in cluster.codecs:
        facts = {"wire": speed.wire, "encode": _points(speed.encode), "decode": _points(speed.decode)}
        slower = {key: getattr(speed, key) for key in ("busy", "compute", "collective") if getattr(speed, key)}
        lines += ["", "[[codec]]", *toml_lines(facts | slower)]
    return "\n".join(lines) + "\n"
