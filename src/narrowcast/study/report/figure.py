"""What figures and the sections around them are made of: tables, panels, and names and colours of what they show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, TypeVar

from narrowcast.figures import (
    WIDTH,
    Box,
    Look,
    Markup,
    Plot,
    Seat,
    end_labels,
    height_for,
    join,
    line,
    lone,
    numbers,
    panel,
    place_labels,
    room_beside,
    row,
    table,
    tag,
    text,
)
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import Finding
from narrowcast.study.analysis.findings import Findings, Step

F = TypeVar("F", bound=Finding)

FILTERS = ("model", "wire", "workers")
"""The axes by which the page can be filtered."""
OPEN_PANELS = 6
"""So many drawings are seen at once, half as many again of narrow ones; the rest is a click away."""


@dataclass(frozen=True)
class Limits:
    """How much of it all a page may hold: a file that nobody can mail is no report."""

    panels: int | None = None
    rows: int | None = None
    data: bool = True


@dataclass(frozen=True)
class TableRow:
    """Cells, and the finding by which the row is filtered."""

    cells: Sequence[object]
    finding: Finding | None = None


@dataclass(frozen=True)
class Table:
    """The first `left` columns and the last `tail` ones are words and stand at the left; numbers stand at the right."""

    caption: str
    heads: str
    """With " | " between them."""
    rows: Sequence[TableRow]
    left: int = 1
    tail: int = 0
    prose: bool = False
    """Cells are sentences, which may be broken into lines."""

    @property
    def columns(self) -> list[str]:
        return self.heads.split(" | ")

    def markup(self, most: int | None = None) -> Markup:
        """With at most so many rows; what is left out is said."""
        shown = self.rows[:most]
        caption = self.caption
        if len(shown) < len(self.rows):
            caption += f": the first {len(shown)} of {len(self.rows)} rows, to keep the file small; --csv has all"
        body = [self._row(row) for row in shown]
        return table(caption, self.columns, body, f"l{self.left} t{self.tail}" + " prose" * self.prose, self.caption)

    def _row(self, one: TableRow) -> Markup:
        hidden = {f"data_{name}": one.finding.line.get(name) for name in FILTERS} if one.finding else {}
        return row(one.cells, **hidden)

    def details(self, limits: Limits) -> Markup:
        """Behind a click."""
        return numbers(self.markup(limits.rows), len(self.rows))


@dataclass(frozen=True)
class Panel:
    """One drawing of a figure with its title, hidden with the model or the workers that it shows."""

    title: str
    drawing: Markup
    hidden_by: dict[str, object] = field(default_factory=dict)
    shows: int = 2
    """How many numbers: one alone is no picture."""
    unnamed: bool = False
    """Whether a mark has no label for want of room, so that a legend is needed."""

    def markup(self) -> Markup:
        return panel(self.title, self.drawing, **self.hidden_by)


@dataclass(frozen=True)
class Figure:
    """The sentence that it proves, the drawings, how to read them, and the numbers."""

    sentence: str
    panels: Sequence[Panel]
    reading: str
    table: Table
    legend: Markup = Markup("")
    narrow: bool = False
    """Drawings so small that three stand side by side."""

    @property
    def pictures(self) -> list[Panel]:
        """What one number would fill is told by the sentence and the table."""
        return [panel for panel in self.panels if panel.shows > 1]

    def markup(self, limits: Limits) -> list[Markup]:
        sentence = tag("p", self.sentence, class_="proves")
        if not self.pictures:
            return [sentence, self.table.markup(limits.rows)]
        parts = [sentence, self.legend, self._panels(limits)]
        return [*parts, tag("p", self.reading, class_="reading"), self.table.details(limits)]

    def _panels(self, limits: Limits) -> Markup:
        panels, count = self.pictures, OPEN_PANELS * 3 // 2 if self.narrow else OPEN_PANELS
        first, rest = panels[:count], panels[count : limits.panels]
        lost = len(panels) - len(first) - len(rest)
        class_ = "panels narrow" if self.narrow else "panels"
        parts = [tag("div", *(panel.markup() for panel in first), class_=class_)]
        if rest:
            more = tag("div", *(panel.markup() for panel in rest), class_=class_)
            summary = tag("summary", formatting.count(len(rest), "more setting"))
            parts.append(tag("details", summary, more, class_="more"))
        if lost:
            words = f"{formatting.count(lost, 'more setting')} not drawn, to keep the file small."
            parts.append(tag("p", words, class_="absent"))
        return join(parts)


class Palette:
    """One look for each wire, the same in every figure: the baseline first, the primary wire, others by their bits."""

    def __init__(self, findings: Findings) -> None:
        first = [findings.baseline, findings.primary]
        order = [*first, *(wire for wire in findings.wires if wire not in first)]
        self._looks = {wire: Look(slot) for slot, wire in enumerate(order)}

    def look(self, wire: str) -> Look:
        return self._looks[wire]

    def colour(self, wire: str) -> str:
        return self._looks[wire].colour

    def dash(self, wire: str) -> str | None:
        return self._looks[wire].dash

    def mark(self, wire: str, x: float, y: float, size: float = 3.6) -> Markup:
        return self._looks[wire].mark(x, y, size)


@dataclass(frozen=True)
class Context:
    """A study on its way to paper: its findings, the palette, and names that leave out what never changes."""

    findings: Findings

    @cached_property
    def palette(self) -> Palette:
        return Palette(self.findings)

    @cached_property
    def _kinds(self) -> dict[str, set[Any]]:
        """The values of axes that are told only where there are several."""
        timed = [*self.findings.here, *self.findings.buses]
        timed = timed or [*self.findings.accuracies]
        return {name: {getattr(f, name) for f in timed} for name in ("transport", "hosts", "parallel", "min_values")}

    def _if_several(self, finding: Finding, name: str) -> Any:
        return getattr(finding, name) if len(self._kinds[name]) > 1 else None

    def label(self, finding: Finding) -> str:
        return self.findings.label(finding)

    def setting(self, finding: Finding, *names: str) -> str:
        """`alexnet · cifar10 · 4 workers`: of the axes that are named, and the transport where there are several."""
        write: dict[str, Callable[[Any], str]] = {
            "workers": lambda n: formatting.count(n, "worker"),
            "rate_name": formatting.rate,
            "hosts": lambda layout: f"{layout} (hosts × ranks)",
        }
        values = [(name, getattr(finding, name)) for name in names]
        parts = [write.get(name, str)(value) for name, value in values if value is not None]
        if finding.kind == "time" and not finding.cluster and (transport := self._if_several(finding, "transport")):
            parts.append(str(transport))
        if finding.parallel == "model":
            parts.append("model parallel")
        if finding.kind != "bus" and (least := self._if_several(finding, "min_values")) is not None:
            parts.append(f"min_values {least}")
        return " · ".join(parts)

    def link(self, finding: Finding) -> str:
        """In a sentence: `with 4 workers at 1 Gb/s over MPI on 2x2 hosts`; what never changes is left out."""
        parts = ["with", formatting.count(finding.workers, "worker"), formatting.at_rate(finding.rate_name)]
        if transport := self._if_several(finding, "transport"):
            parts.append(f"over {formatting.primitive(transport)}")
        if hosts := self._if_several(finding, "hosts"):
            parts.append(f"on {hosts} hosts")
        if self._if_several(finding, "parallel") == "model":
            parts.append("(model parallel)")
        return " ".join(parts)

    def where(self, step: Step) -> str:
        """In a sentence: `alexnet with 4 workers at 1 Gb/s`."""
        return f"{step.model} {self.link(step)}"

    def table(
        self, caption: str, heads: str, rows: Iterable[tuple[Finding, Sequence[object]]], left: int = 4, tail: int = 0
    ) -> Table:
        """A row for each finding: the first heads name its axes, which are filled in; `rows` has the other cells."""
        known = self._axes()
        axes = [known[head] for head in takewhile(known.__contains__, heads.split(" | "))]
        listed = [TableRow((*(axis(finding) for axis in axes), *cells), finding) for finding, cells in rows]
        return Table(caption, heads, listed, left, tail)

    def _axes(self) -> dict[str, Callable[[Finding], object]]:
        return {
            "model": lambda f: f.model,
            "data": lambda f: f.data,
            "wire": self.label,
            "algorithm": lambda f: f.algorithm,
            "machine": lambda f: f.cluster or f.rate_name,
            "over": lambda f: f.transport,
            "link": lambda f: formatting.rate(f.rate_name),
            "workers": lambda f: f.workers,
        }

    def coloured(self, finding: Finding, *parts: Markup, hide: Sequence[str] = ("wire",)) -> Markup:
        """A group of marks in the colour of its wire, hidden with it."""
        hidden = {f"data_{name}": finding.line.get(name) for name in hide}
        return tag("g", *parts, class_=self.palette.colour(finding.wire), **hidden)

    def curve(
        self, plot: Plot, finding: Finding, places: Sequence[tuple[float, float, str]], size: float
    ) -> list[Markup]:
        """A line through places, with a mark and a tip at each."""
        wire = finding.wire
        path = plot.polyline([x for x, _, _ in places], [y for _, y, _ in places], dash=self.palette.dash(wire))
        marks = [(tip, self.palette.mark(wire, plot.x.at(x), plot.y.at(y), size)) for x, y, tip in places]
        return [path, *(tag("g", tag("title", tip), drawn) for tip, drawn in marks)]

    def end_labels(self, plot: Plot, ends: Sequence[tuple[Finding, float, float]]) -> list[Markup]:
        """The names of lines at the right, none over another. `ends` has the place of each end."""
        return end_labels(plot, [(self.label(finding), x, y) for finding, x, y in ends])

    def label_room(self, findings: Sequence[Finding]) -> float:
        """Right of the axes."""
        return room_beside(map(self.label, findings))

    def height_for(self, findings: Sequence[Finding]) -> float:
        """Of a drawing whose labels stand below one another."""
        return height_for(map(self.label, findings))

    def beside(
        self, plot: Plot, marks: Sequence[tuple[Finding, float, float]], lines: Sequence[Box]
    ) -> tuple[list[Markup], bool]:
        """The names of marks beside them, and whether there was no room for some."""
        names = [self.label(finding) for finding, _, _ in marks]
        frame = plot.frame_box._replace(right=float(WIDTH))
        seats = place_labels([(x, y) for _, x, y in marks], names, frame, lines)
        parts = [self._seated(mark, seat) for mark, seat in zip(marks, seats, strict=True) if seat]
        return parts, None in seats

    def _seated(self, mark: tuple[Finding, float, float], seat: Seat) -> Markup:
        finding, x, y = mark
        label = text(seat.x, seat.y, self.label(finding), seat.anchor, "n")
        lead = [line(x, y, seat.x, seat.y - 4, class_="lead")] if seat.far else []
        return self.coloured(finding, *lead, label)

    def by_wire(self, findings: Sequence[F]) -> list[F]:
        """In the order of all wires."""
        return sorted(findings, key=lambda finding: (self.findings.wires.index(finding.wire), str(finding.algorithm)))

    def legend(self, findings: Sequence[Finding], lined: bool = False) -> Markup:
        """Marks and names of all wires that a figure shows; lined: with the dashes of their lines."""
        items = []
        for name, wire in {self.label(finding): finding.wire for finding in self.by_wire(findings)}.items():
            path = lone("line", x1=1, y1=7, x2=33, y2=7, class_="s", stroke_dasharray=self.palette.dash(wire))
            parts, wide = ([path], 34) if lined else ([], 14)
            mark = self.palette.mark(wire, wide / 2, 7)
            key = tag("svg", *parts, mark, viewBox=f"0 0 {wide} 14", width=wide, height="14", aria_hidden="true")
            items.append(tag("li", key, name, class_=self.palette.colour(wire), data_wire=wire))
        return tag("ul", *items, class_="legend", aria_label="Wires")
