"""Line charts that need no style sheet and are readable without colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast.figures.svg import COLOURS, Axis, Markup, join, line, lone, points, tag

DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4", "12 4", "4 4")
WIDTH, HEIGHT = 700, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 210, 16, 46


@dataclass(frozen=True)
class Series:
    """A line; low and high, where given, are drawn as a band."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def _text(x: float, y: float, words: str, anchor: str = "middle", **more: object) -> Markup:
    return tag("text", words, x=float(x), y=float(y), text_anchor=anchor, **more)


def _across(x: Axis, top: float, bottom: float) -> list[Markup]:
    """Grid lines and numbers of the axis that goes to the right."""
    places = {x.at(tick): f"{tick:g}" for tick in x.ticks()}
    lines = [line(at, top, at, bottom, class_="grid") for at in places]
    return [*lines, *(_text(at, HEIGHT - BOTTOM + 16, name) for at, name in places.items())]


def _frame(x: Axis, y: Axis, x_label: str, y_label: str) -> list[Markup]:
    parts = _across(x, y.end, y.begin)
    for tick in y.ticks():
        parts.append(line(x.begin, y.at(tick), x.end, y.at(tick), class_="grid"))
        parts.append(_text(LEFT - 6, y.at(tick) + 4, f"{tick:g}", "end"))
    middle = (y.begin + y.end) / 2
    parts.append(_text((x.begin + x.end) / 2, HEIGHT - 8, x_label))
    return [*parts, _text(14, middle, y_label, transform=f"rotate(-90 14 {middle:.0f})")]


def _picture(title: str, description: str, parts: Sequence[Markup]) -> Markup:
    inner = join([tag("title", title), *parts], "\n")
    return tag("svg", inner, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=f"{title}. {description}")


def lines(
    title: str,
    description: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    log_x: bool = True,
    log_y: bool = False,
) -> Markup:
    """A chart of lines with their bands and a legend."""
    xs = [x for s in series for x in s.xs]
    ys = [y for s in series for y in (*s.ys, *s.low, *s.high)]
    across = Axis(xs, LEFT, WIDTH - RIGHT, log_x)
    up = Axis(ys, HEIGHT - BOTTOM, TOP, log_y, zero=True)
    parts = _frame(across, up, x_label, y_label)
    gap = min(20.0, (HEIGHT - TOP - 14) / max(1, len(series)))
    for number, s in enumerate(series):
        parts += _line(s, across, up, number, gap)
    return _picture(title, description, parts)


def _line(s: Series, across: Axis, up: Axis, number: int, gap: float) -> list[Markup]:
    def places(ys: Sequence[float]) -> list[tuple[float, float]]:
        return [(across.at(x), up.at(y)) for x, y in zip(s.xs, ys, strict=True)]

    colour, dash = COLOURS[number % len(COLOURS)], DASHES[(number + number // len(COLOURS)) % len(DASHES)]
    style = {"fill": "none", "stroke": colour, "stroke_width": 2, "stroke_dasharray": dash}
    parts = []
    if s.low:
        around = [*places(s.high), *reversed(places(s.low))]
        parts.append(lone("polygon", points=points(around), fill=colour, opacity="0.12"))
    parts.append(tag("polyline", tag("title", s.name), points=points(places(s.ys)), **style))
    y, left = TOP + 14 + gap * number, WIDTH - RIGHT
    return [*parts, line(left + 12, y - 4, left + 40, y - 4, **style), _text(left + 46, y, s.name, "start")]
