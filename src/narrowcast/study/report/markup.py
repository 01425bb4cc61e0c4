"""The parts of a report's page: tables, panels and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from narrowcast.figures import Markup, join, tag
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import Finding

FILTERS = ("model", "wire", "workers")
"""The axes by which the page can be filtered."""


def filter_attributes(finding: Finding, *names: str) -> dict[str, object]:
    """The attributes by which a mark or a row is hidden."""
    return {f"data_{name}": finding.line.get(name) for name in names or FILTERS}


@dataclass(frozen=True)
class TableRow:
    """Cells, and the finding by which the row is filtered."""

    cells: Sequence[object]
    finding: Finding | None = None


@dataclass(frozen=True)
class Table:
    """The first `left` columns and the last `tail` ones are words and stand at the left; numbers stand at the right."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[TableRow]
    left: int = 1
    tail: int = 0
    prose: bool = False
    """Cells are sentences, which may be broken into lines."""

    def markup(self, most: int | None = None) -> Markup:
        """With at most so many rows; what is left out is said."""
        shown = self.rows[:most]
        caption = self.caption
        if len(shown) < len(self.rows):
            caption += f": the first {len(shown)} of {len(self.rows)} rows, to keep the file small; --csv has all"
        heads = tag("tr", *(tag("th", head, scope="col") for head in self.heads))
        body = join(self._row(row) for row in shown)
        inner = (tag("caption", caption), tag("thead", heads), tag("tbody", body))
        table = tag("table", *inner, class_=f"l{self.left} t{self.tail}" + " prose" * self.prose)
        # a part of the page that scrolls must be reachable by keyboard, and have a name
        return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=self.caption)

    def _row(self, row: TableRow) -> Markup:
        first = tag("th", row.cells[0], scope="row")
        others = (tag("td", cell) for cell in row.cells[1:])
        return tag("tr", first, *others, **(filter_attributes(row.finding) if row.finding else {}))


@dataclass(frozen=True)
class Limits:
    """How much of it all a page may hold: a file that nobody can mail is no report."""

    panels: int | None = None
    rows: int | None = None
    data: bool = True


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
    """What it shows, the sentence that it proves, the drawings, how to read them, and the numbers."""

    key: str
    title: str
    sentence: str
    panels: Sequence[Panel]
    reading: str
    table: Table
    legend: Markup = Markup("")
    narrow: bool = False
    """Drawings so small that three stand side by side."""


@dataclass(frozen=True)
class Absent:
    """A figure that these data cannot fill, and why."""

    key: str
    title: str
    why: str


OPEN_PANELS = 6
"""So many drawings are seen at once, half as many again of narrow ones; the rest is a click away."""


def _panels(figure: Figure, limits: Limits) -> Markup:
    count = OPEN_PANELS * 3 // 2 if figure.narrow else OPEN_PANELS
    first, rest = figure.panels[:count], figure.panels[count : limits.panels]
    lost = len(figure.panels) - len(first) - len(rest)
    class_ = "panels narrow" if figure.narrow else "panels"
    parts = [tag("div", *(panel.markup() for panel in first), class_=class_)]
    if rest:
        more = tag("div", *(panel.markup() for panel in rest), class_=class_)
        parts.append(tag("details", tag("summary", formatting.count(len(rest), "more setting")), more, class_="more"))
    if lost:
        parts.append(
            tag("p", f"{formatting.count(lost, 'more setting')} not drawn, to keep the file small.", class_="absent")
        )
    return join(parts)


def _numbers(table: Table, limits: Limits) -> Markup:
    summary = tag("summary", f"The numbers ({len(table.rows)} rows)")
    return tag("details", summary, table.markup(limits.rows), class_="numbers")


def figure_markup(figure: Figure | Absent, number: int, limits: Limits) -> Markup:
    head = tag("h3", tag("span", f"Figure {number}", class_="number"), " ", figure.title, id=f"{figure.key}-title")
    if isinstance(figure, Absent):
        parts = [head, tag("p", f"Left out: {figure.why}.", class_="absent")]
    else:
        parts = [head, tag("p", figure.sentence, class_="proves"), figure.legend, _panels(figure, limits)]
        parts += [tag("p", figure.reading, class_="reading"), _numbers(figure.table, limits)]
    return tag("section", *parts, class_="figure", id=figure.key, aria_labelledby=f"{figure.key}-title")
