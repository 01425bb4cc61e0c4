"""What the pages of `predict` and `advise` share: lines over bandwidths and workers, bars of a step, words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast import figures
from narrowcast.figures import Bar, Look, Markup, Plot, join, pad_range, points, tag
from narrowcast.predict.cluster import Cluster
from narrowcast.predict.step import BANDWIDTHS, Prediction

PARTS = (("p-backward", "compute"), ("p-update", "waiting for stages"), ("p-wire", "communication that is not hidden"))
DECADES = {0.01: "10 Mb/s", 0.1: "100 Mb/s", 1.0: "1", 10.0: "10", 100.0: "100", 1e3: "1 Tb/s", 1e4: "10 Tb/s"}
SEEN = 0.01
"""A difference that a drawing should show."""


@dataclass(frozen=True)
class NamedLine:
    """A line of a figure; low and high, where given, are drawn as a band."""

    name: str
    look: Look
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marked: bool = True


def curves(lines: Sequence[NamedLine], across: str, up: str, more: Sequence[float], ticks: dict[float, str]) -> Plot:
    """Lines with their names at their ends, in a frame that holds them and `more` heights."""
    names = [line.name for line in lines]
    xs = [x for line in lines for x in line.xs]
    ys = [y for line in lines for y in (*line.ys, *line.low, *line.high)]
    room, height = figures.room_beside(names), figures.height_for(names)
    plot = Plot(pad_range(xs, 0.03, log=True), pad_range([*ys, *more], 0.04, log=True), True, room, height)
    plot.frame(across, up, ticks)
    for line in lines:
        plot.add(_curve(plot, line))
    ends = [(line.name, plot.x.at(line.xs[-1]), plot.y.at(line.ys[-1])) for line in lines]
    labels = figures.end_labels(plot, ends)
    plot.add(*(tag("g", text, class_=line.look.colour) for line, text in zip(lines, labels, strict=True)))
    return plot


def _curve(plot: Plot, line: NamedLine) -> Markup:
    parts = [tag("title", line.name), plot.polyline(line.xs, line.ys, dash=line.look.dash)]
    if line.low:
        around = [*zip(line.xs, line.high, strict=True), *zip(line.xs[::-1], line.low[::-1], strict=True)]
        corners = points((plot.x.at(x), plot.y.at(y)) for x, y in around)
        parts.append(figures.lone("polygon", points=corners, class_="between"))
    places = zip(line.xs, line.ys, strict=True) if line.marked else ()
    parts += [line.look.mark(plot.x.at(x), plot.y.at(y)) for x, y in places]
    return tag("g", *parts, class_=line.look.colour)


def below(caption: str, heads: str, rows: Sequence[Sequence[object]], class_: str = "l1") -> Markup:
    """A table behind a click; `heads` has " | " between them."""
    made = figures.table(caption, heads.split(" | "), [figures.row(cells) for cells in rows], class_)
    return figures.numbers(made, len(rows))


@dataclass(frozen=True)
class Proof:
    """A figure: what it proves, the drawing, how to read it, and its numbers."""

    key: str
    title: str
    sentence: str
    panel: str
    drawing: Markup
    reading: str
    table: Markup
    legend: Markup = Markup("")

    def markup(self, number: int) -> Markup:
        drawn = tag("div", figures.panel(self.panel, self.drawing), class_="panels")
        words = tag("p", self.sentence, class_="proves"), tag("p", self.reading, class_="reading")
        return figures.figure(self.key, number, self.title, words[0], self.legend, drawn, words[1], self.table)


def whole(title: str, top: Markup, sections: Sequence[Proof], data: object) -> str:
    """The file."""
    links = figures.navigation([(one.key, one.title) for one in sections])
    made = [one.markup(number) for number, one in enumerate(sections, 1)]
    return figures.document(title, [top, links, tag("main", *made, id="main")], data)


def at_one(plot: Plot) -> Markup:
    """The line of equal speed."""
    return plot.polyline([plot.x.low, plot.x.high], [1.0, 1.0], "ideal")


def ms(*seconds: float) -> list[str]:
    return [f"{1e3 * one:.3g}" if one < 0.1 else f"{1e3 * one:.0f}" for one in seconds]


def rate(bandwidth_gbit: float) -> str:
    return f"{float(f'{bandwidth_gbit:.3g}'):,g} Gb/s"


def gbit(value: float | None) -> str:
    """A break-even bandwidth."""
    if value is None:
        return "never"
    return "at every bandwidth tried" if value == float("inf") else rate(value)


def linked(cluster: Cluster) -> dict[str, str]:
    """For the box beside the verdict."""
    state = "measured" if cluster.measured else "not measured: take the intervals seriously"
    links = "; ".join(f"{one.name}: {rate(one.bandwidth_gbit)}, {one.latency_us:.3g} µs" for one in cluster.levels)
    price = f"${cluster.price_per_hour:g} for a node and an hour" if cluster.price_per_hour else ""
    named = {"Cluster": f"{cluster.name}, {state} ({cluster.source})", "Links": links}
    return {**named, "Device": cluster.device.name, "Price": price}


def bar(name: str, cell: Prediction) -> Bar:
    """What a step is made of, in milliseconds."""
    lengths = (cell.compute - cell.bubble, cell.bubble, max(0.0, cell.exposed))
    parts = [(class_, what, 1e3 * length) for (class_, what), length in zip(PARTS, lengths, strict=True)]
    return Bar(name, parts, *ms(cell.step))


def legend(cells: Sequence[Prediction]) -> Markup:
    shown = [part for part in PARTS if part[0] != "p-update" or any(cell.bubble for cell in cells)]
    return figures.keys(shown, "Parts of a step")


def own_bandwidth(plot: Plot, now: float, words: str) -> Markup:
    """A line where a cluster is, with its name above the frame."""
    x, width = plot.x.at(now), figures.text_width(words, 11.0)
    middle = min(max(x, width / 2 + 1), figures.WIDTH - width / 2 - 1)
    upright = figures.line(x, plot.y.begin, x, plot.y.end, class_="target")
    return join([upright, figures.text(middle, plot.y.end - 2, words, class_="t")])


def told_apart(curves: Sequence[Sequence[float]], own: Sequence[float]) -> slice:
    """Of BANDWIDTHS those that a drawing should have: as far as curves differ from their ends, and all of `own`."""
    moving = [i for curve in curves for i, y in enumerate(curve) if abs(y / curve[-1] - 1) > SEEN]
    last = max([float(BANDWIDTHS[max(moving, default=0)]), *own]) * 3
    first = min([0.1, *own]) / 2
    kept = [i for i, x in enumerate(BANDWIDTHS) if first <= float(x) <= last]
    return slice(kept[0], kept[-1] + 1)
