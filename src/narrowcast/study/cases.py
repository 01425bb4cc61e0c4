"""A study file as a list of cases, in the order in which they are run, the same every time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.lab import parse_rate
from narrowcast.parallel import MIN_VALUES
from narrowcast.study.file import REAL, UNLIMITED, USED, WHOLE, Grid, HostLayout, StudyFile
from narrowcast.toml_file import FileError

PLAIN = "fp32"
LOOPBACK, CLUSTER, SIMULATED = "loopback", "cluster", "simulated"
"""What stands for a link's rate on one machine, on a real cluster, and where nothing travels."""
NETWORKS_DATA = {"resnet110": "cifar10", "lstm": "an4", "bert-base": "text", "bert-large": "text", "gpt2": "text"}
"""What the networks of the predicted grids learn from; all others take ImageNet."""

HOW = {*WHOLE, *REAL} - {"probe_seconds", "min_values"}
"""The numbers that say how a case is run, and are no part of its name."""


@dataclass(frozen=True)
class Case:
    """One line of the results."""

    kind: str
    source: str
    model: str
    data: str
    wire: str
    algorithm: str
    layout: HostLayout
    rate_name: str
    transport: str
    parallel: str = "data"
    seed: int | None = None
    bytes: int | None = None
    grid: Grid | None = None

    @property
    def id(self) -> str:
        """The axes joined by |. `min_values` is one of them where it is another than the usual."""
        where = (str(self.layout), self.rate_name, self.transport)
        if self.kind == "bus":
            return "|".join(["bus", str(self.bytes), self.wire, self.algorithm, *where])
        also = [f"min_values {self.min_values}"] if self.min_values != MIN_VALUES else []
        if self.kind == "accuracy":
            return "|".join(["accuracy", *self._what(), str(self.layout), f"seed {self.seed}", *also])
        first = "predicted" if self.source == "predicted" else "time"
        return "|".join([first, *self._what(), *where, self.parallel, *also])

    @property
    def how(self) -> Grid:
        """The numbers with which it is run."""
        assert self.grid is not None
        return self.grid

    @property
    def min_values(self) -> int:
        """Tensors with fewer values travel as they are."""
        return MIN_VALUES if self.grid is None else self.grid.min_values

    def _what(self) -> tuple[str, ...]:
        return self.model, self.data, self.wire, self.algorithm

    @property
    def rate(self) -> float | None:
        """Bits a second."""
        on_cluster = self.grid is not None and self.grid.kind == "predicted"
        if on_cluster or self.rate_name in (UNLIMITED, LOOPBACK, CLUSTER, SIMULATED):
            return None
        return parse_rate(self.rate_name).bits_per_second

    def axes(self) -> dict[str, Any]:
        """The fields that every line has."""
        axes: dict[str, Any] = {"kind": self.kind, "case": self.id, "source": self.source}
        axes |= {key: getattr(self, key) for key in ("model", "data", "wire", "algorithm")}
        axes |= {"workers": self.layout.workers, "layout": str(self.layout), "rate": self.rate}
        axes |= {key: getattr(self, key) for key in ("rate_name", "transport", "parallel")}
        axes |= {} if self.kind == "bus" else {"min_values": self.min_values}
        return axes | ({"seed": self.seed} if self.seed is not None else {})


@dataclass(frozen=True)
class Place:
    """Where ranks run: cases of one place can share a start of ranks."""

    layout: HostLayout
    rate_name: str
    transport: str

    @property
    def slug(self) -> str:
        return f"{self.layout}-{self.rate_name}-{self.transport}"


@dataclass(frozen=True)
class Setting:
    """Cases that differ in wire and algorithm alone: their repeats are interleaved."""

    cases: tuple[Case, ...]

    @property
    def first(self) -> Case:
        """What it says of everything but wire and algorithm holds for all."""
        return self.cases[0]

    @property
    def place(self) -> Place:
        return Place(self.first.layout, self.first.rate_name, self.first.transport)

    @property
    def slug(self) -> str:
        words = (self.first.model, self.first.data, self.first.parallel, self.place.slug)
        # not min_values: the file is a profile of steps without communication
        return "-".join(words).replace("/", "_").replace(":", "_").replace("\\", "_")


def expand(study: StudyFile, launcher: str) -> list[list[Case]]:
    """All cases, grid by grid in the file's order; a case that several grids have belongs to the first.

    FileError where they would run it in different ways: it has one line in the results, which would be the first's.
    """
    seen: dict[str, Case] = {}
    grids = []
    for grid in study.grids:
        own = []
        for case in _EXPANDERS[grid.kind](grid, study, launcher):
            first = seen.setdefault(case.id, case)
            if first is case:
                own.append(case)
            elif differing := _differing(first, case):
                raise FileError(f"{study.source}:{grid.line}: {_clash(first, differing, launcher)}")
        grids.append(own)
    return grids


def _differing(first: Case, second: Case) -> list[str]:
    """The numbers in which two grids would run a case in different ways."""
    pairs = [(name, getattr(first.how, name), getattr(second.how, name)) for name in USED[first.how.kind].split()]
    return [f"{name} {mine} and {other}" for name, mine, other in pairs if name in HOW and mine != other]


def _clash(case: Case, differing: Sequence[str], launcher: str) -> str:
    also = "" if launcher == "lab" else f" (launcher {launcher} makes no link rates: grids that differ in them are one)"
    return (
        f"this grid has cases that the grid of line {case.how.line} has, such as {case.id}{also}, but with other "
        f"numbers: {', '.join(differing)}. A case is run once: give both the same, or put one into a file of its own"
    )


def settings(cases: Sequence[Case]) -> list[Setting]:
    """Measured cases, put together by what they share; settings of one place follow one another."""
    alike: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        where = (case.layout, case.rate_name, case.transport, case.parallel)
        alike.setdefault((case.kind, case.model, case.data, *where, case.min_values), []).append(case)
    every = [Setting(tuple(members)) for members in alike.values()]
    places = list(dict.fromkeys(setting.place for setting in every))
    return sorted(every, key=lambda setting: places.index(setting.place))


def _rates(grid: Grid, launcher: str) -> Sequence[str]:
    """The rates that a launcher can make."""
    if launcher != "lab":
        return (LOOPBACK,) if launcher == "local" else (CLUSTER,)
    # what is predicted from one link's measurement needs that first
    return sorted(grid.rates, key=lambda rate: rate != grid.probe_at)


def _ways(grid: Grid) -> Iterator[tuple[str, str]]:
    """Wires and algorithms; plain training has one way only."""
    yield from dict.fromkeys(
        (wire, "auto" if wire == PLAIN else algorithm) for wire in grid.wires for algorithm in grid.algorithms
    )


def _time(grid: Grid, study: StudyFile, launcher: str) -> Iterator[Case]:
    places = itertools.product(grid.transport, _rates(grid, launcher), grid.workers)
    for transport, rate, layout in places:
        for model, data, parallel in itertools.product(grid.models, grid.data, grid.parallel):
            for wire, algorithm in _ways(grid):
                axes = (model, data, wire, algorithm, layout, rate, transport, parallel)
                yield Case("time", "measured", *axes, grid=grid)
    if launcher == "local":
        yield from _instead(grid)


def _instead(grid: Grid) -> Iterator[Case]:
    """Where links cannot be slowed down, their rates are predicted from a measurement of this machine."""
    rates = [rate for rate in grid.rates if rate != UNLIMITED] if grid.probe_seconds else []
    for rate, layout, model, data in itertools.product(rates, grid.workers, grid.models, grid.data):
        for wire, algorithm in _ways(grid) if "gloo" in grid.transport and "data" in grid.parallel else ():
            yield Case("time", "predicted", model, data, wire, algorithm, layout, rate, "gloo", grid=grid)


def _accuracy(grid: Grid, study: StudyFile, launcher: str) -> Iterator[Case]:
    """The primary question for all models and data first, with all seeds; then the other wires."""
    question = [wire for wire in (study.baseline, study.primary) if wire in grid.wires]
    others = [wire for wire in grid.wires if wire not in question]
    for wires in (question, *[[wire] for wire in others]):
        for layout, model, data, seed in itertools.product(grid.workers, grid.models, grid.data, grid.seeds):
            for wire, algorithm in [way for way in _ways(grid) if way[0] in wires]:
                axes = ("accuracy", "simulated", model, data, wire, algorithm, layout, SIMULATED, "gloo")
                yield Case(*axes, seed=seed, grid=grid)


def _bus(grid: Grid, study: StudyFile, launcher: str) -> Iterator[Case]:
    places = itertools.product(grid.transport, _rates(grid, launcher), grid.workers)
    for transport, rate, layout in places:
        for wire, algorithm in _ways(grid):
            for size in grid.sizes:
                yield Case("bus", "measured", "", "", wire, algorithm, layout, rate, transport, bytes=size, grid=grid)


def _predicted(grid: Grid, study: StudyFile, launcher: str) -> Iterator[Case]:
    axes = itertools.product(grid.clusters, grid.transport, grid.models, grid.workers)
    for cluster, transport, model, layout in axes:
        data = NETWORKS_DATA.get(model, "imagenet")
        for wire, algorithm in _ways(grid):
            yield Case("time", "predicted", model, data, wire, algorithm, layout, cluster, transport, grid=grid)


_EXPANDERS = {"time": _time, "accuracy": _accuracy, "bus": _bus, "predicted": _predicted}
