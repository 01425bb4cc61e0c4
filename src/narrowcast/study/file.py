"""A study is a file: what to compare, on what, how often. Read strictly, with the line of whatever is wrong."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from narrowcast import plugins
from narrowcast.codecs import codec as codec_named
from narrowcast.codecs import refuse_differences
from narrowcast.collectives import ALGORITHMS
from narrowcast.lab import parse_rate
from narrowcast.parallel import MIN_VALUES
from narrowcast.predict import cluster as cluster_file
from narrowcast.predict import zoo
from narrowcast.study import datasets, models
from narrowcast.toml_file import LARGEST, Document, FileError, brief, parse_toml, read_text

BUILTIN = Path(__file__).with_name("builtin")
KINDS = ("time", "accuracy", "bus", "predicted")
TRANSPORTS = ("gloo", "mpi", "nccl")
PARALLEL = ("data", "model")
UNLIMITED = "unlimited"
LAYOUT = re.compile(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})")
MOST_WORKERS = 1_000_000
MOST_CASES = 100_000
"""Of a grid: more would take years, and hours to write down."""
NAME = re.compile(r"\w[\w.-]*")
"""It names a folder, and a job of SLURM."""
SIZE = re.compile(r"([1-9][0-9]{0,6})(KiB|MiB)")
SHIFTS = {"KiB": 10, "MiB": 20}
LONGEST_WORD = 100
"""So many characters are compared with the names that were probably meant."""


@dataclass(frozen=True)
class HostLayout:
    """So many hosts with so many ranks on each."""

    hosts: int
    per_host: int = 1

    @property
    def workers(self) -> int:
        return self.hosts * self.per_host

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...] | None:
        """The ranks of each host, where a host has several."""
        if self.per_host == 1:
            return None
        return tuple(tuple(host * self.per_host + rank for rank in range(self.per_host)) for host in range(self.hosts))

    def __str__(self) -> str:
        return f"{self.hosts}x{self.per_host}" if self.per_host > 1 else str(self.hosts)


@dataclass(frozen=True)
class Grid:
    """A product of axes of one kind, and how each of its cases is run."""

    kind: str
    models: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    wires: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ("auto",)
    workers: tuple[HostLayout, ...] = (HostLayout(2),)
    rates: tuple[str, ...] = (UNLIMITED,)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    transport: tuple[str, ...] = ("gloo",)
    parallel: tuple[str, ...] = ("data",)
    clusters: tuple[str, ...] = ()
    sizes: tuple[int, ...] = tuple(1 << power for power in range(16, 27, 2))
    batch: int = 16
    """Examples of each worker and step."""
    steps: int = 10
    """Timed in each repeat."""
    repeats: int = 3
    seconds: float = 5.0
    """About how long one wire may take in one repeat: where steps are slow there are fewer of them, but two."""
    probe_seconds: float = 10.0
    """About how long a link is measured for predictions; 0: not at all."""
    probe_at: str = ""
    """The rate at which links are measured; predictions for the others follow from it. Without it each is measured."""
    epochs: float = 5.0
    lr: float = 0.1
    examples: int = 0
    """The first so many training examples; 0: all."""
    tests: int = 0
    min_values: int = MIN_VALUES
    """Tensors with fewer values travel as they are; part of a case's name where it is another than `attach`'s own."""
    line: int = 0


USED = {
    "time": "models data wires algorithms workers rates transport parallel batch steps repeats seconds probe_seconds"
    " probe_at examples min_values",
    "accuracy": "models data wires algorithms workers seeds batch epochs lr examples tests min_values",
    "bus": "wires algorithms workers rates transport sizes repeats seconds",
    "predicted": "models wires algorithms workers clusters transport min_values",
}
"""What each kind looks at; in a table of its own nothing else may stand."""
NEEDED = {
    "time": "models data wires",
    "accuracy": "models data wires",
    "bus": "wires",
    "predicted": "models wires clusters",
}


@dataclass(frozen=True)
class StudyFile:
    """What was read."""

    name: str
    text: str
    grids: tuple[Grid, ...]
    source: str = "study.toml"
    """The file's name, for messages."""
    about: str = ""
    margin: float = 1.0
    primary: str = "int8/256"
    baseline: str = "fp32"
    targets: dict[str, float] = field(default_factory=dict)


def builtins() -> list[str]:
    return sorted(_files())


def _files() -> dict[str, Path]:
    return {path.stem: path for folder in (BUILTIN, *plugins.loaded().studies) for path in folder.glob("*.toml")}


def load(name: str | Path) -> StudyFile:
    """A built-in study by its name, or a file."""
    return parse(text_of(name), str(name))


def text_of(name: str | Path) -> str:
    """What stands in the file of a study."""
    path = _files().get(str(name), Path(name))
    if not path.is_file():
        if name in plugins.RESEARCH_STUDIES:
            raise plugins.research_needed(f"study {name}")
        raise FileError(f"study: {name} is no file and no built-in study; there are {', '.join(builtins())}")
    return read_text(path, str(name))


def parse(text: str, name: str = "study.toml") -> StudyFile:
    """Read a file's text; FileError with name and line where something in it cannot be right."""
    study = StudyReader(parse_toml(text, name)).study(text)
    from narrowcast.study.cases import expand  # which is built on this file

    expand(study, "lab")
    return study


WHOLE = {"batch": 1, "steps": 2, "repeats": 1, "examples": 0, "tests": 0, "min_values": 0}
REAL = {"epochs": 0.0, "lr": 0.0, "seconds": 0.0, "probe_seconds": -1.0}
"""Numbers, and what they must be above."""
HEAD = ("name", "about", "margin", "primary", "baseline", "targets", "kinds", "grid")


class StudyReader:
    """Takes a document apart; whatever is missing, unknown or out of range fails with its line."""

    def __init__(self, document: Document) -> None:
        self.document, self._fail = document, document.fail

    def study(self, text: str) -> StudyFile:
        values = self.document.values
        own = [f.name for f in fields(Grid) if f.name not in ("kind", "line")]
        self._known(values, "", (*HEAD, *own))
        common = {key: values[key] for key in own if key in values}
        wires = {"primary": "int8/256", "baseline": "fp32"}
        question = {key: self._wire(values.get(key, default), key) for key, default in wires.items()}
        grids = tuple(self._grids(values, common))
        self._asks(grids, question)
        return StudyFile(
            name=self._name(values.get("name", Path(self.document.name).stem)),
            text=text,
            source=self.document.name,
            grids=grids,
            about=self._text("about", values.get("about", "")),
            margin=self._number("margin", values.get("margin", 1.0), 0.0, 100.0),
            targets=self._targets(values.get("targets", {}), grids),
            **question,
        )

    def _asks(self, grids: Sequence[Grid], question: dict[str, str]) -> None:
        """Some grid has both wires of the study's question; collectives alone have none."""
        wires = list(dict.fromkeys(wire for grid in grids if grid.kind != "bus" for wire in grid.wires))
        for key, wire in question.items() if wires else ():
            if wire not in wires:
                self._fail(
                    key if key in self.document.values else "wires",
                    f"no grid has the {key} wire {wire}; add it to wires, or give {key} = one of {', '.join(wires)}",
                )

    def _grids(self, values: dict[str, Any], common: dict[str, Any]) -> Iterable[Grid]:
        tables = values.get("grid")
        if tables is None:
            kinds = self._listed(values.get("kinds", ["time", "accuracy"]), "kinds").values()
            for kind in kinds:
                self._one_of(kind, KINDS, "kinds")
            return [self._grid(kind, common, {}, "") for kind in kinds]
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self._fail("grid", "write [[grid]]: there may be several")
        if not tables:
            self._fail("grid", "is an empty list; leave it out, or write [[grid]] tables")
        if "kinds" in values:
            self._fail("kinds", "each [[grid]] has a kind of its own; leave kinds out, or the [[grid]] tables")
        return [self._table(table, f"grid.{number}", common) for number, table in enumerate(tables)]

    def _table(self, table: dict[str, Any], path: str, common: dict[str, Any]) -> Grid:
        if "kind" not in table:
            self._fail(f"{path}.kind", f"is missing; take one of {', '.join(KINDS)}")
        kind = table["kind"]
        self._one_of(kind, KINDS, f"{path}.kind")
        self._known(table, path, ("kind", *USED[kind].split()), f"in a grid of kind {kind}")
        own = {key: value for key, value in table.items() if key != "kind"}
        return self._grid(kind, common, own, path)

    def _grid(self, kind: str, common: dict[str, Any], own: dict[str, Any], path: str) -> Grid:
        used = USED[kind].split()
        stated = {key: value for key, value in {**common, **own}.items() if key in used}
        for key in NEEDED[kind].split():
            if key not in stated:
                self._fail(f"{path}.{key}".lstrip("."), f"is missing; a grid of kind {kind} needs it")
        place = {key: f"{path}.{key}".lstrip(".") if key in own else key for key in stated}
        made = {key: self._value(key, value, place[key], kind) for key, value in stated.items()}
        grid = Grid(kind, line=self.document.lines.get(path, 1), **made)
        axes = [value for key in used if isinstance(value := getattr(grid, key), tuple)]
        if (cases := math.prod(map(len, axes))) > MOST_CASES:
            what = f"a grid has at most {MOST_CASES:,} cases, this one {cases:,}; shorten its lists"
            self._fail(path or "wires", what)
        self._fits(grid, place)
        return grid

    def _fits(self, grid: Grid, place: dict[str, str]) -> None:
        """What each value allows by itself and all of them together do not."""
        for model in grid.models if grid.kind != "predicted" else ():
            faults = [models.mismatch(model, data) for data in grid.data]
            faults += [models.cannot_split(model)] if "model" in grid.parallel else []
            for why in filter(None, faults):
                self._fail(place["models"], why)
        if grid.probe_at and grid.probe_at not in grid.rates:
            self._fail(place["probe_at"], f"must be one of the rates: {', '.join(grid.rates)}; got {grid.probe_at}")
        several = [layout for layout in grid.workers if layout.per_host > 1]
        if "hierarchical" in grid.algorithms and len(several) < len(grid.workers):
            self._fail(place.get("workers", place["algorithms"]), 'hierarchical needs hosts with several ranks: "2x2"')
        if grid.kind in ("time", "bus") and any(layout.workers < 2 for layout in grid.workers):
            self._fail(place["workers"], "one worker sends nothing: give 2 or more")

    def _value(self, key: str, value: Any, path: str, kind: str) -> Any:
        if key in WHOLE:
            return self._whole(path, value, WHOLE[key])
        if key in REAL:
            return self._number(path, value, REAL[key])
        if key == "probe_at":
            return self._rate(value, path)
        if key == "seeds" and isinstance(value, int) and not isinstance(value, bool):
            return tuple(range(self._whole(path, value, 1, MOST_CASES)))
        items = {where: self._item(key, item, where, kind) for where, item in self._listed(value, path).items()}
        seen = set()
        for where, item in items.items():
            if item in seen:
                self._fail(where, f"stands here a second time: {item}")
            seen.add(item)
        return tuple(items.values())

    def _listed(self, value: Any, path: str) -> dict[str, Any]:
        """Items by their place; a value alone is a list of one."""
        if not isinstance(value, list):
            return {path: value}
        if not value:
            self._fail(path, "is an empty list; leave it out, or give at least one")
        return {f"{path}.{number}": item for number, item in enumerate(value)}

    def _item(self, key: str, item: Any, path: str, kind: str) -> Any:
        if key == "seeds":
            return self._whole(path, item, 0)
        readers = {"workers": self._layout, "sizes": self._size, "wires": self._wire, "rates": self._rate}
        if key in readers:
            return readers[key](item, path)
        text = self._text(path, item)
        if (key in ("models", "data") and ":" in text) or (key == "clusters" and text.endswith(".toml")):
            return text
        self._one_of(text, self._allowed(key, kind), path)
        return text

    def _allowed(self, key: str, kind: str) -> Sequence[str]:
        return {
            "models": [*(zoo.MODELS if kind == "predicted" else models.NETS)],
            "data": datasets.NAMES,
            "algorithms": ("auto", *ALGORITHMS),
            "transport": TRANSPORTS,
            "parallel": PARALLEL,
            "clusters": cluster_file.presets(),
        }[key]

    def _layout(self, item: Any, path: str) -> HostLayout:
        match = LAYOUT.fullmatch(item) if isinstance(item, str) else None
        whole = isinstance(item, int) and not isinstance(item, bool) and item >= 1
        if match is None and not whole:
            self._fail(path, f'give a number of workers, or hosts and the ranks on each as "2x2"; got {brief(item)}')
        layout = HostLayout(item) if match is None else HostLayout(int(match[1]), int(match[2]))
        if layout.workers > MOST_WORKERS:
            self._fail(path, f"at most {MOST_WORKERS:,} workers, got {layout.workers:,}")
        return layout

    def _size(self, item: Any, path: str) -> int:
        match = SIZE.fullmatch(item) if isinstance(item, str) else None
        if match is None:
            self._fail(path, f'give the bytes of a message as "64KiB" or "4MiB"; got {brief(item)}')
        return int(match[1]) << SHIFTS[match[2]]

    def _wire(self, item: Any, path: str) -> str:
        try:
            codec = codec_named(self._text(path, item))
            refuse_differences("a study", codec)
            return str(codec)
        except FileError:
            raise
        except ValueError as error:
            self._fail(path, str(error))

    def _rate(self, item: Any, path: str) -> str:
        text = self._text(path, item)
        if text != UNLIMITED:
            try:
                parse_rate(text)
            except ValueError:
                self._fail(path, f'give "100mbit", "1gbit" or the like, or "{UNLIMITED}"; got {brief(text)}')
        return text

    def _name(self, value: Any) -> str:
        if NAME.fullmatch(self._text("name", value)) is None:
            self._fail("name", f'give letters, digits, "_", "-" and "." alone: it names a folder; got {brief(value)}')
        return str(value)

    def _targets(self, table: Any, grids: Sequence[Grid]) -> dict[str, float]:
        if not isinstance(table, dict):
            self._fail("targets", "write [targets], and below it a line for each data set: digits = 95.0")
        data = list(dict.fromkeys(name for grid in grids for name in grid.data))
        self._known(table, "targets", data, "among this study's data")
        return {key: self._number(f"targets.{key}", value, 0.0, 100.0) for key, value in table.items()}

    def _known(self, table: dict[str, Any], path: str, allowed: Sequence[str], where: str = "") -> None:
        for key in table:
            if key not in allowed:
                self._fail(f"{path}.{key}".lstrip("."), f"unknown {where}".strip() + f"; {_nearest(key, allowed)}")

    def _one_of(self, item: Any, allowed: Sequence[str], path: str) -> None:
        if item not in allowed:
            self._fail(path, f"unknown {brief(item)}; {_nearest(str(item), allowed)}")

    def _text(self, path: str, value: Any) -> str:
        if not isinstance(value, str):
            self._fail(path, f'must be a "string", got {brief(value)}')
        return str(value)

    def _whole(self, path: str, value: Any, least: int, most: int = LARGEST) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._fail(path, f"must be a whole number, {least} or more; got {brief(value)}")
        if value > most:
            self._fail(path, f"must be a whole number, {most:,} or less; got {value:,}")
        return int(value)

    def _number(self, path: str, value: Any, above: float, most: float = LARGEST) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > above or value == float("inf"):
            self._fail(path, f"must be a number above {above:g}; got {brief(value)}")
        if value > most:
            self._fail(path, f"must be a number up to {most:g}; got {brief(value)}")
        return float(value)


def _nearest(word: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(word[:LONGEST_WORD], allowed, n=1)
    return f"did you mean {near[0]}? There are {', '.join(allowed)}" if near else f"there are {', '.join(allowed)}"
