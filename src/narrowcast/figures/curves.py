"""What lines and rows of many things share: a look for each, and labels beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from narrowcast.figures.labels import LINE, Box, apart, spread, text_width
from narrowcast.figures.svg import (
    HEIGHT,
    WIDTH,
    Axis,
    Markup,
    Plot,
    drawing,
    join,
    line,
    lines,
    mark,
    number,
    tag,
    text,
    tick_names,
)

COLOURS = 8
DASHES = (None, "7 3", "2 3", "9 3 2 3")
SHAPES = ("circle", "square", "diamond", "up", "down", "cross", "ring", "box")
GAP, CROWDED = 9.0, 24.0
"""From the end of a line to its label; of many, which stand where there is room, with lines that lead to them."""
MANY = 6
BAR, SPACE, TOP, BOTTOM = 16, 7, 4, 36


@dataclass(frozen=True)
class Look:
    """Colour, mark and dash of the n-th thing: colours are in page.css.

    The first is ink. Seven other colours and eight marks take turns of their own, so that 57 things differ by both
    together; after eight, dashes differ, too.
    """

    slot: int

    @property
    def colour(self) -> str:
        """The class that sets the colour."""
        return f"w{self.slot if self.slot < COLOURS else 1 + (self.slot - 1) % (COLOURS - 1)}"

    @property
    def dash(self) -> str | None:
        return DASHES[self.slot // COLOURS % len(DASHES)]

    def mark(self, x: float, y: float, size: float = 3.6) -> Markup:
        return mark(SHAPES[self.slot % len(SHAPES)], x, y, size)


def _gap(count: int) -> float:
    return CROWDED if count > MANY else GAP


def room_beside(names: Iterable[str]) -> float:
    """Right of the axes, for names at the ends of lines."""
    different = set(names)
    return _gap(len(different)) + 4 + max(map(text_width, different), default=0.0)


def height_for(names: Iterable[str]) -> float:
    """Of a drawing whose labels stand below one another."""
    return max(float(HEIGHT), LINE * len(set(names)) + 70)


def end_labels(plot: Plot, ends: Sequence[tuple[str, float, float]]) -> list[Markup]:
    """The names of lines at the right, none over another. `ends` has the place of each end."""
    gap = _gap(len(ends))
    heights = spread([y for _, _, y in ends], LINE, plot.y.end + 4, plot.y.begin)
    labels = []
    for (name, x, y), height in zip(ends, heights, strict=True):
        label = text(plot.x.end + gap, height + 4, name, "start", "n")
        near = abs(height - y) < LINE / 2 and gap == GAP
        labels.append(label if near else join([line(x + 5, y, plot.x.end + gap - 3, height, class_="lead"), label]))
    return labels


def room_for(names: Iterable[str]) -> float:
    """Left of a drawing, for the names of its rows."""
    return 12 + max(text_width(name) for name in names)


def axis_across(across: Axis, top: float, bottom: float, name: str) -> tuple[Markup, list[Markup], Markup]:
    """Of drawings whose rows have names instead of numbers: grid lines, numbers, and what the axis is called."""
    ticks = ((across.at(tick), number) for tick, number in tick_names(across).items())
    shown = apart(ticks, 0.0, float(WIDTH))
    numbers = [text(middle, bottom + 14, number, class_="t") for _, number, middle in shown]
    named = text((across.begin + across.end) / 2, bottom + 31, name, class_="a")
    return lines([(x, top, x, bottom) for x, _, _ in shown], "grid"), numbers, named


@dataclass(frozen=True)
class Bar:
    """A row: its parts, as classes of page.css with numbers, and what stands behind it."""

    name: str
    parts: Sequence[tuple[str, str, float]]
    """Class, name and length."""
    behind: str
    wire: str | None = None

    @property
    def whole(self) -> float:
        return sum(length for _, _, length in self.parts)


def _bar(bar: Bar, y: float, across: Axis) -> Markup:
    parts, begin = [], 0.0
    for class_, what, length in bar.parts:
        left, right = across.at(begin), across.at(begin + length)
        if right - left >= 0.05:
            box = {"x": left, "y": y, "width": right - left, "height": float(BAR)}
            parts.append(tag("rect", tag("title", f"{what} {number(float(f'{length:.3g}'))}"), **box, class_=class_))
        begin += length
    total = text(across.at(begin) + 5, y + BAR - 4, bar.behind, "start", "t")
    name = text(across.begin - 8, y + BAR - 4, bar.name, "end", "n")
    return tag("g", name, *parts, total, data_wire=bar.wire)


def bars(label: str, rows: Sequence[Bar], unit: str) -> Markup:
    """Rows from zero, made of parts."""
    behind = max(text_width(row.behind, 11.0) for row in rows)
    bottom = TOP + (BAR + SPACE) * len(rows)
    left = room_for(row.name for row in rows)
    across = Axis([0.0, *(row.whole for row in rows)], left, WIDTH - behind - 8, log=False, zero=True)
    grid, numbers, axis = axis_across(across, TOP, bottom, unit)
    drawn = [_bar(row, TOP + (BAR + SPACE) * i, across) for i, row in enumerate(rows)]
    frame = Box(across.begin, TOP, across.end, bottom)
    return drawing(WIDTH, bottom + BOTTOM, label, grid, *numbers, *drawn, axis, frame=frame)


def keys(parts: Sequence[tuple[str, str]], label: str) -> Markup:
    """What the colours of bars stand for: classes and names."""
    items = [tag("li", tag("span", class_=f"key {class_}", aria_hidden="true"), name) for class_, name in parts]
    return tag("ul", *items, class_="legend", aria_label=label)
