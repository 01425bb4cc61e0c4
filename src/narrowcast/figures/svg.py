"""HTML and SVG as text: tags, axes, marks, and drawings with two axes. No script, no request.

Everything that a user wrote is escaped here, once. Colours, fonts and lines of a `Plot` are in a style sheet, so that
it follows light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from narrowcast.figures.labels import Box, apart, text_width

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which differ for everybody."""
WIDTH, HEIGHT = 440, 280
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 12, 42
MOST_TICKS = 7
"""On an axis, where they can be chosen."""


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
        """What is not positive has no place on a logarithmic axis, and stands at its beginning."""
        value = self.low if self.log and value <= 0 else value
        low, high, x = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.begin + (x - low) / (high - low) * (self.end - self.begin)

    def places(self, ticks: Mapping[float, str]) -> dict[float, str]:
        """Where those ticks are that lie on the axis, with their names."""
        return {self.at(tick): name for tick, name in ticks.items() if self.low <= tick <= self.high}

    def ticks(self) -> list[float]:
        """Round numbers within the axis: two or more wherever it is wider than the digits of a float."""
        if self.log and (ticks := self._log_ticks()) and len(ticks) > 2:
            return ticks
        step = 10 ** math.floor(math.log10(self.high - self.low))
        step = next(s for s in (step / 5, step / 2, step, 2 * step) if (self.high - self.low) / s <= MOST_TICKS)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step) + 1)]

    def _log_ticks(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = [10.0**power for power in range(first, last + 1)]
        steps = decades if last - first > 3 else [d * k for d in decades for k in (1, 2, 5)]
        inside = [min(tick, self.high) for tick in steps if self.low <= tick <= self.high * 1.0001]
        return inside[:: -(-len(inside) // MOST_TICKS)] if last - first > 3 else inside


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


def drawing(width: float, height: float, label: str, *parts: str, frame: Box | None = None) -> Markup:
    """An SVG that screen readers take as one picture with a name. frame: where the data are."""
    box = f"0 0 {math.ceil(width)} {math.ceil(height)}"
    size = {"width": f"{width:.0f}", "height": f"{height:.0f}"}
    inside = None if frame is None else " ".join(map(place, frame))
    return tag("svg", *parts, viewBox=box, **size, role="img", aria_label=label, data_frame=inside)


def text(x: float, y: float, words: object, anchor: str = "middle", class_: str | None = None) -> Markup:
    # the style sheet knows the anchors: the middle by itself, b at the beginning, z at the end
    side = {"middle": "", "start": "b", "end": "z"}[anchor]
    return tag("text", words, x=float(x), y=float(y), class_=f"{class_ or ''} {side}".strip() or None)


def lines(ends: Sequence[tuple[float, float, float, float]], class_: str) -> Markup:
    """Many straight lines as one element."""
    path = "".join(f"M{place(a)} {place(b)}L{place(c)} {place(d)}" for a, b, c, d in ends)
    return lone("path", d=path, class_=class_)


def pad_range(values: Sequence[float], share: float = 0.06, log: bool = False) -> list[float]:
    """The range of the values with a margin, as two values."""
    low, high = min(values), max(values)
    if log:
        factor = (high / low) ** share if high > low else 1.5
        return [low / factor, high * factor]
    room = (high - low) * share or abs(high) * share or 1.0
    return [low - room, high + room]


POWERS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float) -> str:
    """Six digits; `2·10⁷` for what would be long."""
    text = f"{value:.6g}"
    if "e" in text or abs(value) >= 1e5:
        digits, _, power = f"{value:.3e}".partition("e")
        digits = f"{float(digits):g}"
        power = f"10{str(int(power)).translate(POWERS)}"
        text = power if digits == "1" else f"{digits}·{power}"
    return text.replace("-", "\N{MINUS SIGN}")


def tick_names(axis: Axis) -> dict[float, str]:
    """Ticks and what stands beside them."""
    return {tick: number(tick) for tick in axis.ticks()}


class Plot:
    """Axes first, the one across logarithmic, then whatever is drawn on them."""

    def __init__(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        log_y: bool = False,
        right: float = RIGHT,
        height: float = HEIGHT,
        log_x: bool = True,
    ) -> None:
        self.height = height
        self.y = Axis(ys, height - BOTTOM, TOP, log_y)
        # the numbers of one axis and the name turned beside them
        left = max(text_width(name, 11.0) for name in tick_names(self.y).values()) + 26
        self.x = Axis(xs, max(float(LEFT), left), WIDTH - right, log_x)
        self.parts: list[Markup] = []

    @property
    def frame_box(self) -> Box:
        """Within the axes."""
        return Box(self.x.begin, self.y.end, self.x.end, self.y.begin)

    def add(self, *parts: Markup) -> None:
        self.parts += parts

    def frame(
        self,
        x_label: str,
        y_label: str,
        x_ticks: Mapping[float, str] | None = None,
        y_ticks: Mapping[float, str] | None = None,
    ) -> None:
        """Grid lines, numbers and names of the axes."""
        bottom, top = self.y.begin, self.y.end
        across = apart(self.x.places(x_ticks or tick_names(self.x)).items(), 0.0, float(WIDTH))
        up = self.y.places(y_ticks or tick_names(self.y))
        self.add(lines([(self.x.begin, y, self.x.end, y) for y in up], "grid"))
        self.add(lines([(x, bottom, x, bottom + 4) for x, _, _ in across], "axis"))
        self.add(line(self.x.begin, bottom, self.x.end, bottom, class_="axis"))
        self.add(*(text(middle, bottom + 16, name, class_="t") for _, name, middle in across))
        self.add(*(text(self.x.begin - 6, y + 4, name, "end", "t") for y, name in up.items()))
        self.add(text((self.x.begin + self.x.end) / 2, self.height - 6, x_label, class_="a"))
        middle = (bottom + top) / 2
        turned = f"rotate(-90 12 {middle:.0f})"
        self.add(tag("text", y_label, x=12.0, y=middle, class_="a", transform=turned))

    def polyline(self, xs: Sequence[float], ys: Sequence[float], class_: str = "s", dash: str | None = None) -> Markup:
        places = [(self.x.at(x), self.y.at(y)) for x, y in zip(xs, ys, strict=True)]
        return lone("polyline", points=points(places), class_=class_, stroke_dasharray=dash)

    def whisker(self, x: float, low: float, high: float) -> Markup:
        """An interval on the y axis, cut at the frame."""
        return line(self.x.at(x), self._inside(low), self.x.at(x), self._inside(high), class_="e")

    def _inside(self, value: float) -> float:
        if not math.isfinite(value):
            return self.y.end if value > 0 else self.y.begin
        return min(self.y.begin, max(self.y.end, self.y.at(value)))

    def whisker_across(self, y: float, low: float, high: float) -> Markup:
        left, right = (min(self.x.end, max(self.x.begin, self.x.at(value))) for value in (low, high))
        return line(left, self.y.at(y), right, self.y.at(y), class_="e")

    def markup(self, label: str) -> Markup:
        return drawing(WIDTH, self.height, label, join(self.parts), frame=self.frame_box)
