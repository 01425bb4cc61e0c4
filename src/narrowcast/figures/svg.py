"""HTML and SVG as text: tags, axes, marks, and drawings with two axes. No script, no request.

Everything that a user wrote is escaped here, once. Colours, fonts and lines of a `Plot` are in a style sheet, so that
it follows light and dark.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which differ for everybody."""
WIDTH, HEIGHT = 440, 280
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 12, 42
LINE = 13.5
"""From one label to the next below it."""


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


def drawing(width: float, height: float, label: str, *parts: str) -> Markup:
    """An SVG that screen readers take as one picture with a name."""
    box = f"0 0 {width:.0f} {height:.0f}"
    return tag("svg", *parts, viewBox=box, width=f"{width:.0f}", height=f"{height:.0f}", role="img", aria_label=label)


def text(x: float, y: float, words: object, anchor: str = "middle", class_: str | None = None) -> Markup:
    # the style sheet knows the anchors: the middle by itself, b at the beginning, z at the end
    side = {"middle": "", "start": "b", "end": "z"}[anchor]
    return tag("text", words, x=float(x), y=float(y), class_=f"{class_ or ''} {side}".strip() or None)


def lines(ends: Sequence[tuple[float, float, float, float]], class_: str) -> Markup:
    """Many straight lines as one element."""
    path = "".join(f"M{place(a)} {place(b)}L{place(c)} {place(d)}" for a, b, c, d in ends)
    return lone("path", d=path, class_=class_)


def text_width(words: str, size: float = 11.0) -> float:
    """About how wide a label is: the fonts are the reader's."""
    return 0.56 * size * len(words)


def pad_range(values: Sequence[float], share: float = 0.06, log: bool = False) -> list[float]:
    """The range of the values with a margin, as two values."""
    low, high = min(values), max(values)
    if log:
        factor = (high / low) ** share if high > low else 1.5
        return [low / factor, high * factor]
    room = (high - low) * share or abs(high) * share or 1.0
    return [low - room, high + room]


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels apart so that none covers another, keeping their order, within low ... high."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    for previous, this in itertools.pairwise(order):
        moved[this] = max(moved[this], moved[previous] + gap)
    # what was pushed out at the end goes back, and pushes its neighbours
    limit = high
    for index in reversed(order):
        moved[index] = max(low, min(moved[index], limit))
        limit = moved[index] - gap
    return moved


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _inside(a: Box, b: Box) -> bool:
    return b[0] <= a[0] and a[2] <= b[2] and b[1] <= a[1] and a[3] <= b[3]


def _text_box(x: float, y: float, width: float, anchor: str) -> Box:
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return (left, y - 9, left + width, y + 3)


SEATS = ((9, 4, "start"), (0, -10, "middle"), (0, 18, "middle"), (-9, 4, "end"), (9, -8, "start"), (9, 17, "start"))
"""Where a label may stand beside its mark, best first."""


def place_labels(
    marks: Sequence[tuple[float, float]], names: Sequence[str], frame: Box
) -> list[tuple[float, float, str]]:
    """Places and anchors of labels beside their marks, so that they cover neither marks nor one another."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in marks]
    chosen = []
    for (x, y), name in zip(marks, names, strict=True):
        seats = [(x + dx, y + dy, anchor) for dx, dy, anchor in SEATS]
        boxes = [_text_box(*seat[:2], text_width(name), seat[2]) for seat in seats]
        free = [i for i, box in enumerate(boxes) if not any(_overlap(box, other) for other in taken)]
        best = next((i for i in free if _inside(boxes[i], frame)), 0)
        taken.append(boxes[best])
        chosen.append(seats[best])
    return chosen


def number(value: float) -> str:
    return f"{value:g}".replace("-", "\N{MINUS SIGN}")


def tick_names(axis: Axis) -> dict[float, str]:
    """Ticks and what stands beside them."""
    return {tick: number(tick) for tick in axis.ticks()}


class Plot:
    """Axes first, the one across logarithmic, then whatever is drawn on them."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], log_y: bool = False, right: float = RIGHT) -> None:
        self.x = Axis(xs, LEFT, WIDTH - right, log=True)
        self.y = Axis(ys, HEIGHT - BOTTOM, TOP, log_y)
        self.parts: list[Markup] = []

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
        across = {self.x.at(tick): name for tick, name in (x_ticks or tick_names(self.x)).items()}
        up = {self.y.at(tick): name for tick, name in (y_ticks or tick_names(self.y)).items()}
        self.add(lines([(self.x.begin, y, self.x.end, y) for y in up], "grid"))
        self.add(lines([(x, bottom, x, bottom + 4) for x in across], "axis"))
        self.add(line(self.x.begin, bottom, self.x.end, bottom, class_="axis"))
        self.add(*(text(x, bottom + 16, name, class_="t") for x, name in across.items()))
        self.add(*(text(self.x.begin - 6, y + 4, name, "end", "t") for y, name in up.items()))
        self.add(text((self.x.begin + self.x.end) / 2, HEIGHT - 6, x_label, class_="a"))
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
        return drawing(WIDTH, HEIGHT, label, join(self.parts))
