"""A line chart as plain SVG: no library, no script, with a title and a description for screen readers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from narrowcast.figures import COLOURS, Axis, Markup, join, line, lone, mark, points, tag

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 60
MARKS = ("circle", "square", "diamond", "cross")
"""Each line has its own, beside its colour."""
Points = Sequence[tuple[float, float]]


def line_chart(title: str, x_title: str, y_title: str, lines: Mapping[str, Points], ticks: Mapping[float, str]) -> str:
    """Lines over a logarithmic axis; `ticks` names the places on it. The numbers stand in the description too."""
    top = max(y for places in lines.values() for _, y in places)
    step = _round_step(top / 5)
    heights = [number * step for number in range(1 + math.ceil(top / step))]
    across = Axis(list(ticks), LEFT, WIDTH - RIGHT, log=True)
    up = Axis(heights, HEIGHT - BOTTOM, TOP, log=False, zero=True)
    numbers = [
        f"{name}: " + ", ".join(f"{ticks.get(x, x)}: {y:.4g}" for x, y in places) for name, places in lines.items()
    ]
    parts = [
        tag("title", title, id="title"),
        tag("desc", "; ".join(numbers), id="description"),
        lone("rect", width=WIDTH, height=HEIGHT, fill="white"),
        tag("text", title, x=LEFT, y=24, font_size=15),
        *_frame(across, up, ticks, heights, x_title, y_title),
    ]
    for number, (name, places) in enumerate(lines.items()):
        parts += _line([(across.at(x), up.at(y)) for x, y in places], name, number)
    head = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img"}
    font = {"aria_labelledby": "title description", "font_family": "sans-serif", "font_size": 13}
    return tag("svg", join(parts, "\n"), **head, **font) + "\n"


def _round_step(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= step * (1 - 1e-9))


def _frame(
    across: Axis, up: Axis, ticks: Mapping[float, str], heights: Sequence[float], x_title: str, y_title: str
) -> list[Markup]:
    middle = (up.begin + up.end) / 2
    parts = [line(across.begin, up.begin, across.end, up.begin, stroke="#333")]
    for value, name in ticks.items():
        parts.append(tag("text", name, x=across.at(value), y=up.begin + 20, text_anchor="middle"))
    for value in heights:
        parts.append(line(across.begin, up.at(value), across.end, up.at(value), stroke="#ddd"))
        parts.append(tag("text", f"{value:g}", x=LEFT - 8, y=up.at(value) + 4, text_anchor="end"))
    centre = (across.begin + across.end) / 2
    parts.append(tag("text", x_title, x=centre, y=HEIGHT - 18, text_anchor="middle"))
    turned = f"rotate(-90 18 {middle:.0f})"
    return [*parts, tag("text", y_title, x=18, y=middle, text_anchor="middle", transform=turned)]


def _line(places: Points, name: str, number: int) -> list[Markup]:
    colour, shape = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
    paint = {"stroke": colour, "stroke_width": 2} if shape == "cross" else {"fill": colour}
    legend = (LEFT + 10 + 180 * number, 40)
    return [
        lone("polyline", points=points(places), fill="none", stroke=colour, stroke_width=2),
        *(mark(shape, x, y, 4, **paint) for x, y in [*places, legend]),
        tag("text", name, x=legend[0] + 10, y=legend[1] + 4),
    ]
