"""Accuracy over time: when each wire reaches what was asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from narrowcast.figures import HEIGHT, Plot, pad_range, text
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import one_algorithm
from narrowcast.study.analysis.findings import Accuracy, Step
from narrowcast.study.execution.results import Line
from narrowcast.study.report.accuracy import settings, slowest_rate, steps_for, timed_cells
from narrowcast.study.report.figure import Context, Figure, Panel, Table, TableRow


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
        step = next((s for s in steps_for(context, row) if s.rate_name == rate), None)
        curves = all(map(_has_curve, row.runs)) and len({len(run["curve"]) for run in row.runs}) == 1
        if step is not None and curves and row.line.get("steps_per_epoch"):
            courses.append(Course(row, step))
    return courses


def _course_panel(context: Context, courses: Sequence[Course], target: float | None) -> Panel:
    xs, ys = zip(*(point for course in courses for point in course.points), strict=True)
    height = HEIGHT + 5.0 * max(0, len(courses) - 8)
    plot = Plot(pad_range(xs, 0.06, log=True), pad_range([*ys, *([target] if target else [])]), height=height)
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
    return Panel(title, plot.markup(f"Accuracy over time: {title}"), {"data_model": step.model}, len(xs))


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
    for same in settings(context):
        rates = {(s.rate_bits, s.rate_name) for row in same for s in steps_for(context, row)}
        for _, rate in sorted(rates, key=str):
            courses = _courses(context, same, rate)
            target = _target(context, courses)
            listed += [_course_row(context, course, target) for course in courses if target is not None]
    heads = "model | data | wire | link | workers | target % | seeds that reach it | seconds, median | from | to"
    return Table("Seconds until the target is reached", heads, listed, left=4)


def _course_row(context: Context, course: Course, target: float) -> TableRow:
    row, times = course.row, course.reached(target)
    cells = [formatting.significant(f(times)) for f in (median, min, max)] if times else ["", "", ""]
    head = (*timed_cells(context, row, course.step), f"{target:.1f}", f"{len(times)} of {row.seeds}")
    return TableRow((*head, *cells), row)


def time_to_accuracy(context: Context) -> Figure | str:
    if not context.findings.accuracies:
        return "nothing was trained"
    every = [_courses(context, same, slowest_rate(context, same)) for same in settings(context)]
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
        context.legend([course.row for courses, _ in groups for course in courses], lined=True),
    )
