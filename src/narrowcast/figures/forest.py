"""Intervals below one another: a row for each thing, with its name beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast.figures.curves import BOTTOM, Look, axis_across, room_for
from narrowcast.figures.labels import Box
from narrowcast.figures.svg import WIDTH, Axis, Markup, drawing, line, lines, lone, pad_range, tag, text

ROW, TOP, RIGHT = 19, 6, 12


@dataclass(frozen=True)
class Row:
    """An estimate, between what it lies, and what is told of it."""

    name: str
    look: Look
    value: float
    low: float
    high: float
    tip: str
    wire: str | None = None


def _row(one: Row, y: float, across: Axis) -> Markup:
    left, right = (across.at(min(max(end, across.low), across.high)) for end in (one.low, one.high))
    whisker = line(left, y, right, y, class_="e")
    name = text(across.begin - 8, y + 4, one.name, "end", "n")
    mark = one.look.mark(across.at(one.value), y, 4.0)
    return tag("g", tag("title", one.tip), name, whisker, mark, class_=one.look.colour, data_wire=one.wire)


def forest(label: str, rows: Sequence[Row], unit: str, band: tuple[float, float, float], log: bool = False) -> Markup:
    """`band`: where it begins, the line in it, and where it ends."""
    known = [end for one in rows for end in (one.value, one.low, one.high) if math.isfinite(end)]
    left, bottom = room_for(one.name for one in rows), TOP + ROW * len(rows)
    across = Axis(pad_range([*known, *band], 0.05, log), left, WIDTH - RIGHT, log)
    grid, numbers, axis = axis_across(across, TOP, bottom, unit)
    begin, middle, end = map(across.at, band)
    shade = lone("rect", x=begin, y=float(TOP), width=end - begin, height=float(bottom - TOP), class_="band")
    upright = lines([(middle, TOP, middle, bottom)], "ideal")
    marks = [_row(one, TOP + ROW * (i + 0.5), across) for i, one in enumerate(rows)]
    frame = Box(left, TOP, WIDTH - RIGHT, bottom)
    return drawing(WIDTH, bottom + BOTTOM, label, shade, grid, upright, *numbers, *marks, axis, frame=frame)
