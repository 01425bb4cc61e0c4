"""Accuracy against speed: which wires are worth having, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from narrowcast.figures import Markup, Plot, lone, pad_range, place_labels, tag, text
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import grouped, share_words
from narrowcast.study.analysis.findings import Accuracy, Step
from narrowcast.study.analysis.statistics import Conclusion, Interval, holm
from narrowcast.study.analysis.verdict import failed_words
from narrowcast.study.report.context import Context
from narrowcast.study.report.markup import Absent, Figure, Panel, Table, TableRow


@dataclass(frozen=True)
class Point:
    """A wire: how fast, and how accurate beside the baseline."""

    accuracy: Accuracy
    step: Step
    gain: Interval
    difference: Interval

    def beats(self, other: Point) -> bool:
        at_least = self.gain.value >= other.gain.value and self.difference.value >= other.difference.value
        return at_least and (self.gain.value, self.difference.value) != (other.gain.value, other.difference.value)


def steps_for(context: Context, row: Accuracy) -> list[Step]:
    """The steps of what was trained: the same model, data and wire, and the rest alike where that was timed."""
    steps = [
        s
        for s in context.findings.here
        if (s.model, s.data, s.wire, s.parallel, s.min_values)
        == (row.model, row.data, row.wire, row.parallel, row.min_values)
    ]
    for name in ("algorithm", "transport", "workers", "layout"):
        steps = [s for s in steps if s.line.get(name) == row.line.get(name)] or steps
    return [s for s in steps if s.workers == max(other.workers for other in steps)]


def _point(context: Context, row: Accuracy, rate: str) -> Point | None:
    step = next((s for s in steps_for(context, row) if s.rate_name == rate and s.speedup is not None), None)
    if step is None or step.speedup is None:
        return None
    if row.difference is None and row.wire != context.findings.baseline:
        return None
    difference = Interval(0.0, 0.0, 0.0) if row.difference is None else row.difference.interval
    return Point(row, step, step.speedup, difference)


def slowest_rate(context: Context, rows: Sequence[Accuracy]) -> str | None:
    """The slowest link on which what was trained was timed."""
    steps = [s for row in rows for s in steps_for(context, row)]
    return min(steps, key=lambda s: (s.rate_bits, s.predicted)).rate_name if steps else None


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both, from slow to fast."""
    best = [p for p in points if not any(other.beats(p) for other in points)]
    return sorted(best, key=lambda p: p.gain.value)


def _band(plot: Plot, margin: float) -> Markup:
    top, bottom = (min(plot.y.begin, max(plot.y.end, plot.y.at(y))) for y in (margin, -margin))
    return lone("rect", x=plot.x.begin, y=top, width=plot.x.end - plot.x.begin, height=bottom - top, class_="band")


def _mark(context: Context, plot: Plot, point: Point) -> Markup:
    row, x, y = point.accuracy, point.gain.value, point.difference.value
    tip = f"{context.label(row)}: {formatting.times_between(point.gain)} as fast, {formatting.points(point.difference)}"
    parts = [
        tag("title", tip),
        plot.whisker(x, point.difference.low, point.difference.high),
        plot.whisker_across(y, point.gain.low, point.gain.high),
        context.palette.mark(row.wire, plot.x.at(x), plot.y.at(y), 4.2),
    ]
    return context.coloured(row, *parts)


def _labels(context: Context, plot: Plot, points: Sequence[Point]) -> list[Markup]:
    places = [(plot.x.at(p.gain.value), plot.y.at(p.difference.value)) for p in points]
    names = [context.label(p.accuracy) for p in points]
    seats = place_labels(places, names, (plot.x.begin, plot.y.end, plot.width, plot.y.begin))
    texts = [text(x, y, name, anchor, "n") for (x, y, anchor), name in zip(seats, names, strict=True)]
    return [context.coloured(p.accuracy, label) for p, label in zip(points, texts, strict=True)]


def _panel(context: Context, points: Sequence[Point]) -> Panel:
    margin = context.findings.margin
    heights = [y for p in points for y in (p.difference.value, p.difference.low, p.difference.high) if math.isfinite(y)]
    speeds = [x for p in points for x in (p.gain.value, p.gain.low, p.gain.high)]
    plot = Plot(pad_range([1.0, *speeds], 0.05, log=True), pad_range([*heights, margin, -margin], 0.06), log_x=True)
    plot.add(_band(plot, margin))
    plot.frame(f"speedup over {context.findings.baseline}", "accuracy, points")
    best = front(points)
    plot.add(plot.polyline([p.gain.value for p in best], [p.difference.value for p in best], "front"))
    # labels last: the whiskers of other wires would cross them out
    plot.add(*(_mark(context, plot, p) for p in points), *_labels(context, plot, points))
    title = context.setting(points[0].step, "model", "data", "workers", "rate_name")
    drawing = plot.markup(f"Accuracy difference against speedup: {title}")
    return Panel(title, drawing, {"data_model": points[0].accuracy.model})


def _worth_it(point: Point) -> bool:
    kept = point.accuracy.conclusion in (Conclusion.EQUAL, Conclusion.BETTER)
    return kept and point.step.faster is True


def _sentence(context: Context, groups: Sequence[Sequence[Point]]) -> str:
    """How many of the wires keep accuracy and are faster, and which is the fastest of them everywhere."""
    named = [grouped(points, lambda p: context.label(p.accuracy)) for points in groups]
    good = [{name for name, same in by_name.items() if all(map(_worth_it, same))} for by_name in named]
    everywhere = set.intersection(*good)
    if not everywhere:
        return "No wire is shown to be both faster and equal in accuracy in every one of these settings."
    mean = {
        name: geometric_mean(p.gain.value for by_name in named for p in by_name.get(name, ())) for name in everywhere
    }
    best = max(mean, key=lambda name: mean[name])
    names = formatting.listed(sorted(everywhere, key=lambda name: -mean[name]))
    verb = "is" if len(everywhere) == 1 else "are"
    fastest = f"the fastest is {best}, {formatting.ratio(mean[best])} on average"
    return f"Faster with accuracy kept in every setting {verb} {names}; {fastest}."


def accuracy_table(context: Context, rows: Sequence[Accuracy]) -> Table:
    tested = [row for row in rows if row.difference is not None]
    corrected = holm([row.difference.p for row in tested if row.difference is not None])
    among_all = {id(row): p for row, p in zip(tested, corrected, strict=True)}
    cells = [TableRow(_accuracy_cells(context, row, among_all.get(id(row), 1.0)), row) for row in rows]
    numbers = ("workers", "seeds", "accuracy, % (95 %)", "difference, points (95 %)", "p (equal)", "p (Holm)")
    caption = f"Test accuracy beside {context.findings.baseline}, paired by seed; p (Holm) corrects for all these rows"
    return Table(caption, ("model", "data", "wire", *numbers, "finding"), cells, left=3, tail=1)


def _counted(number: int, kind: Conclusion) -> str:
    """`3 are equal`."""
    if kind in (Conclusion.EQUAL, Conclusion.BETTER):
        return f"{number} {'is' if number == 1 else 'are'} {kind.value}"
    return f"{number} {'lost more' if kind is Conclusion.LOST else 'cannot be told'}"


def accuracy_sentence(context: Context) -> str:
    conclusions = [row.conclusion for row in context.findings.accuracies if row.conclusion is not None]
    if not conclusions:
        return f"Cannot tell: nothing was trained beside {context.findings.baseline} with the same seeds."
    counts = [_counted(conclusions.count(kind), kind) for kind in Conclusion if kind in conclusions]
    return (
        f"Of {formatting.count(len(conclusions), 'comparison')} with {context.findings.baseline}, at a margin of "
        f"{formatting.margin(context.findings.margin)}, {formatting.listed(counts)}."
    )


def _accuracy_cells(context: Context, row: Accuracy, corrected: float) -> tuple[object, ...]:
    head = (row.model, row.data, context.label(row), row.workers, row.seeds, formatting.between(row.mean, least=1))
    tested = row.difference
    if tested is None:
        why = ["baseline"] if row.wire == context.findings.baseline else share_words(row) or ["no baseline"]
        return (*head, "", "", "", *why)
    difference = formatting.points(tested.interval).replace(" points", "")
    assert row.conclusion is not None
    finding = ", ".join([row.conclusion.value, *share_words(row), *failed_words(row)])
    return (*head, difference, formatting.p_value(tested.p), formatting.p_value(corrected), finding)


def _table(context: Context, groups: Sequence[Sequence[Point]]) -> Table:
    rows = []
    for points in groups:
        best = front(points)
        for p in points:
            head = (
                p.step.model,
                p.step.data,
                context.label(p.accuracy),
                formatting.rate(p.step.rate_name),
                p.step.workers,
            )
            numbers = (formatting.times_between(p.gain), formatting.points(p.difference).replace(" points", ""))
            rows.append(TableRow((*head, *numbers, "none" if p in best else "another wire"), p.accuracy))
    heads = ("model", "data", "wire", "link", "workers", "speedup (95 %)", "difference, points (95 %)", "beaten by")
    return Table("Speedup and accuracy", heads, rows, left=4, tail=1)


def trade(context: Context) -> Figure | Absent:
    key, title = "trade", "Accuracy against speed"
    rows = context.findings.accuracies
    if not any(row.difference for row in rows):
        return Absent(key, title, f"no wire was trained beside {context.findings.baseline}")
    panels, groups = [], []
    for same in grouped(
        context.by_wire(rows), lambda row: (row.model, row.data, row.workers, row.parallel, row.min_values)
    ).values():
        rate = slowest_rate(context, same)
        points = [p for row in same if rate and (p := _point(context, row, rate)) is not None]
        if len(points) > 1:
            groups.append(points)
            panels.append(_panel(context, points))
    if not groups:
        return Absent(key, title, "what was trained was not timed, so it has no speed")
    return Figure(
        key,
        title,
        _sentence(context, groups),
        panels,
        f"Up is more accurate than {context.findings.baseline} with the same seeds, right is faster, on the slowest "
        f"link that was timed. The band is the margin of ±{formatting.margin(context.findings.margin)}; "
        "whiskers are 95 % intervals. The thin line joins the wires that no other beats in both.",
        _table(context, groups),
    )
