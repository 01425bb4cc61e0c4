"""HTML and SVG as text, and what every drawing is made of: tags, axes and marks. No script, no request.

Everything that a user wrote is escaped here, once.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which differ for everybody."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def escape(text: object) -> str:
    return text if isinstance(text, Markup) else html.escape(str(text), quote=True)


def place(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    shown = place(value) if isinstance(value, float) else html.escape(str(value), quote=True)
    return f' {name}="{shown}"'


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """`<name attributes>content</name>`. An underscore in a name is a hyphen."""
    head = name + "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{head}>{''.join(escape(part) for part in content)}</{name}>")


def lone(name: str, /, **attributes: object) -> Markup:
    """A tag without content, closed as XML and HTML both accept it."""
    return Markup(f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}/>")


def join(parts: Iterable[str], between: str = "") -> Markup:
    return Markup(between.join(escape(part) for part in parts))


def points(places: Iterable[tuple[float, float]]) -> str:
    """The `points` of a polyline or a polygon."""
    return " ".join(f"{place(x)},{place(y)}" for x, y in places)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> Markup:
    return lone("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **attributes)


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


def mark(shape: str, x: float, y: float, r: float, **attributes: object) -> Markup:
    """A mark of about the same weight whatever its shape; a style sheet knows the classes m, o (open) and x."""
    attributes = attributes or {"class_": {"ring": "m o", "box": "m o", "cross": "x"}.get(shape, "m")}
    match shape:
        case "circle" | "ring":
            return lone("circle", cx=float(x), cy=float(y), r=float(r), **attributes)
        case "square" | "box":
            side = 2.0 * r
            return lone("rect", x=float(x - r), y=float(y - r), width=side, height=side, **attributes)
        case "diamond":
            corners = [(x, y - 1.35 * r), (x + 1.35 * r, y), (x, y + 1.35 * r), (x - 1.35 * r, y)]
        case "up":
            corners = [(x, y - 1.3 * r), (x + 1.2 * r, y + r), (x - 1.2 * r, y + r)]
        case "down":
            corners = [(x, y + 1.3 * r), (x + 1.2 * r, y - r), (x - 1.2 * r, y - r)]
        case _:
            path = f"M{x - r:.1f} {y - r:.1f}l{2 * r:.1f} {2 * r:.1f}m0 {-2 * r:.1f}l{-2 * r:.1f} {2 * r:.1f}"
            return lone("path", d=path, **attributes)
    return lone("polygon", points=points(corners), **attributes)
