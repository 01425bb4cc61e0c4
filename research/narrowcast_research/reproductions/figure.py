"""A line chart as plain SVG: no library, no script, with a title and a description for screen readers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 60
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Okabe and Ito's, which the colour-blind can tell apart; each line also has its own mark."""
MARKS = ("circle", "square", "diamond", "cross")
Points = Sequence[tuple[float, float]]


def line_chart(title: str, x_title: str, y_title: str, lines: Mapping[str, Points], ticks: Mapping[float, str]) -> str:
    """Lines over a logarithmic axis; `ticks` names the places on it. The numbers stand in the description too."""
    place = _Scales(lines, ticks)
    told = "; ".join(f"{name}: " + ", ".join(f"{ticks.get(x, x)}: {y:.4g}" for x, y in p) for name, p in lines.items())
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-labelledby="title description" font-family="sans-serif" font-size="13">'
    )
    parts = [
        opening,
        f'<title id="title">{escape(title)}</title><desc id="description">{escape(told)}</desc>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
        *_axes(place, x_title, y_title, ticks),
    ]
    for number, (name, points) in enumerate(lines.items()):
        parts += _line(place, name, points, number)
    return "\n".join([*parts, "</svg>", ""])


class _Scales:
    """From figures to pixels."""

    def __init__(self, lines: Mapping[str, Points], ticks: Mapping[float, str]) -> None:
        self._first, self._last = math.log2(min(ticks)), math.log2(max(ticks))
        top = max(y for points in lines.values() for _, y in points)
        self.step = _nice(top / 5)
        self.top = self.step * math.ceil(top / self.step)

    def x(self, value: float) -> float:
        share = (math.log2(value) - self._first) / ((self._last - self._first) or 1)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM), 1)


def _nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= step * (1 - 1e-9))


def _axes(place: _Scales, x_title: str, y_title: str, ticks: Mapping[float, str]) -> list[str]:
    floor, right = place.y(0), WIDTH - RIGHT
    parts = [f'<line x1="{LEFT}" y1="{floor}" x2="{right}" y2="{floor}" stroke="#333"/>']
    for value, name in ticks.items():
        parts.append(f'<text x="{place.x(value)}" y="{floor + 20}" text-anchor="middle">{escape(name)}</text>')
    for number in range(1 + round(place.top / place.step)):
        height = place.y(number * place.step)
        parts.append(f'<line x1="{LEFT}" y1="{height}" x2="{right}" y2="{height}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height + 4}" text-anchor="end">{number * place.step:g}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 18}" text-anchor="middle">{escape(x_title)}</text>')
    turned = f'transform="rotate(-90 18 {middle})"'
    parts.append(f'<text x="18" y="{middle}" text-anchor="middle" {turned}>{escape(y_title)}</text>')
    return parts


def _line(place: _Scales, name: str, points: Points, number: int) -> list[str]:
    colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
    seats = [(place.x(x), place.y(y)) for x, y in points]
    path = " ".join(f"{x},{y}" for x, y in seats)
    legend = (LEFT + 10 + 180 * number, 40)
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(_mark(mark, x, y, colour) for x, y in [*seats, legend]),
        f'<text x="{legend[0] + 10}" y="{legend[1] + 4}">{escape(name)}</text>',
    ]


def _mark(mark: str, x: float, y: float, colour: str) -> str:
    if mark == "circle":
        return f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>'
    if mark == "square":
        return f'<rect x="{x - 4}" y="{y - 4}" width="8" height="8" fill="{colour}"/>'
    if mark == "diamond":
        return f'<path d="M{x} {y - 5}l5 5-5 5-5-5z" fill="{colour}"/>'
    return f'<path d="M{x - 4} {y - 4}l8 8m0-8l-8 8" stroke="{colour}" stroke-width="2"/>'
