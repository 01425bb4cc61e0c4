"""Accuracy against speed and over time: which wires are worth having, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, median

from narrowcast.figures import WIDTH, Markup, Plot, lone, pad_range, place_labels, tag, text
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import grouped, one_algorithm, share_words
from narrowcast.study.analysis.findings import Accuracy, Step
from narrowcast.study.analysis.statistics import Conclusion, Interval, holm
from narrowcast.study.analysis.verdict import failed_words
from narrowcast.study.execution.results import Line
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


def _settings(context: Context) -> list[list[Accuracy]]:
    """What was trained, with all wires of a setting together."""
    rows = context.by_wire(context.findings.accuracies)
    same = grouped(rows, lambda row: (row.model, row.data, row.workers, row.parallel, row.min_values))
    return list(same.values())


def _steps_for(context: Context, row: Accuracy) -> list[Step]:
    """The steps of what was trained: the same model, data and wire, and the rest alike where that was timed."""
    names = ("model", "data", "wire", "parallel", "min_values")
    steps = [s for s in context.findings.here if all(getattr(s, name) == getattr(row, name) for name in names)]
    for name in ("algorithm", "transport", "workers", "layout"):
        steps = [s for s in steps if s.line.get(name) == row.line.get(name)] or steps
    return [s for s in steps if s.workers == max(other.workers for other in steps)]


def _slowest_rate(context: Context, rows: Sequence[Accuracy]) -> str | None:
    """The slowest link on which what was trained was timed."""
    steps = [s for row in rows for s in _steps_for(context, row)]
    return min(steps, key=lambda s: (s.rate_bits, s.predicted)).rate_name if steps else None


def _timed_cells(context: Context, row: Accuracy, step: Step) -> tuple[object, ...]:
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
    compared = [s for s in _steps_for(context, row) if s.rate_name == rate and s.speedup is not None]
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


def _labels(context: Context, plot: Plot, points: Sequence[Point]) -> list[Markup]:
    places = [(plot.x.at(p.gain.value), plot.y.at(p.difference.value)) for p in points]
    names = [context.label(p.accuracy) for p in points]
    seats = place_labels(places, names, (plot.x.begin, plot.y.end, WIDTH, plot.y.begin))
    texts = [text(x, y, name, anchor, "n") for (x, y, anchor), name in zip(seats, names, strict=True)]
    return [context.coloured(p.accuracy, label) for p, label in zip(points, texts, strict=True)]


def _trade_panel(context: Context, points: Sequence[Point]) -> Panel:
    margin = context.findings.margin
    heights = [y for p in points for y in vars(p.difference).values() if math.isfinite(y)]
    speeds = [x for p in points for x in vars(p.gain).values()]
    plot = Plot(pad_range([1.0, *speeds], 0.05, log=True), pad_range([*heights, margin, -margin], 0.06))
    plot.add(_band(plot, margin))
    plot.frame(f"speedup over {context.findings.baseline}", "accuracy, points")
    best = _front(points)
    plot.add(plot.polyline([p.gain.value for p in best], [p.difference.value for p in best], "front"))
    # labels last: the whiskers of other wires would cross them out
    plot.add(*(_mark(context, plot, p) for p in points), *_labels(context, plot, points))
    title = context.setting(points[0].step, "model", "data", "workers", "rate_name")
    drawing = plot.markup(f"Accuracy difference against speedup: {title}")
    return Panel(title, drawing, {"data_model": points[0].accuracy.model})


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
            rows.append(TableRow((*_timed_cells(context, p.accuracy, p.step), *numbers, beaten), p.accuracy))
    heads = "model | data | wire | link | workers | speedup (95 %) | difference, points (95 %) | beaten by"
    return Table("Speedup and accuracy", heads, rows, left=4, tail=1)


def trade(context: Context) -> Figure | str:
    if not any(row.difference for row in context.findings.accuracies):
        return f"no wire was trained beside {context.findings.baseline}"
    groups = []
    for same in _settings(context):
        rate = _slowest_rate(context, same)
        points = [p for row in same if rate and (p := _point(context, row, rate)) is not None]
        groups += [points] if len(points) > 1 else []
    if not groups:
        return "what was trained was not timed, so it has no speed"
    return Figure(
        _trade_sentence(context, groups),
        [_trade_panel(context, points) for points in groups],
        f"Up is more accurate than {context.findings.baseline} with the same seeds, right is faster, on the slowest "
        f"link that was timed. The band is the margin of ±{formatting.margin(context.findings.margin)}; "
        "whiskers are 95 % intervals. The thin line joins the wires that no other beats in both.",
        _trade_table(context, groups),
    )


@dataclass(frozen=True)
class Course:
    """A wire's trainings on a link: epochs take as long as its steps."""

    row: Accuracy
    step: Step

    @property
    def epoch_seconds(self) -> float:
        return float(self.row.line["steps_per_epoch"] * self.step.time.value / 1e3)

    @property
    def points(self) -> list[tuple[float, float]]:
        """Seconds, and the mean accuracy over the seeds."""
        curves = [run["curve"] for run in self.row.runs]
        seconds = [float(point["epoch"]) * self.epoch_seconds for point in curves[0]]
        return [(x, fmean(curve[i]["accuracy"] for curve in curves)) for i, x in enumerate(seconds)]

    def reached(self, target: float) -> list[float]:
        """Seconds until each seed reached the target, of those that did."""
        curves = [[p["epoch"] for p in run["curve"] if p["accuracy"] >= target] for run in self.row.runs]
        return [epochs[0] * self.epoch_seconds for epochs in curves if epochs]

    def typical(self, target: float) -> float | None:
        """The median over seeds, where every one reached it."""
        times = self.reached(target)
        return median(times) if len(times) == len(self.row.runs) and not self.row.failed else None


def _target(context: Context, courses: Sequence[Course]) -> float | None:
    """The study's own; without one, what the baseline reaches at its end, less the margin."""
    if not courses:
        return None
    asked = (context.findings.session.get("targets") or {}).get(courses[0].row.data)
    if asked is not None:
        return float(asked)
    plain = [c for c in courses if c.row.wire == context.findings.baseline]
    return plain[0].row.mean.value - context.findings.margin if plain else None


def _has_curve(run: Line) -> bool:
    curve = run.get("curve") or ()
    return bool(curve) and all(point.get("accuracy") is not None for point in curve)


def _courses(context: Context, rows: Sequence[Accuracy], rate: str | None) -> list[Course]:
    courses = []
    for row in rows:
        step = next((s for s in _steps_for(context, row) if s.rate_name == rate), None)
        curves = all(map(_has_curve, row.runs)) and len({len(run["curve"]) for run in row.runs}) == 1
        if step is not None and curves and row.line.get("steps_per_epoch"):
            courses.append(Course(row, step))
    return courses


def _course_panel(context: Context, courses: Sequence[Course], target: float | None) -> Panel:
    xs, ys = zip(*(point for course in courses for point in course.points), strict=True)
    plot = Plot(pad_range(xs, 0.02, log=True), pad_range([*ys, *([target] if target else [])]))
    plot.frame("seconds", "test accuracy, %")
    if target is not None:
        plot.add(plot.polyline([plot.x.low, plot.x.high], [target, target], "target"))
        plot.add(text(plot.x.begin + 4, plot.y.at(target) - 5, f"target {target:.1f} %", "start", "t"))
    for course in courses:
        name = context.label(course.row)
        places = [(x, y, f"{name}: {y:.1f} % after {formatting.significant(x)} s") for x, y in course.points]
        plot.add(context.coloured(course.row, *context.curve(plot, course.row, places, 2.6)))
    step = courses[0].step
    title = context.setting(step, "model", "data", "workers", "rate_name")
    return Panel(title, plot.markup(f"Accuracy over time: {title}"), {"data_model": step.model})


def _of_wire(courses: Sequence[Course], wire: str) -> Course | None:
    """With the algorithm that counts."""
    rows = [course.row for course in courses if course.row.wire == wire]
    chosen = one_algorithm(rows) if rows else None
    return next((course for course in courses if course.row is chosen), None)


def _compared(context: Context, courses: Sequence[Course], target: float | None) -> str | None:
    plain, narrow = (_of_wire(courses, wire) for wire in (context.findings.baseline, context.findings.primary))
    if target is None or plain is None or narrow is None or narrow.row.untouched or narrow.step.untouched:
        return None
    slow, quick = plain.typical(target), narrow.typical(target)
    if slow is None or quick is None:
        return None
    return (
        f"{context.where(narrow.step)} reaches {target:.1f} % on {narrow.row.data} after "
        f"{formatting.significant(quick, 2)} s instead of {formatting.significant(slow, 2)} s "
        f"({formatting.ratio(slow / quick)})"
    )


def _course_sentence(context: Context, groups: Sequence[tuple[Sequence[Course], float | None]]) -> str:
    known = [sentence for courses, target in groups if (sentence := _compared(context, courses, target))]
    if not known:
        return f"Cannot tell: {context.findings.primary} and {context.findings.baseline} do not both reach a target."
    rest, more = len(groups) - len(known), ""
    if rest:
        more = f" In {rest} of {len(groups)} settings a seed does not reach the target, so nothing is claimed."
    shown = known if len(known) < 4 else [*known[:3], f"{len(known) - 3} more in the table"]
    return f"With {context.findings.primary}, {formatting.listed(shown)}.{more}"


def _course_table(context: Context) -> Table:
    """Every rate, not only the one that is drawn."""
    listed = []
    for same in _settings(context):
        rates = {(s.rate_bits, s.rate_name) for row in same for s in _steps_for(context, row)}
        for _, rate in sorted(rates, key=str):
            courses = _courses(context, same, rate)
            target = _target(context, courses)
            listed += [_course_row(context, course, target) for course in courses if target is not None]
    heads = "model | data | wire | link | workers | target % | seeds that reach it | seconds, median | from | to"
    return Table("Seconds until the target is reached", heads, listed, left=4)


def _course_row(context: Context, course: Course, target: float) -> TableRow:
    row, times = course.row, course.reached(target)
    cells = [formatting.significant(f(times)) for f in (median, min, max)] if times else ["", "", ""]
    head = (*_timed_cells(context, row, course.step), f"{target:.1f}", f"{len(times)} of {row.seeds}")
    return TableRow((*head, *cells), row)


def time_to_accuracy(context: Context) -> Figure | str:
    if not context.findings.accuracies:
        return "nothing was trained"
    every = [_courses(context, same, _slowest_rate(context, same)) for same in _settings(context)]
    groups = [(courses, _target(context, courses)) for courses in every if courses]
    if not groups:
        return "what was trained was not timed, or has no curve"
    return Figure(
        _course_sentence(context, groups),
        [_course_panel(context, courses, target) for courses, target in groups],
        "Mean test accuracy over the seeds after each epoch. Accuracy comes from the simulator, which gives the bits "
        "of the cluster; seconds are its steps times the median step measured on the slowest link. A seed counts from "
        "the end of the epoch in which it first reached the target.",
        _course_table(context),
        context.legend([course.row for courses, _ in groups for course in courses]),
    )
