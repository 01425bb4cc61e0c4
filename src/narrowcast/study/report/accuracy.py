"""Accuracy by itself and against speed: which wires are worth having, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from narrowcast.figures import HEIGHT, Box, Markup, Plot, lone, pad_range, tag
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import grouped, share_words
from narrowcast.study.analysis.findings import Accuracy, Step
from narrowcast.study.analysis.statistics import Conclusion, Interval, holm
from narrowcast.study.analysis.verdict import failed_words
from narrowcast.study.report.figure import Context, Figure, Panel, Table, TableRow

KEPT = (Conclusion.EQUAL, Conclusion.BETTER)


def _counted(number: int, kind: Conclusion) -> str:
    """`3 are equal`."""
    if kind in KEPT:
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


def accuracy_table(context: Context, rows: Sequence[Accuracy]) -> Table:
    tested = [row for row in rows if row.difference is not None]
    corrected = holm([row.difference.p for row in tested if row.difference is not None])
    among_all = {id(row): p for row, p in zip(tested, corrected, strict=True)}
    cells = [(row, _accuracy_cells(context, row, among_all.get(id(row), 1.0))) for row in rows]
    caption = f"Test accuracy beside {context.findings.baseline}, paired by seed; p (Holm) corrects for all these rows"
    numbers = "workers | seeds | accuracy, % (95 %) | difference, points (95 %) | p (equal) | p (Holm)"
    return context.table(caption, f"model | data | wire | {numbers} | finding", cells, left=3, tail=1)


def _accuracy_cells(context: Context, row: Accuracy, corrected: float) -> tuple[object, ...]:
    head = (row.seeds, formatting.between(row.mean, least=1))
    tested = row.difference
    if tested is None or row.conclusion is None:
        why = ["baseline"] if row.wire == context.findings.baseline else share_words(row) or ["no baseline"]
        return (*head, "", "", "", *why)
    finding = ", ".join([row.conclusion.value, *share_words(row), *failed_words(row)])
    ps = (formatting.p_value(p) for p in (tested.p, corrected))
    return (*head, formatting.difference(tested.interval), *ps, finding)


def settings(context: Context) -> list[list[Accuracy]]:
    """What was trained, with all wires of a setting together."""
    rows = context.by_wire(context.findings.accuracies)
    same = grouped(rows, lambda row: (row.model, row.data, row.workers, row.parallel, row.min_values))
    return list(same.values())


def steps_for(context: Context, row: Accuracy) -> list[Step]:
    """The steps of what was trained: the same model, data and wire, and the rest alike where that was timed."""
    names = ("model", "data", "wire", "parallel", "min_values")
    steps = [s for s in context.findings.here if all(getattr(s, name) == getattr(row, name) for name in names)]
    for name in ("algorithm", "transport", "workers", "layout"):
        steps = [s for s in steps if s.line.get(name) == row.line.get(name)] or steps
    return [s for s in steps if s.workers == max(other.workers for other in steps)]


def slowest_rate(context: Context, rows: Sequence[Accuracy]) -> str | None:
    """The slowest link on which what was trained was timed."""
    steps = [s for row in rows for s in steps_for(context, row)]
    return min(steps, key=lambda s: (s.rate_bits, s.predicted)).rate_name if steps else None


def timed_cells(context: Context, row: Accuracy, step: Step) -> tuple[object, ...]:
    """Model, data, wire, link and workers of a training whose steps were timed."""
    return row.model, row.data, context.label(row), formatting.rate(step.rate_name), step.workers


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

    @property
    def worth_it(self) -> bool:
        return self.accuracy.conclusion in KEPT and self.step.faster is True


def _point(context: Context, row: Accuracy, rate: str | None) -> Point | None:
    compared = [s for s in steps_for(context, row) if s.rate_name == rate and s.speedup is not None]
    if not compared or compared[0].speedup is None:
        return None
    if row.difference is None and row.wire != context.findings.baseline:
        return None
    difference = Interval(0.0, 0.0, 0.0) if row.difference is None else row.difference.interval
    return Point(row, compared[0], compared[0].speedup, difference)


def _front(points: Sequence[Point]) -> list[Point]:
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


def _whiskers(plot: Plot, point: Point) -> list[Box]:
    """Where they are drawn: labels had better stand elsewhere."""
    x, y = plot.x.at(point.gain.value), plot.y.at(point.difference.value)
    left, right = (plot.x.at(end) for end in (point.gain.low, point.gain.high))
    ends = [end for end in (point.difference.high, point.difference.low) if math.isfinite(end)]
    top, bottom = (plot.y.at(end) for end in ends) if ends else (y, y)
    return [Box(left, y - 1, right, y + 1), Box(x - 1, top, x + 1, bottom)]


def _trade_panel(context: Context, points: Sequence[Point]) -> Panel:
    margin = context.findings.margin
    heights = [y for p in points for y in vars(p.difference).values() if math.isfinite(y)]
    speeds = [x for p in points for x in vars(p.gain).values()]
    height = HEIGHT + 5.0 * max(0, len(points) - 8)
    plot = Plot(pad_range([1.0, *speeds], 0.05, log=True), pad_range([*heights, margin, -margin], 0.06), height=height)
    plot.add(_band(plot, margin))
    plot.frame(f"speedup over {context.findings.baseline}", "accuracy, points")
    best = _front(points)
    plot.add(plot.polyline([p.gain.value for p in best], [p.difference.value for p in best], "front"))
    # labels last: the whiskers of other wires would cross them out
    places = [(p.accuracy, plot.x.at(p.gain.value), plot.y.at(p.difference.value)) for p in points]
    labels, unnamed = context.beside(plot, places, [box for p in points for box in _whiskers(plot, p)])
    plot.add(*(_mark(context, plot, p) for p in points), *labels)
    title = context.setting(points[0].step, "model", "data", "workers", "rate_name")
    drawing = plot.markup(f"Accuracy difference against speedup: {title}")
    return Panel(title, drawing, {"data_model": points[0].accuracy.model}, len(points), unnamed)


def _trade_sentence(context: Context, groups: Sequence[Sequence[Point]]) -> str:
    """How many of the wires keep accuracy and are faster, and which is the fastest of them everywhere."""
    named = [grouped(points, lambda p: context.label(p.accuracy)) for points in groups]
    good = [{name for name, same in by_name.items() if all(p.worth_it for p in same)} for by_name in named]
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


def _trade_table(context: Context, groups: Sequence[Sequence[Point]]) -> Table:
    rows = []
    for points in groups:
        best = _front(points)
        for p in points:
            numbers = (formatting.times_between(p.gain), formatting.difference(p.difference))
            beaten = "none" if p in best else "another wire"
            rows.append(TableRow((*timed_cells(context, p.accuracy, p.step), *numbers, beaten), p.accuracy))
    heads = "model | data | wire | link | workers | speedup (95 %) | difference, points (95 %) | beaten by"
    return Table("Speedup and accuracy", heads, rows, left=4, tail=1)


def trade(context: Context) -> Figure | str:
    if not any(row.difference for row in context.findings.accuracies):
        return f"no wire was trained beside {context.findings.baseline}"
    groups = []
    for same in settings(context):
        rate = slowest_rate(context, same)
        points = [p for row in same if rate and (p := _point(context, row, rate)) is not None]
        groups += [points] if len(points) > 1 else []
    if not groups:
        return "what was trained was not timed, so it has no speed"
    panels = [_trade_panel(context, points) for points in groups]
    named = [] if not any(panel.unnamed for panel in panels) else [p.accuracy for points in groups for p in points]
    return Figure(
        _trade_sentence(context, groups),
        panels,
        f"Up is more accurate than {context.findings.baseline} with the same seeds, right is faster, on the slowest "
        f"link that was timed. The band is the margin of ±{formatting.margin(context.findings.margin)}; "
        "whiskers are 95 % intervals. The thin line joins the wires that no other beats in both.",
        _trade_table(context, groups),
        context.legend(named) if named else Markup(""),
    )
