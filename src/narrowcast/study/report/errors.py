"""How far off things are: the noise that a wire adds to each layer, and predictions against measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from narrowcast.figures import (
    WIDTH,
    Axis,
    Box,
    Markup,
    Plot,
    axis_across,
    drawing,
    lines,
    lone,
    number,
    pad_range,
    points,
    room_for,
    tag,
    text,
)
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import grouped
from narrowcast.study.analysis.findings import Accuracy, Step
from narrowcast.study.analysis.statistics import Interval
from narrowcast.study.report.figure import Context, Figure, Panel

ROW, TOP, BOTTOM, MOST = 19, 6, 36, 24
LONGEST = 26
BAND = 0.10
MANY = 8
"""Of more wires each has a row, and marks are layers: so many marks in a row are not told apart."""


def _mean(row: Accuracy, layer: str, what: str) -> float:
    """Over the seeds, of those where it is finite."""
    records = [record for run in row.runs for record in run.get("layers") or () if record["name"] == layer]
    finite = [record[what] for record in records if record[what] is not None and math.isfinite(record[what])]
    return fmean(finite) if finite else math.nan


def _ratios(row: Accuracy) -> dict[str, float]:
    """Signal to noise of each layer that has one, in dB."""
    names = dict.fromkeys(layer["name"] for run in row.runs for layer in run.get("layers") or ())
    ratios = {name: _mean(row, name, "snr_db") for name in names}
    return {name: ratio for name, ratio in ratios.items() if math.isfinite(ratio)}


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else "…" + name[1 - LONGEST :]


def _marks(context: Context, row: Accuracy, heights: Mapping[str, float], across: Axis) -> Markup:
    """At the height of each layer."""
    parts = []
    for name, ratio in _ratios(row).items():
        if name in heights:
            tip = tag("title", f"{context.label(row)}, {name}: {ratio:.1f} dB")
            parts.append(tag("g", tip, context.palette.mark(row.wire, across.at(ratio), heights[name])))
    return context.coloured(row, *parts)


def _layer_panel(context: Context, rows: Sequence[Accuracy]) -> Panel:
    ratios = [_ratios(row) for row in rows]
    every = list(dict.fromkeys(layer["name"] for row in rows for run in row.runs for layer in run.get("layers") or ()))
    # of many layers those with the most noise: they are what one looks for
    noisiest = sorted(every, key=lambda name: min(known.get(name, math.inf) for known in ratios))[:MOST]
    names = [name for name in every if name in noisiest]
    by_wire = len(rows) > MANY
    heads = [context.label(row) for row in rows] if by_wire else [_short(name) for name in names]
    heights = [TOP + ROW * (i + 0.5) for i in range(len(heads))]
    left, bottom = room_for(heads), TOP + ROW * len(heads)
    values = [ratio for known in ratios for name, ratio in known.items() if name in names]
    across = Axis(pad_range(values, 0.05), left, WIDTH - 12, log=False)
    grid, numbers, axis = axis_across(across, TOP, bottom, "signal to noise, dB")
    dots = lines([(left, y, WIDTH - 12, y) for y in heights], "grid dot")
    written = [text(left - 8, y + 4, head, "end", "n") for y, head in zip(heights, heads, strict=True)]
    levels = (
        [dict.fromkeys(names, y) for y in heights] if by_wire else [dict(zip(names, heights, strict=True))] * len(rows)
    )
    marks = [_marks(context, row, level, across) for row, level in zip(rows, levels, strict=True)]
    title = context.setting(rows[0], "model", "data")
    title += f" · the {MOST} noisiest of {len(every)} layers" if len(every) > MOST else ""
    frame = Box(left, TOP, WIDTH - 12, bottom)
    parts = (grid, dots, *numbers, *written, *marks, axis)
    picture = drawing(WIDTH, bottom + BOTTOM, f"Error by layer: {title}", *parts, frame=frame)
    return Panel(title, picture, {"data_model": rows[0].model}, len(values))


def _layer_sentence(context: Context, rows: Sequence[Accuracy]) -> str:
    primary = [row for row in rows if row.wire == context.findings.primary]
    if not primary:
        return f"Cannot tell for {context.findings.primary}: its layers were not measured."
    every = ((row, name, ratio) for row in primary for name, ratio in _ratios(row).items())
    row, name, ratio = min(every, key=lambda layer: layer[2])
    by_wire = grouped(rows, lambda row: row.wire)
    middles = {wire: median(v for row in same for v in _ratios(row).values()) for wire, same in by_wire.items()}
    worst = min(middles, key=lambda wire: middles[wire])
    noisiest = f"The noisiest gradient of {row.wire} is {name} of {row.model}: {number(round(ratio))} dB"
    if worst == row.wire:
        return f"{noisiest} of signal to noise."
    own, least = (number(round(middles[wire])) for wire in (row.wire, worst))
    medians = f"{own} dB with {row.wire} and {least} dB with {worst}"
    return f"{noisiest} of signal to noise. The median layer has {medians}."


def layers(context: Context) -> Figure | str:
    rows = [row for row in context.by_wire(context.findings.accuracies) if _ratios(row)]
    if not rows:
        return "no training recorded the error of its gradients"
    listed = []
    for row in rows:
        values = {layer["name"]: layer["values"] for layer in row.runs[0].get("layers") or ()}
        for name, ratio in _ratios(row).items():
            shares = (f"{100 * _mean(row, name, what):.2g}" for what in ("flushed", "saturated"))
            bias = f"{_mean(row, name, 'bias'):.1e}"
            listed.append((row, (name, f"{values.get(name, 0):,}", f"{ratio:.1f}", bias, *shares)))
    heads = "model | data | wire | layer | values | SNR dB | bias | flushed % | saturated %"
    places = grouped(rows, lambda row: (row.model, row.data, row.min_values)).values()
    return Figure(
        _layer_sentence(context, rows),
        [_layer_panel(context, same) for same in places],
        "Gradients of the trainings themselves, each sent through the codec once: power of the gradient over power of "
        "the error, mean over seeds. A whole bit more is about 6 dB. Of more than eight wires each has a row, and its "
        "marks are layers.",
        context.table("Error by layer, mean over seeds", heads, listed),
        context.legend(rows),
    )


Forecast = tuple[Step, Interval, float]
"""A measured step, what was predicted for it, and the error as a share."""


def _plot_forecasts(
    context: Context, plot: Plot, forecasts: Sequence[tuple[Forecast, float]], band: Sequence[tuple[float, float]]
) -> None:
    """Marks at these heights, over a band with these corners."""
    corners = points([(plot.x.at(x), plot.y.at(y)) for x, y in band])
    plot.parts.insert(0, lone("polygon", points=corners, class_="band"))
    for (step, _, error), height in forecasts:
        tip = f"{context.label(step)}, {context.where(step)}: {formatting.percent(error)}"
        mark = context.palette.mark(step.wire, plot.x.at(step.time.value), plot.y.at(height), 3.0)
        plot.add(context.coloured(step, tag("title", tip), mark, hide=("wire", "model", "workers")))


def _times(context: Context, forecasts: Sequence[Forecast]) -> Panel:
    values = [value for step, forecast, _ in forecasts for value in (step.time.value, forecast.value)]
    low, high = pad_range(values, 0.05, log=True)
    plot = Plot([low, high], [low, high], log_y=True)
    plot.frame("measured step, ms", "predicted step, ms")
    plot.add(plot.polyline([low, high], [low, high], "ideal"))
    factor = 1 + BAND
    top = [(low, low), (low, low * factor), (high / factor, high), (high, high)]
    heights = [(one, one[1].value) for one in forecasts]
    _plot_forecasts(context, plot, heights, [*top, (high, high / factor), (low * factor, low)])
    label = "Predicted step time against measured step time, with a band of ten per cent"
    return Panel("Step times", plot.markup(label), shows=len(forecasts))


def _errors(context: Context, forecasts: Sequence[Forecast]) -> Panel:
    errors = [100 * error for _, _, error in forecasts]
    xs, tenth = pad_range([step.time.value for step, _, _ in forecasts], 0.05, log=True), 100 * BAND
    plot = Plot(xs, pad_range([*errors, -1.5 * tenth, 1.5 * tenth]))
    plot.frame("measured step, ms", "error of the prediction, %")
    plot.add(plot.polyline(xs, [0.0, 0.0], "ideal"))
    band = [(xs[0], -tenth), (xs[1], -tenth), (xs[1], tenth), (xs[0], tenth)]
    _plot_forecasts(context, plot, list(zip(forecasts, errors, strict=True)), band)
    return Panel(
        "The same, as errors",
        plot.markup("Error of the prediction in per cent against measured step time"),
        shows=len(forecasts),
    )


def predictions(context: Context) -> Figure | str:
    steps = context.findings.measured
    forecasts = [(s, f, f.value / s.time.value - 1) for s in steps if (f := s.forecast) is not None]
    if not forecasts:
        return "no measured step has a prediction beside it"
    errors = [abs(error) for _, _, error in forecasts]
    inside = sum(forecast.contains(step.time.value) for step, forecast, _ in forecasts)
    heads = "model | data | wire | link | workers | measured ms (95 %) | predicted ms (5–95 %) | error"
    rows = [
        (step, (formatting.between(step.time), formatting.between(forecast), formatting.percent(error)))
        for step, forecast, error in forecasts
    ]
    return Figure(
        f"{sum(error <= BAND for error in errors)} of {len(errors)} steps were predicted within ±10 % (median error "
        f"{100 * median(errors):.1f} %, largest {100 * max(errors):.0f} %); {inside} lie in the interval that was "
        "given with the prediction.",
        [_times(context, forecasts), _errors(context, forecasts)],
        "Each mark is a setting; on the dotted line prediction and measurement agree, and the band is ±10 %. "
        "Predictions were made from a probe of the link and a profile of the model, without these measurements.",
        context.table("Predicted and measured steps", heads, rows),
        context.legend([step for step, _, _ in forecasts]),
    )
