"""Predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from narrowcast.figures import Markup, Plot, lone, pad_range, points, tag
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.findings import Step
from narrowcast.study.report.context import Context
from narrowcast.study.report.markup import Absent, Figure, Panel, Table, TableRow

BAND = 0.10


def _error(step: Step) -> float:
    assert step.forecast is not None
    return step.forecast.value / step.time.value - 1


def _mark(context: Context, plot: Plot, step: Step, height: float) -> Markup:
    assert step.forecast is not None
    tip = f"{context.label(step)}, {context.where(step)}: {formatting.percent(_error(step))}"
    parts = [
        tag("title", tip),
        context.palette.mark(step.wire, plot.x.at(step.time.value), plot.y.at(height), 3.0),
    ]
    return context.coloured(step, *parts, hide=("wire", "model", "workers"))


def _band(plot: Plot, edge: Sequence[tuple[float, float]]) -> Markup:
    places = [(plot.x.at(x), plot.y.at(y)) for x, y in edge]
    return lone("polygon", points=points(places), class_="band")


def _times(context: Context, steps: Sequence[Step]) -> Panel:
    values = [v for s in steps if s.forecast for v in (s.time.value, s.forecast.value)]
    low, high = pad_range(values, 0.05, log=True)
    plot = Plot([low, high], [low, high], log_x=True, log_y=True)
    factor = 1 + BAND
    top = [(low, low), (low, low * factor), (high / factor, high), (high, high)]
    plot.add(_band(plot, [*top, (high, high / factor), (low * factor, low)]))
    plot.frame("measured step, ms", "predicted step, ms")
    plot.add(plot.polyline([low, high], [low, high], "ideal"))
    plot.add(*(_mark(context, plot, step, step.forecast.value) for step in steps if step.forecast))
    return Panel(
        "Step times", plot.markup("Predicted step time against measured step time, with a band of ten per cent")
    )


def _errors(context: Context, steps: Sequence[Step]) -> Panel:
    errors = [100 * _error(step) for step in steps]
    xs, tenth = pad_range([step.time.value for step in steps], 0.05, log=True), 100 * BAND
    plot = Plot(xs, pad_range([*errors, -1.5 * tenth, 1.5 * tenth]), log_x=True)
    plot.add(_band(plot, [(xs[0], -tenth), (xs[1], -tenth), (xs[1], tenth), (xs[0], tenth)]))
    plot.frame("measured step, ms", "error of the prediction, %")
    plot.add(plot.polyline(xs, [0.0, 0.0], "ideal"))
    plot.add(*(_mark(context, plot, step, error) for step, error in zip(steps, errors, strict=True)))
    return Panel("The same, as errors", plot.markup("Error of the prediction in per cent against measured step time"))


def _sentence(steps: Sequence[Step]) -> str:
    errors = [abs(_error(step)) for step in steps]
    within = sum(error <= BAND for error in errors)
    inside = sum(step.forecast.contains(step.time.value) for step in steps if step.forecast)
    return (
        f"{within} of {len(steps)} steps were predicted within ±10 % (median error {100 * median(errors):.1f} %, "
        f"largest {100 * max(errors):.0f} %); {inside} lie in the interval that was given with the prediction."
    )


def _table(context: Context, steps: Sequence[Step]) -> Table:
    rows = []
    for step in steps:
        assert step.forecast is not None
        head = (step.model, step.data, context.label(step), formatting.rate(step.rate_name), step.workers)
        rows.append(
            TableRow(
                (
                    *head,
                    formatting.between(step.time),
                    formatting.between(step.forecast),
                    formatting.percent(_error(step)),
                ),
                step,
            )
        )
    heads = ("model", "data", "wire", "link", "workers", "measured ms (95 %)", "predicted ms (5–95 %)", "error")
    return Table("Predicted and measured steps", heads, rows, left=4)


def predictions(context: Context) -> Figure | Absent:
    key, title = "predicted", "Predicted against measured"
    steps = [step for step in context.findings.measured if step.forecast is not None]
    if not steps:
        return Absent(key, title, "no measured step has a prediction beside it")
    return Figure(
        key,
        title,
        _sentence(steps),
        [_times(context, steps), _errors(context, steps)],
        "Each mark is a setting; on the dotted line prediction and measurement agree, and the band is ±10 %. "
        "Predictions were made from a probe of the link and a profile of the model, without these measurements.",
        _table(context, steps),
        context.legend(steps),
    )
