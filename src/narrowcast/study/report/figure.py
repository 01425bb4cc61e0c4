"""What figures and the sections around them are made of: tables, panels, and names and colours of what they show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, TypeVar

from narrowcast.figures import LINE, Axis, Markup, Plot, join, lines, mark, spread, tag, text, text_width, tick_names
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import Finding
from narrowcast.study.analysis.findings import Findings, Step

F = TypeVar("F", bound=Finding)

FILTERS = ("model", "wire", "workers")
"""The axes by which the page can be filtered."""
OPEN_PANELS = 6
"""So many drawings are seen at once, half as many again of narrow ones; the rest is a click away."""
COLOURS = 8
DASHES = (None, "7 3", "2 3", "9 3 2 3")
SHAPES = ("circle", "square", "diamond", "up", "down", "cross", "ring", "box")
GAP = 9.0
"""From the end of a line to its label."""


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
        heads = tag("tr", *(tag("th", head, scope="col") for head in self.columns))
        body = join(self._row(row) for row in shown)
        inner = (tag("caption", caption), tag("thead", heads), tag("tbody", body))
        table = tag("table", *inner, class_=f"l{self.left} t{self.tail}" + " prose" * self.prose)
        # a part of the page that scrolls must be reachable by keyboard, and have a name
        return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=self.caption)

    def _row(self, row: TableRow) -> Markup:
        first = tag("th", row.cells[0], scope="row")
        hidden = {f"data_{name}": row.finding.line.get(name) for name in FILTERS} if row.finding else {}
        return tag("tr", first, *(tag("td", cell) for cell in row.cells[1:]), **hidden)

    def details(self, limits: Limits) -> Markup:
        """Behind a click."""
        summary = tag("summary", f"The numbers ({len(self.rows)} rows)")
        return tag("details", summary, self.markup(limits.rows), class_="numbers")


@dataclass(frozen=True)
class Panel:
    """One drawing of a figure with its title, hidden with the model or the workers that it shows."""

    title: str
    drawing: Markup
    hidden_by: dict[str, object] = field(default_factory=dict)

    def markup(self) -> Markup:
        return tag("div", tag("p", self.title, class_="panel-title"), self.drawing, class_="panel", **self.hidden_by)


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

    def markup(self, limits: Limits) -> list[Markup]:
        parts = [tag("p", self.sentence, class_="proves"), self.legend, self._panels(limits)]
        return [*parts, tag("p", self.reading, class_="reading"), self.table.details(limits)]

    def _panels(self, limits: Limits) -> Markup:
        count = OPEN_PANELS * 3 // 2 if self.narrow else OPEN_PANELS
        first, rest = self.panels[:count], self.panels[count : limits.panels]
        lost = len(self.panels) - len(first) - len(rest)
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
    """One colour, mark and dash for each wire, the same in every figure; the colours themselves are in report.css.

    The baseline is ink, the primary wire blue, others follow by their bits; after eight, dashes tell them apart.
    """

    def __init__(self, findings: Findings) -> None:
        first = [findings.baseline, findings.primary]
        order = [*first, *(wire for wire in findings.wires if wire not in first)]
        self._slots = {wire: slot for slot, wire in enumerate(order)}

    def colour(self, wire: str) -> str:
        """The class that sets the colour."""
        slot = self._slots[wire]
        return f"w{slot if slot < COLOURS else 1 + (slot - 1) % (COLOURS - 1)}"

    def dash(self, wire: str) -> str | None:
        return DASHES[min(self._slots[wire] // COLOURS, len(DASHES) - 1)]

    def mark(self, wire: str, x: float, y: float, size: float = 3.6) -> Markup:
        return mark(SHAPES[self._slots[wire] % len(SHAPES)], x, y, size)


def room_for(names: Iterable[str]) -> float:
    """Left of a drawing, for the names of its rows."""
    return 12 + max(text_width(name, 11.5) for name in names)


def axis_across(across: Axis, top: float, bottom: float, name: str) -> tuple[Markup, list[Markup], Markup]:
    """Of drawings whose rows have names instead of numbers: grid lines, numbers, and what the axis is called."""
    ticks = {across.at(tick): number for tick, number in tick_names(across).items()}
    numbers = [text(x, bottom + 14, number, class_="t") for x, number in ticks.items()]
    named = text((across.begin + across.end) / 2, bottom + 31, name, class_="a")
    return lines([(x, top, x, bottom) for x in ticks], "grid"), numbers, named


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

    def end_labels(self, plot: Plot, ends: Sequence[tuple[Finding, float]]) -> list[Markup]:
        """The names of lines at their right ends, none over another. `ends` has the height of each."""
        heights = spread([y for _, y in ends], LINE, plot.y.end + 4, plot.y.begin)
        return [
            text(plot.x.end + GAP, height + 4, self.label(finding), "start", "n")
            for (finding, _), height in zip(ends, heights, strict=True)
        ]

    def label_room(self, findings: Sequence[Finding]) -> float:
        return GAP + 4 + max((text_width(self.label(finding)) for finding in findings), default=0.0)

    def by_wire(self, findings: Sequence[F]) -> list[F]:
        """In the order of all wires."""
        return sorted(findings, key=lambda finding: (self.findings.wires.index(finding.wire), str(finding.algorithm)))

    def legend(self, findings: Sequence[Finding]) -> Markup:
        """Marks and names of all wires that a figure shows."""
        items = []
        for name, wire in {self.label(finding): finding.wire for finding in self.by_wire(findings)}.items():
            mark = self.palette.mark(wire, 7, 7)
            key = tag("svg", mark, viewBox="0 0 14 14", width="14", height="14", aria_hidden="true")
            items.append(tag("li", key, name, class_=self.palette.colour(wire), data_wire=wire))
        return tag("ul", *items, class_="legend", aria_label="Wires")
