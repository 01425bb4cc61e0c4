"""Anyone's table of measured steps: some rows calibrate a link, the others are predicted.

A CSV file with a header. Columns: `model` (a built-in name, or any), `parameters` or `layers` (values of each layer in
forward order, separated by ;) where the model is not built in, `compute_ms` (a step on one device), `link` (any label),
`workers`, `wire` (a spec), `measured_ms`, `role` (calibrate or predict); and, if wanted, `algorithm`
(auto) and `overlap` (yes).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from narrowcast.codecs import codec as codec_named
from narrowcast.predict import Cluster, Description, Device, Layer, Level, Profile, Setup, StepPredictor, costs, zoo
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
        return Run(row["model"], profile, row["link"], setup, measured, role)

    def setup(self, row: dict[str, str]) -> Setup:
        overlap = self.one_of({"overlap": row.get("overlap") or "yes"}, "overlap", ("yes", "no")) == "yes"
        made = Setup(
            self.whole("workers", row["workers"]), row["wire"], row.get("algorithm") or "auto", overlap=overlap
        )
        try:
            costs.plan(costs.resolve(made.algorithm, made.wire, Link(*START).cluster, 2), Link(*START).cluster, 2)
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

    @cached_property
    def cluster(self) -> Cluster:
        level = Level("link", 0, self.gbit, self.latency_us)
        return Cluster("fitted", (level,), Device(memory_gbyte=self.codec_gbyte, launch_us=0.0))

    def seconds(self, run: Run) -> float:
        steps = StepPredictor(run.profile, costs.Costs(self.cluster, draws=0))
        return float(steps.steps(run.setup)[0])


START = (10.0, 50.0, 50.0)
LIMITS = ((1e-3, 1e5), (1.0, 1e5), (0.1, 1e4))
"""Gb/s, us and GB/s between which a fit looks."""


def _free(runs: Sequence[Run]) -> int:
    """How many of the three may be fitted: no more than there are rows, and latency only beside other sizes."""
    lossy = any(not codec_named(run.setup.wire).lossless for run in runs)
    apart = len({run.profile.numel for run in runs}) > 1 or len(runs) > 2
    return min(len(runs), 2 + lossy if apart else 1)


def fit(runs: Sequence[Run]) -> Link:
    """Bandwidth and latency, and the codec's speed where a row has a lossy wire, by least squares of log errors."""
    free = _free(runs)
    best, step = [math.log(value) for value in START], 1.0
    error = _misfit(best, runs)
    while step > 0.01:
        moved = False
        for place in range(free):
            for way in (step, -step):
                tried = [value + way * (number == place) for number, value in enumerate(best)]
                found = _misfit(tried, runs)
                if found < error:
                    best, error, moved = tried, found, True
        step = step if moved else step / 2
    return Link(*map(math.exp, best))


def _misfit(logs: Sequence[float], runs: Sequence[Run]) -> float:
    link = Link(*map(math.exp, logs))
    values = (link.gbit, link.latency_us, link.codec_gbyte)
    if not all(low <= value <= high for value, (low, high) in zip(values, LIMITS, strict=True)):
        return math.inf
    return sum(math.log(link.seconds(run) / run.seconds) ** 2 for run in runs)


def explained(link: Link, runs: Sequence[Run]) -> str:
    """The three numbers, and which of them the rows did not determine."""
    words = (f"{link.gbit:.3g} Gb/s", f"{link.latency_us:.3g} us", f"codec {link.codec_gbyte:.3g} GB/s")
    logs = [math.log(value) for value in (link.gbit, link.latency_us, link.codec_gbyte)]
    error = _misfit(logs, runs)

    def fitted(place: int) -> bool:
        """Whether another value would have made a difference."""
        moved = ([value + way * (number == place) for number, value in enumerate(logs)] for way in (0.5, -0.5))
        return place < _free(runs) and any(_misfit(tried, runs) != error for tried in moved)

    taken = [word if fitted(place) else f"{word} (assumed)" for place, word in enumerate(words)]
    return f"{', '.join(taken)}, on {len(runs)} row{'s' * (len(runs) > 1)}"


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
        notes.append(f"{name}: {explained(link, known)}")
        for run in own:
            key = (run.model, name, str(run.setup.world), run.setup.wire, run.role)
            cells.append(Cell(key, run.seconds, link.seconds(run), run.role == "predict"))
    return Result(
        name=Path(path).name,
        title=f"{Path(path).name}: seconds a step",
        fitted="bandwidth, latency and codec speed of each link, but for what its line calls assumed, on the rows "
        "whose role is calibrate",
        columns=("model", "link", "workers", "wire", "role"),
        cells=cells,
        figures=figures(cells, case=lambda cell: cell.key[:3]),
        notes=notes,
        unit="ms",
        scale=1e3,
    )
