"""Error by layer: how much noise the wire adds to each gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from narrowcast.figures import WIDTH, Axis, Markup, drawing, lines, number, pad_range, tag, text, text_width, tick_names
from narrowcast.study.analysis.finding import grouped
from narrowcast.study.analysis.findings import Accuracy
from narrowcast.study.report.context import Context
from narrowcast.study.report.markup import Absent, Figure, Panel, Table, TableRow

ROW, TOP, BOTTOM, MOST = 19, 6, 36, 24
LONGEST = 26


def _mean(row: Accuracy, layer: str, what: str) -> float:
    """Over the seeds, of those where it is finite."""
    values = [
        found[what]
        for run in row.runs
        for found in run.get("layers") or ()
        if found["name"] == layer and found[what] is not None
    ]
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def _names(rows: Sequence[Accuracy]) -> list[str]:
    return list(dict.fromkeys(found["name"] for row in rows for run in row.runs for found in run.get("layers") or ()))


def _ratios(row: Accuracy) -> dict[str, float]:
    found = {name: _mean(row, name, "snr_db") for name in _names([row])}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else "…" + name[1 - LONGEST :]


def _marks(context: Context, row: Accuracy, names: Sequence[str], across: Axis) -> Markup:
    parts = []
    for name, ratio in _ratios(row).items():
        if name in names:
            tip = tag("title", f"{context.label(row)}: {ratio:.1f} dB")
            y = TOP + ROW * (names.index(name) + 0.5)
            parts.append(tag("g", tip, context.palette.mark(row.wire, across.at(ratio), y)))
    return context.coloured(row, *parts)


def _panel(context: Context, rows: Sequence[Accuracy]) -> Panel:
    every = _names(rows)
    # of many layers those with the most noise: they are what one looks for
    noisiest = sorted(every, key=lambda n: min((_ratios(row).get(n, math.inf) for row in rows), default=math.inf))[
        :MOST
    ]
    names = [name for name in every if name in noisiest]
    left = 12 + max(text_width(_short(name), 11.5) for name in names)
    across = Axis(pad_range([v for row in rows for v in _ratios(row).values()], 0.05), left, WIDTH - 12, log=False)
    height = TOP + ROW * len(names) + BOTTOM
    ticks = {across.at(tick): name for tick, name in tick_names(across).items()}
    heights = [TOP + ROW * (i + 0.5) for i in range(len(names))]
    parts = [lines([(x, TOP, x, height - BOTTOM) for x in ticks], "grid")]
    parts += [lines([(left, y, WIDTH - 12, y) for y in heights], "grid dot")]
    parts += [text(x, height - BOTTOM + 14, name, class_="t") for x, name in ticks.items()]
    parts += [text(left - 8, y + 4, _short(name), "end", "n") for y, name in zip(heights, names, strict=True)]
    marks = [_marks(context, row, names, across) for row in rows]
    axis = text((across.begin + across.end) / 2, height - 5, "signal to noise, dB", class_="a")
    title = context.setting(rows[0], "model", "data")
    title += f" · the {MOST} noisiest of {len(every)}" if len(every) > MOST else ""
    hidden = {"data_model": rows[0].model}
    return Panel(title, drawing(WIDTH, height, f"Error by layer: {title}", *parts, *marks, axis), hidden)


def _sentence(context: Context, rows: Sequence[Accuracy]) -> str:
    primary = [row for row in rows if row.wire == context.findings.primary]
    if not primary:
        return f"Cannot tell for {context.findings.primary}: its layers were not measured."
    row, name, ratio = min(((r, n, v) for r in primary for n, v in _ratios(r).items()), key=lambda found: found[2])
    middles = {
        wire: median(v for r in same for v in _ratios(r).values())
        for wire, same in grouped(rows, lambda r: r.wire).items()
    }
    worst = min(middles, key=lambda wire: middles[wire])
    text_ = (
        f"The noisiest gradient of {row.wire} is {name} of {row.model}: {number(round(ratio))} dB of signal to noise"
    )
    if worst == row.wire:
        return f"{text_}."
    own, least = (number(round(middles[wire])) for wire in (row.wire, worst))
    medians = f"{own} dB with {row.wire} and {least} dB with {worst}"
    return f"{text_}. The median layer has {medians}."


def _table(context: Context, rows: Sequence[Accuracy]) -> Table:
    listed = []
    for row in rows:
        values = {layer["name"]: layer["values"] for layer in row.runs[0].get("layers") or ()}
        for name, ratio in _ratios(row).items():
            shares = (f"{100 * _mean(row, name, what):.2g}" for what in ("flushed", "saturated"))
            numbers = (f"{values.get(name, 0):,}", f"{ratio:.1f}", f"{_mean(row, name, 'bias'):.1e}", *shares)
            listed.append(TableRow((row.model, row.data, context.label(row), name, *numbers), row))
    heads = ("model", "data", "wire", "layer", "values", "SNR dB", "bias", "flushed %", "saturated %")
    return Table("Error by layer, mean over seeds", heads, listed, left=4)


def layers(context: Context) -> Figure | Absent:
    key, title = "layers", "Error by layer"
    rows = [row for row in context.by_wire(context.findings.accuracies) if _ratios(row)]
    if not rows:
        return Absent(key, title, "no training recorded the error of its gradients")
    panels = [
        _panel(context, same) for same in grouped(rows, lambda row: (row.model, row.data, row.min_values)).values()
    ]
    reading = (
        "Gradients of the trainings themselves, each sent through the codec once: power of the gradient over power of "
        "the error, mean over seeds. A whole bit more is about 6 dB."
    )
    legend = context.legend(rows)
    return Figure(key, title, _sentence(context, rows), panels, reading, _table(context, rows), legend)
