"""Line charts and stacked bars as plain SVG: no script, no request, readable without colour."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which differ for everybody."""
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


class Axis:
    """Numbers to places; logarithmic where asked for."""

    def __init__(self, values: Sequence[float], begin: float, end: float, log: bool, zero: bool = False) -> None:
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0, 2.0]
        self.low, self.high = (0.0 if zero and not log else min(finite)), max(finite)
        if self.low == self.high:
            self.high = self.low * 2 if self.low else 1.0
        self.begin, self.end, self.log = begin, end, log

    def at(self, value: float) -> float:
        low, high, x = (math.log(v) if self.log else v for v in (self.low, self.high, max(value, self.low)))
        return self.begin + (x - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            decades = [10.0**power for power in range(first, last + 1)]
            steps = decades if last - first > 3 else [d * k for d in decades for k in (1, 2, 5)]
            return [tick for tick in steps if self.low <= tick <= self.high * 1.0001]
        step = 10 ** math.floor(math.log10(self.high - self.low))
        step = next(s for s in (step / 5, step / 2, step, 2 * step) if (self.high - self.low) / s <= 7)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step) + 1)]


def _text(x: float, y: float, words: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{html.escape(words)}</text>'


def _frame(x: Axis, y: Axis, x_label: str, y_label: str) -> list[str]:
    parts = []
    for tick in x.ticks():
        parts.append(f'<line class="grid" x1="{x.at(tick):.1f}" x2="{x.at(tick):.1f}" y1="{y.begin}" y2="{y.end}"/>')
        parts.append(_text(x.at(tick), HEIGHT - BOTTOM + 16, f"{tick:g}"))
    for tick in y.ticks():
        parts.append(f'<line class="grid" x1="{x.begin}" x2="{x.end}" y1="{y.at(tick):.1f}" y2="{y.at(tick):.1f}"/>')
        parts.append(_text(LEFT - 6, y.at(tick) + 4, f"{tick:g}", "end"))
    parts.append(_text((x.begin + x.end) / 2, HEIGHT - 8, x_label))
    turned = f' transform="rotate(-90 14 {(y.begin + y.end) / 2:.0f})"'
    return [*parts, _text(14, (y.begin + y.end) / 2, y_label, extra=turned)]


def _wrap(title: str, description: str, parts: Sequence[str]) -> str:
    label = html.escape(f"{title}. {description}", quote=True)
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", *parts, "</svg>"])


def lines(
    title: str,
    description: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    log_x: bool = True,
    log_y: bool = False,
) -> str:
    """A chart of lines with their bands and a legend."""
    xs = [x for s in series for x in s.xs]
    ys = [y for s in series for y in (*s.ys, *s.low, *s.high)]
    across = Axis(xs, LEFT, WIDTH - RIGHT, log_x)
    up = Axis(ys, HEIGHT - BOTTOM, TOP, log_y, zero=True)
    parts = _frame(across, up, x_label, y_label)
    gap = min(20.0, (HEIGHT - TOP - 14) / max(1, len(series)))
    for number, s in enumerate(series):
        parts += _line(s, across, up, number, gap)
    return _wrap(title, description, parts)


def _line(s: Series, across: Axis, up: Axis, number: int, gap: float) -> list[str]:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[(number + number // len(COLOURS)) % len(DASHES)]
    parts = []
    if s.low:
        there = [f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in zip(s.xs, s.high, strict=True)]
        back = [f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in zip(s.xs, s.low, strict=True)]
        parts.append(f'<polygon points="{" ".join([*there, *reversed(back)])}" fill="{colour}" opacity="0.12"/>')
    points = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in zip(s.xs, s.ys, strict=True))
    style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
    parts.append(f'<polyline points="{points}" {style}><title>{html.escape(s.name)}</title></polyline>')
    y = TOP + 14 + gap * number
    legend = f'<line x1="{WIDTH - RIGHT + 12}" x2="{WIDTH - RIGHT + 40}" y1="{y - 4:g}" y2="{y - 4:g}" {style}/>'
    return [*parts, legend, _text(WIDTH - RIGHT + 46, y, s.name, "start")]


def bars(title: str, description: str, names: Sequence[str], stacks: dict[str, Sequence[float]], x_label: str) -> str:
    """Horizontal bars, one a name, made of parts."""
    totals = [sum(values[i] for values in stacks.values()) for i in range(len(names))]
    margin = 110 if max(map(len, names)) <= 14 else 170
    across = Axis([0.0, *totals], margin, WIDTH - RIGHT, log=False, zero=True)
    high = (HEIGHT - BOTTOM - TOP) / max(1, len(names))
    parts = []
    for tick in across.ticks():
        x = f"{across.at(tick):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(_text(across.at(tick), HEIGHT - BOTTOM + 16, f"{tick:g}"))
    for row, name in enumerate(names):
        y, begin = TOP + row * high, 0.0
        parts.append(_text(margin - 6, y + high / 2 + 4, name, "end"))
        for number, (part, values) in enumerate(stacks.items()):
            left, right = across.at(begin), across.at(begin + values[row])
            shape = f'<rect x="{left:.1f}" y="{y + 4:.1f}" width="{max(0.0, right - left):.1f}" height="{high - 8:.1f}"'
            note = f"<title>{html.escape(f'{name}: {part} {values[row]:.4g}')}</title>"
            parts.append(f'{shape} fill="{COLOURS[number]}" stroke="#fff">{note}</rect>')
            begin += values[row]
    for number, part in enumerate(stacks):
        y = TOP + 14 + 20 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{y - 10}" width="14" height="12" fill="{COLOURS[number]}"/>')
        parts.append(_text(WIDTH - RIGHT + 32, y, part, "start"))
    return _wrap(title, description, [*parts, _text(WIDTH / 2 - 40, HEIGHT - 8, x_label)])
