"""What every reproduction shares: cells that are run once, a table beside the paper's, and claims that hold or not."""

from __future__ import annotations

import abc
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

Cell = dict[str, Any]
"""What tells one run from another, as plain JSON: the row of the table, the seed."""
Result = dict[str, Any]


CHOICES = ("model", "rows", "epochs", "products")
"""What some reproductions let a user choose; each says which, and what they may be."""


@dataclass(frozen=True)
class Options:
    """What a user may choose."""

    quick: bool = False
    device: str = "cpu"
    seeds: int = 3
    budget: float | None = None
    """Seconds after which to stop; the next call goes on from there."""
    root: Path | None = None
    """Where data sets are kept."""
    out: Path = Path("runs")
    """Where finished cells and checkpoints are kept."""
    choose: Mapping[str, Any] = field(default_factory=dict)
    """Options of one reproduction alone, such as `model`; those of all are CHOICES."""

    def chosen(self, key: str, otherwise: Any) -> Any:
        found = self.choose.get(key)
        return otherwise if found is None else found

    def as_arguments(self) -> list[str]:
        """For `python -m narrowcast_research.reproductions NAME`."""
        given = {"device": self.device, "seeds": self.seeds, "budget": self.budget, "root": self.root, "out": self.out}
        listed = [f"--{key}={value}" for key, value in (given | dict(self.choose)).items() if value is not None]
        return [*listed, *(["--quick"] if self.quick else [])]


@dataclass
class Clock:
    """How long a call may still take."""

    until: float | None = None

    @classmethod
    def of(cls, budget: float | None) -> Clock:
        return cls(None if budget is None else time.monotonic() + budget)

    @property
    def left(self) -> float | None:
        return None if self.until is None else self.until - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left is not None and self.left <= 0


@dataclass(frozen=True)
class Claim:
    """Something that the paper states, and whether it is so here."""

    text: str
    holds: bool
    seen: str = ""

    @property
    def verdict(self) -> str:
        """Where a figure is missing there is none yet."""
        return "open" if "nan" in self.seen else "agrees" if self.holds else "DISAGREES"

    def __str__(self) -> str:
        return f"{self.verdict}: {self.text}" + (f" (here: {self.seen})" if self.seen else "")

    @classmethod
    def near(cls, text: str, gap: float, within: float) -> Claim:
        """That something is so many points below at most."""
        return cls(f"{text} (within {within:g})", gap > -within, f"{gap:+.2f}")

    @classmethod
    def lost(cls, text: str, gap: float, by: float) -> Claim:
        """That something is so many points below at least."""
        return cls(text, gap < -by, f"{gap:+.2f}")


@dataclass(frozen=True)
class Report:
    """A table, the claims, and all figures for programs."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cells: list[dict[str, Any]] = field(default_factory=list)
    missing: int = 0
    """Cells that are still to be run."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """For people, without any library."""
        table = [list(self.columns), *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.title, "", *(line.rstrip() for line in lines), "", *self.footer()])

    def footer(self) -> list[str]:
        waiting = [f"{self.missing} cells are still to be run: call again to go on"] if self.missing else []
        return [*(str(claim) for claim in self.claims), *self.notes, *waiting]


class Reproduction(abc.ABC):
    """One paper's table, as a list of cells. Stateless; what is finished lies in the store."""

    name: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[str] = "digits"
    """The data set of a full run; quick ones take the digits that come with narrowcast."""
    choices: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Options of its own, and what each may be; the first is the default."""

    def data_of(self, options: Options) -> str:
        """The data set that these options ask for."""
        return self.needs

    @abc.abstractmethod
    def cells(self, options: Options) -> list[Cell]:
        """What is to be run, the most telling first."""

    @abc.abstractmethod
    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        """One cell; None where the budget ended first (what was done is in a checkpoint)."""

    @abc.abstractmethod
    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        """The table of what is finished."""


class RowTable(Reproduction):
    """A table whose cells are its rows, each with every seed: what most papers have."""

    rows: ClassVar[Iterable[str]]
    row_heading: ClassVar[str]
    figures: ClassVar[Mapping[str, str]] = {"accuracy, %": "accuracy"}
    """The other headings, and of what in a result: as mean and deviation, or the mean in a format: `scale:g`."""
    notes: ClassVar[Sequence[str]] = ()

    def rows_of(self, options: Options) -> Iterable[str]:
        return self.rows

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        return [{"row": row, "seed": seed} for seed in range(seeds) for row in self.rows_of(options)]

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        made = RowFigures(found)
        rows = [[row, *(made.text_of(row, what) for what in self.figures.values())] for row in made.rows]
        return Report(self.title, (self.row_heading, *self.figures), rows, self.claims(made, options), [*self.notes])

    @abc.abstractmethod
    def claims(self, made: RowFigures, options: Options) -> list[Claim]:
        """What the paper states, and whether it is so here."""


class RowFigures:
    """What was found, row by row."""

    def __init__(self, found: Iterable[tuple[Cell, Result]]) -> None:
        self._found = list(found)
        self.rows = list(dict.fromkeys(cell["row"] for cell, _ in self._found))

    def values(self, row: str, key: str) -> list[float]:
        return by(self._found, "row", key).get(row, [])

    def mean(self, row: str, key: str = "accuracy") -> float:
        """NaN where nothing is there yet: no claim holds then."""
        return mean_of({row: self.values(row, key)}, row)

    def gap(self, row: str, base: str = "float32") -> float:
        """Of accuracy."""
        return self.mean(row) - self.mean(base)

    def text_of(self, row: str, what: str) -> str:
        key, _, how = what.partition(":")
        values = self.values(row, key)
        return (f"{statistics.fmean(values):{how}}" if how else spread(values)) if values else ""


@dataclass(frozen=True)
class Work:
    """Where a cell may keep its checkpoint, and how long it may take."""

    folder: Path
    key: str
    clock: Clock

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"{self.key}.pt"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.key}.jsonl"


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Mean, standard deviation and count, as `88.20 ± 0.31 (3)`."""
    listed = list(values)
    if not listed:
        return ""
    mean = f"{statistics.fmean(listed):.{digits}f}"
    return f"{mean} ± {statistics.stdev(listed):.{digits}f} ({len(listed)})" if len(listed) > 1 else f"{mean} (1)"


def by(found: Iterable[tuple[Cell, Result]], key: str, value: str) -> dict[Any, list[float]]:
    """One figure of all results, gathered by one entry of their cells."""
    gathered: dict[Any, list[float]] = {}
    for cell, result in found:
        if result.get(value) is not None:
            gathered.setdefault(cell[key], []).append(float(result[value]))
    return gathered


def mean_of(values: Mapping[Any, list[float]], key: Any) -> float:
    """NaN where nothing is there yet: no claim holds then."""
    return statistics.fmean(values[key]) if values.get(key) else float("nan")
