"""Time to accuracy: curves over seconds instead of epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from narrowcast.figures import Plot, pad_range, tag, text
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import grouped, one_algorithm
from narrowcast.study.analysis.findings import Accuracy, Step
from narrowcast.study.execution.results import Line
from narrowcast.study.report.context import Context
from narrowcast.study.report.figures.accuracy_vs_speed import slowest_rate, steps_for
from narrowcast.study.report.markup import Absent, Figure, Panel, Table, TableRow


@dataclass(frozen=True)
class Course:
    """A wire's trainings on a link: epochs take as long as its steps."""

    row: Accuracy
    step: Step

    @property
    def epoch_seconds(self) -> float:
        return float(self.row.line["steps_per_epoch"] * self.step.time.value / 1e3)

    @property
    def epochs(self) -> list[float]:
        return [float(point["epoch"]) for point in self.row.runs[0]["curve"]]

    @property
    def means(self) -> list[float]:
        return [fmean(run["curve"][i]["accuracy"] for run in self.row.runs) for i in range(len(self.epochs))]

    def reached(self, target: float) -> list[float]:
        """Seconds until each seed reached the target, of those that did."""
        epochs = [_first_epoch(run, target) for run in self.row.runs]
        return [epoch * self.epoch_seconds for epoch in epochs if epoch is not None]

    def typical(self, target: float) -> float | None:
        """The median over seeds, where every one reached it."""
        times = self.reached(target)
        return median(times) if len(times) == len(self.row.runs) and not self.row.failed else None


def _first_epoch(run: Line, target: float) -> float | None:
    return next((point["epoch"] for point in run["curve"] if point["accuracy"] >= target), None)


def _target(context: Context, courses: Sequence[Course]) -> float | None:
    """The study's own; without one, what the baseline reaches at its end, less the margin."""
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


def _panel(context: Context, courses: Sequence[Course], target: float | None) -> Panel:
    xs = [epoch * c.epoch_seconds for c in courses for epoch in c.epochs]
    ys = [y for c in courses for y in c.means]
    plot = Plot(pad_range(xs, 0.02, log=True), pad_range([*ys, *([target] if target else [])]), log_x=True)
    plot.frame("seconds", "test accuracy, %")
    if target is not None:
        plot.add(plot.polyline([plot.x.low, plot.x.high], [target, target], "target"))
        plot.add(text(plot.x.begin + 4, plot.y.at(target) - 5, f"target {target:.1f} %", "start", "t"))
    for course in courses:
        times = [epoch * course.epoch_seconds for epoch in course.epochs]
        parts = [plot.polyline(times, course.means, dash=context.palette.dash(course.row.wire))]
        for x, y in zip(times, course.means, strict=True):
            tip = tag("title", f"{context.label(course.row)}: {y:.1f} % after {formatting.significant(x)} s")
            parts.append(tag("g", tip, context.palette.mark(course.row.wire, plot.x.at(x), plot.y.at(y), 2.6)))
        plot.add(context.coloured(course.row, *parts))
    step = courses[0].step
    title = context.setting(step, "model", "data", "workers", "rate_name")
    return Panel(title, plot.markup(f"Accuracy over time: {title}"), {"data_model": step.model})


def _of_wire(courses: Sequence[Course], wire: str) -> Course | None:
    """With the algorithm that counts."""
    rows = [course.row for course in courses if course.row.wire == wire]
    chosen = one_algorithm(rows) if rows else None
    return next((course for course in courses if course.row is chosen), None)


def _compared(context: Context, courses: Sequence[Course], target: float) -> str | None:
    plain, narrow = (_of_wire(courses, wire) for wire in (context.findings.baseline, context.findings.primary))
    if plain is None or narrow is None or narrow.row.untouched or narrow.step.untouched:
        return None
    slow, quick = plain.typical(target), narrow.typical(target)
    if slow is None or quick is None:
        return None
    return (
        f"{context.where(narrow.step)} reaches {target:.1f} % on {narrow.row.data} after "
        f"{formatting.significant(quick, 2)} s instead of {formatting.significant(slow, 2)} s "
        f"({formatting.ratio(slow / quick)})"
    )


def _sentence(context: Context, groups: Sequence[tuple[Sequence[Course], float | None]]) -> str:
    told = [_compared(context, courses, target) for courses, target in groups if target is not None]
    known = [words_ for words_ in told if words_ is not None]
    if not known:
        return f"Cannot tell: {context.findings.primary} and {context.findings.baseline} do not both reach a target."
    rest = len(groups) - len(known)
    more = (
        f" In {rest} of {len(groups)} settings a seed does not reach the target, so nothing is claimed." if rest else ""
    )
    shown = known if len(known) < 4 else [*known[:3], f"{len(known) - 3} more in the table"]
    return f"With {context.findings.primary}, {formatting.listed(shown)}.{more}"


def _table(context: Context, rows: Sequence[Accuracy]) -> Table:
    """Every rate, not only the one that is drawn."""
    listed = []
    for same in grouped(rows, lambda row: (row.model, row.data, row.workers, row.parallel, row.min_values)).values():
        rates = {(s.rate_bits, s.rate_name) for row in same for s in steps_for(context, row)}
        for _, rate in sorted(rates, key=str):
            courses = _courses(context, same, rate)
            target = _target(context, courses) if courses else None
            listed += [_row(context, course, target) for course in courses if target is not None]
    heads = (
        "model",
        "data",
        "wire",
        "link",
        "workers",
        "target %",
        "seeds that reach it",
        "seconds, median",
        "from",
        "to",
    )
    return Table("Seconds until the target is reached", heads, listed, left=4)


def _row(context: Context, course: Course, target: float) -> TableRow:
    times = course.reached(target)
    cells = [formatting.significant(f(times)) for f in (median, min, max)] if times else ["", "", ""]
    row, step = course.row, course.step
    head = (row.model, row.data, context.label(row), formatting.rate(step.rate_name), step.workers, f"{target:.1f}")
    return TableRow((*head, f"{len(times)} of {row.seeds}", *cells), row)


def time_to_accuracy(context: Context) -> Figure | Absent:
    key, title = "when", "Time to accuracy"
    rows = context.by_wire(context.findings.accuracies)
    if not rows:
        return Absent(key, title, "nothing was trained")
    groups = []
    for same in grouped(rows, lambda row: (row.model, row.data, row.workers, row.parallel, row.min_values)).values():
        courses = _courses(context, same, slowest_rate(context, same))
        if courses:
            groups.append((courses, _target(context, courses)))
    if not groups:
        return Absent(key, title, "what was trained was not timed, or has no curve")
    return Figure(
        key,
        title,
        _sentence(context, groups),
        [_panel(context, courses, target) for courses, target in groups],
        "Mean test accuracy over the seeds after each epoch. Accuracy comes from the simulator, which gives the bits "
        "of the cluster; seconds are its steps times the median step measured on the slowest link. A seed counts from "
        "the end of the epoch in which it first reached the target.",
        _table(context, rows),
        context.legend([course.row for courses, _ in groups for course in courses]),
    )
