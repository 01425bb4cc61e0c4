"""Anyone's table of measured steps: some rows calibrate a link, the others are predicted.

A CSV file with a header. Columns: `model` (a built-in name, or any), `parameters` or `layers` (values of each layer in
forward order, separated by ;) where the model is not built in, `compute_ms` (a step on one device), `link` (any label),
`workers`, `wire` (a spec), `measured_ms`, `role` (calibrate or predict); and, if wanted, `algorithm`
(auto), `overlap` (yes), `gpus_per_node` (1) and `bucket_mb` (25).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import BUCKET_BYTES
from narrowcast.predict import (
    Cluster,
    CodecSpeed,
    Description,
    Device,
    Layer,
    Level,
    Profile,
    Setup,
    Spreads,
    StepPredictor,
    costs,
    zoo,
)
from narrowcast.toml_file import FileError, brief, error_at, read_text
from narrowcast_research.validation.metrics import Cell, Result, figures

NEEDED = ("model", "compute_ms", "link", "workers", "wire", "measured_ms", "role")
ROLES = ("calibrate", "predict")
SMALLEST, LARGEST = 1e-12, 1e12
"""Milliseconds, values and workers: further out a sum of a few products is no number any more."""
MOST_LAYERS = 10_000
GUESS_LAYERS = 20
"""A model of which only the size is known is taken for so many equal layers."""


@dataclass(frozen=True)
class Run:
    """A row."""

    model: str
    profile: Profile
    link: str
    setup: Setup
    seconds: float
    role: str
    gpus_per_node: int = 1


class _Rows:
    """Reads a table; whatever is wrong fails with file and line."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileError(f"validate --data: no file {path}")
        self.path, self.line = path, 1

    def read(self) -> list[Run]:
        reader = csv.DictReader(io.StringIO(read_text(self.path), newline=""))
        try:
            found = [self.run(row) for row in self.rows(reader)]
        except csv.Error as error:
            self.line = max(1, reader.line_num)
            raise self.fail(f"no CSV ({error})") from None
        if not found:
            raise FileError(f"{self.path}:1: the table has no rows")
        return found

    def rows(self, reader: csv.DictReader[str]) -> Iterator[dict[str, str]]:
        missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
        if missing:
            raise FileError(f"{self.path}:1: no column {missing[0]!r}; there must be {', '.join(NEEDED)}")
        for row in reader:
            self.line = reader.line_num
            yield {key: (value or "").strip() for key, value in row.items() if key}

    def fail(self, what: str) -> FileError:
        return error_at(self.path, self.line, what)

    def run(self, row: dict[str, str]) -> Run:
        role = self.one_of(row, "role", ROLES)
        try:
            codec_named(row["wire"])
        except ValueError as error:
            raise self.fail(f"wire: {error}") from None
        setup = self.setup(row)
        compute, measured = (self.number(row, key) / 1e3 for key in ("compute_ms", "measured_ms"))
        if role == "calibrate" and setup.world < 2:
            raise self.fail(f"workers: a row that calibrates a link needs 2 or more, got {setup.world}")
        if role == "calibrate" and measured <= compute:
            raise self.fail(
                f"measured_ms: a row that calibrates a link must be above its compute_ms, got {row['measured_ms']} "
                f"and {row['compute_ms']}; take it for predict, or measure compute again"
            )
        profile = self.description(row).profile_of(compute, spread=0.0)
        inside = self.whole("gpus_per_node", row.get("gpus_per_node") or "1")
        if role == "calibrate" and setup.world <= inside > 1:
            raise self.fail(
                f"workers: {setup.world} on nodes of {inside} GPUs do not use the link between nodes; take the row for "
                "predict, or leave gpus_per_node out where the link is that inside"
            )
        return Run(row["model"], profile, row["link"], setup, measured, role, inside)

    def setup(self, row: dict[str, str]) -> Setup:
        overlap = self.one_of({"overlap": row.get("overlap") or "yes"}, "overlap", ("yes", "no")) == "yes"
        bucket = BUCKET_BYTES
        if row.get("bucket_mb"):
            bucket = max(1, int(self.number(row, "bucket_mb") * 2**20))
        workers, cluster = self.whole("workers", row["workers"]), Link(*START).cluster(1)
        made = Setup(workers, row["wire"], row.get("algorithm") or "auto", bucket_bytes=bucket, overlap=overlap)
        try:
            costs.plan(costs.resolve(made.algorithm, made.wire, cluster, 2), cluster, 2)
        except ValueError as error:
            raise self.fail(str(error)) from None
        return made

    def one_of(self, row: dict[str, str], key: str, names: Sequence[str]) -> str:
        if row[key] not in names:
            raise self.fail(f"{key}: take {' or '.join(names)}, got {brief(row[key])}")
        return row[key]

    def whole(self, key: str, text: str) -> int:
        value = self.number({key: text}, key)
        if value != int(value):
            raise self.fail(f"{key}: must be a whole number, got {value:g}")
        return int(value)

    def number(self, row: dict[str, str], key: str) -> float:
        try:
            value = float(row[key])
        except ValueError:
            raise self.fail(f"{key}: must be a number, got {brief(row[key])}") from None
        if not SMALLEST <= value <= LARGEST:
            what = f"{LARGEST:g} or less" if LARGEST < value < math.inf else "above 0"
            raise self.fail(f"{key}: must be {what}, got {value:g}")
        return value

    def description(self, row: dict[str, str]) -> Description:
        if row["model"] in zoo.MODELS:
            return zoo.MODELS[row["model"]]()
        if row.get("layers"):
            sizes = [self.whole("layers", part) for part in row["layers"].split(";")]
            if len(sizes) > MOST_LAYERS:
                raise self.fail(f"layers: at most {MOST_LAYERS}, got {len(sizes)}")
        elif row.get("parameters"):
            sizes = [max(1, self.whole("parameters", row["parameters"]) // GUESS_LAYERS)] * GUESS_LAYERS
        else:
            raise self.fail(f"model {brief(row['model'])} is not built in: give parameters or layers")
        return Description(row["model"], tuple(Layer(f"layer{i}", (n,), 1.0) for i, n in enumerate(sizes)), 1)


def load(path: str | Path) -> list[Run]:
    return _Rows(Path(path)).read()


@dataclass(frozen=True)
class Link:
    """What is fitted: the rows of one link know nothing else."""

    gbit: float
    latency_us: float
    codec_gbyte: float
    decode_gbyte: float
    rows: int = 0
    """How many it was fitted on."""

    def cluster(self, inside: int) -> Cluster:
        """With so many GPUs on each node, joined by what is assumed of a PCIe switch."""
        outer = Level("link", 0, self.gbit, self.latency_us)
        levels = (outer,) if inside == 1 else (Level("inside a node", inside, INSIDE_GBIT, INSIDE_US), outer)
        device = Device(memory_gbyte=START[CODEC], launch_us=0.0)
        return Cluster("fitted", levels, device, codecs=tuple(map(self._speed, CODECS)), fitted_rows=self.rows)

    def _speed(self, wire: str) -> CodecSpeed:
        """Timings of a codec that reads and writes at the two speeds."""
        size = 4 + codec_named(wire).bits_per_value / 8
        encode, decode = (
            tuple((n, n * size / (speed * 1e9)) for n in (1e3, 1e9)) for speed in (self.codec_gbyte, self.decode_gbyte)
        )
        return CodecSpeed(wire, encode, decode)

    def seconds(self, run: Run) -> float:
        return float(self.predictor(run, 0).steps(run.setup)[0])

    def predictor(self, run: Run, draws: int = costs.DRAWS, known: Spreads | None = None) -> StepPredictor:
        return StepPredictor(run.profile, costs.Costs(self.cluster(run.gpus_per_node), draws, known=known))


INSIDE_GBIT, INSIDE_US = 80.0, 20.0
CODECS = ("int8/256", "int4/128", "onebit/64")
"""Wires are taken for the one nearest in bits. Casts to 16 bits, and float32, go by the speed of memory: rows with a
slow codec say nothing about those."""
GBIT, LATENCY, CODEC, DECODE = range(4)
NAMES = ("bandwidth", "latency", "codec", "decode")
START = (10.0, 50.0, 50.0, 50.0)
LIMITS = ((1e-3, 2e3), (1.0, 1e5), (0.1, 1e4), (0.1, 1e4))
"""Gb/s, us and GB/s between which a fit looks."""


def free_numbers(runs: Sequence[Run]) -> tuple[int, ...]:
    """Which of the four are fitted: no more than there are rows.

    Bandwidth; then the codec's speed, where a row has a lossy wire; then latency, where rows differ in size or there
    are three; then decoding apart from encoding, where lossy rows differ in workers: their share in a call does, too.
    """
    lossy = [run for run in runs if not codec_named(run.setup.wire).lossless]
    found = [GBIT, *([CODEC] if lossy else [])]
    if len({run.profile.numel for run in runs}) > 1 or len(runs) > 2:
        found.append(LATENCY)
    if len({run.setup.world for run in lossy}) > 1:
        found.append(DECODE)
    return tuple(found[: len(runs)])


def fit(runs: Sequence[Run]) -> Link:
    """The numbers of `free_numbers`, by least squares of log errors (Levenberg, Marquardt) from the best bandwidth on.

    What rows hardly tell stays near where it began: each number has a wide prior, as if it had been measured once.
    """
    free, begin = free_numbers(runs), [math.log(value) for value in START]
    tried = [_moved(begin, GBIT, way, free) for way in SCAN]
    best = min(tried, key=lambda logs: sum(value**2 for value in _errors(logs, runs)))
    errors, damping = _errors(best, runs), 1e-3
    for _ in range(ROUNDS):
        columns = [_errors(_moved(best, place, NUDGE, free), runs) for place in free]
        slope = (torch.tensor(columns, dtype=torch.float64) - torch.tensor(errors, dtype=torch.float64)).T / NUDGE
        left = slope.T @ slope
        right = slope.T @ torch.tensor(errors, dtype=torch.float64)
        # a number at its limit does not move, and has no slope
        ridge = damping * left.diag() + 1e-12
        move = torch.linalg.solve(left + ridge.diag(), -right)
        logs = best
        for place, way in zip(free, move.tolist(), strict=True):
            logs = _moved(logs, place, max(-2.0, min(2.0, way)), free)
        found = _errors(logs, runs)
        if sum(value**2 for value in found) < sum(value**2 for value in errors):
            best, errors, damping = logs, found, damping / 10
        else:
            damping *= 10
    return replace(_link(best), rows=len(runs))


PRIOR = (10.0, 1.0, 1.5, 1.5)
"""How far the logarithm of each number may lie from START without being a surprise."""
NOISE = 0.05
"""How exact a measured step is taken to be beside them."""
ROUNDS, NUDGE = 8, 0.02
SCAN = tuple(0.75 * number for number in range(-9, 7))


def _errors(logs: Sequence[float], runs: Sequence[Run]) -> list[float]:
    """Log errors of the rows, then what the numbers are off from what was assumed, in the same unit."""
    link = _link(logs)
    assumed = [NOISE * (value - math.log(at)) / wide for value, at, wide in zip(logs, START, PRIOR, strict=True)]
    return [*(math.log(link.seconds(run) / run.seconds) for run in runs), *assumed]


def _moved(logs: Sequence[float], place: int, way: float, free: Sequence[int]) -> list[float]:
    """Decoding goes with encoding unless it is fitted apart."""
    both = (CODEC, DECODE) if place == CODEC and DECODE not in free else (place,)
    moved = (value + way * (number in both) for number, value in enumerate(logs))
    return [min(max(value, math.log(low)), math.log(high)) for value, (low, high) in zip(moved, LIMITS, strict=True)]


def _misfit(logs: Sequence[float], runs: Sequence[Run]) -> float:
    return sum(value**2 for value in _errors(logs, runs)[: len(runs)])


def limits_hit(link: Link, runs: Sequence[Run]) -> list[str]:
    """The fitted numbers at an end of what is tried, and those that make no difference: rows tell nothing of them."""
    logs, free = _logs(link), free_numbers(runs)
    error, found = _misfit(logs, runs), []
    for place in free:
        ends = [end for end in LIMITS[place] if abs(logs[place] - math.log(end)) < AT_AN_END]
        if ends:
            found.append(f"{NAMES[place]} (at the limit {ends[0]:g})")
        elif all(_misfit(_moved(logs, place, way, free), runs) == error for way in (0.5, -0.5)):
            found.append(f"{NAMES[place]} (any value fits)")
    return found


AT_AN_END = 0.7


def _link(logs: Sequence[float]) -> Link:
    gbit, latency, encode, decode = map(math.exp, logs)
    return Link(gbit, latency, encode, decode)


def _logs(link: Link) -> list[float]:
    return [math.log(value) for value in (link.gbit, link.latency_us, link.codec_gbyte, link.decode_gbyte)]


def explained(link: Link, runs: Sequence[Run]) -> str:
    """The numbers, which of them the rows did not determine, and which are at a limit."""
    words = [f"{link.gbit:.3g} Gb/s", f"{link.latency_us:.3g} us", f"codec {link.codec_gbyte:.3g} GB/s"]
    free, hit = free_numbers(runs), limits_hit(link, runs)
    if DECODE in free:
        words.append(f"decode {link.decode_gbyte:.3g} GB/s")
    nothing = {text.partition(" ")[0] for text in hit}
    taken = [
        word if place in free and NAMES[place] not in nothing else f"{word} (assumed)"
        for place, word in enumerate(words)
    ]
    more = f"; the rows do not tell {', '.join(hit)}" if hit else ""
    return f"{', '.join(taken)}, on {len(runs)} row{'s' * (len(runs) > 1)}{more}"


def validate(path: str | Path) -> Result:
    """Fit each link on its calibrating rows, predict the others."""
    runs, cells, notes = load(path), [], []
    if not any(run.role == "predict" for run in runs):
        raise FileError(f"{path}:1: no row's role is predict, so there is nothing to compare; give one or more")
    for name in dict.fromkeys(run.link for run in runs):
        own = [run for run in runs if run.link == name]
        known = [run for run in own if run.role == "calibrate"]
        if not known:
            raise FileError(f"{path}:1: link {brief(name)} has no row whose role is calibrate; give one or more")
        link = fit(known)
        if any(text.startswith(NAMES[GBIT]) for text in limits_hit(link, known)):
            raise FileError(
                f"{path}:1: link {brief(name)}: fitted to {link.gbit:.3g} Gb/s, a limit of the search: the rows whose "
                "role is calibrate do not wait for this link; take some with more workers or float32, or measure "
                "compute_ms again"
            )
        notes.append(f"{name}: {explained(link, known)}")
        for run in own:
            key = (run.model, name, str(run.setup.world), run.setup.wire, run.role)
            made = link.predictor(run).predict(run.setup)
            cells.append(Cell(key, run.seconds, made.step, run.role == "predict", made.low, made.high))
    return Result(
        name=Path(path).name,
        title=f"{Path(path).name}: seconds a step",
        fitted="bandwidth, latency and codec speeds of each link, but for what its line calls assumed, on the rows "
        "whose role is calibrate",
        columns=("model", "link", "workers", "wire", "role"),
        cells=cells,
        figures=figures(cells, case=lambda cell: cell.key[:3]),
        notes=notes,
        unit="ms",
        scale=1e3,
    )
