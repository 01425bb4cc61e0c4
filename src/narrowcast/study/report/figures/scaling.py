"""Scaling: how many workers' worth of work gets done, against the number of workers."""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.figures import Markup, Plot, pad_range, tag
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import grouped, one_each
from narrowcast.study.analysis.findings import Step
from narrowcast.study.analysis.statistics import Interval
from narrowcast.study.report.context import Context
from narrowcast.study.report.markup import Absent, Figure, Panel, Table, TableRow

COMPUTE = ("forward", "backward", "update")


def effective_workers(step: Step) -> Interval | None:
    """Workers times the share of a step that is compute: what communication leaves of them."""
    parts = step.line.get("breakdown_ms") or {}
    if any(parts.get(name) is None for name in COMPUTE):
        return None
    compute = sum(parts[name] for name in COMPUTE)
    return step.time.inverse().times(step.workers * compute)


def _line(context: Context, plot: Plot, steps: Sequence[Step]) -> Markup:
    values = [(step, effective_workers(step)) for step in steps]
    known = [(step, value) for step, value in values if value is not None]
    xs, ys = [float(step.workers) for step, _ in known], [value.value for _, value in known]
    parts = [plot.polyline(xs, ys, dash=context.palette.dash(steps[0].wire))]
    for step, value in known:
        tip = f"{context.label(step)}, {step.workers} workers: {formatting.between(value)} workers' worth"
        marks = (
            plot.whisker(step.workers, value.low, value.high),
            context.palette.mark(step.wire, plot.x.at(step.workers), plot.y.at(value.value)),
        )
        parts.append(tag("g", tag("title", tip), *marks, data_workers=step.workers))
    return tag("g", *parts)


def _fraction(power_of_two: float) -> str:
    return f"{power_of_two:g}" if power_of_two >= 1 else f"1/{1 / power_of_two:g}"


def _panel(context: Context, steps: Sequence[Step]) -> Panel:
    lines = [sorted(same, key=lambda s: s.workers) for same in grouped(context.by_wire(steps), context.label).values()]
    counts = sorted({step.workers for step in steps})
    values = [value for step in steps if (value := effective_workers(step)) is not None]
    room = context.label_room([same[0] for same in lines])
    plot = Plot(
        pad_range([float(n) for n in counts], 0.04, log=True),
        pad_range([float(max(counts)), *(v.low for v in values), *(v.high for v in values)], 0.04, log=True),
        log_x=True,
        log_y=True,
        right=room,
    )
    doublings = [2.0**power for power in range(-10, 12)]
    shown = {tick: _fraction(tick) for tick in doublings if plot.y.low <= tick <= plot.y.high}
    plot.frame("workers", "workers' worth of work", {float(n): str(n) for n in counts}, shown)
    ends = [float(counts[0]), float(counts[-1])]
    plot.add(plot.polyline(ends, ends, "ideal"))
    heights = [plot.y.at(value.value) for same in lines if (value := effective_workers(same[-1])) is not None]
    labels = context.end_labels(plot, [(same[-1], y) for same, y in zip(lines, heights, strict=True)])
    for same, label in zip(lines, labels, strict=True):
        plot.add(context.coloured(same[0], _line(context, plot, same), label))
    title = context.setting(steps[0], "model", "data", "rate_name")
    hidden = {"data_model": steps[0].model}
    return Panel(title, plot.markup(f"Scaling with the number of workers: {title}"), hidden)


def _usable(context: Context) -> list[list[Step]]:
    steps = [s for s in context.findings.measured if effective_workers(s) is not None and not s.hosts]
    key = lambda s: (s.model, s.data, s.rate_name, s.transport, s.parallel, s.min_values)  # noqa: E731
    places = [same for same in grouped(steps, key).values() if len({s.workers for s in same}) > 1]
    return sorted(places, key=lambda same: same[0].rate_bits)


def _pairs(context: Context, same: Sequence[Step]) -> list[tuple[Interval, Interval, Step]]:
    """With the most workers: what the baseline and the primary wire leave of them, and the step of the latter."""
    most = max(step.workers for step in same)
    known = {id(step.line): effective_workers(step) for step in same}
    pairs = []
    for step in one_each((s for s in same if s.workers == most), context.findings.primary):
        plain, narrow = known.get(id(step.base)), known[id(step.line)]
        if plain is not None and narrow is not None:
            pairs.append((plain, narrow, step))
    return pairs


def _sentence(context: Context, places: Sequence[Sequence[Step]]) -> str:
    """With the most workers, where compression leaves most of them: how many with and without it."""
    pairs = [pair for same in places for pair in _pairs(context, same)]
    if not pairs:
        return f"Cannot tell: {context.findings.primary} and {context.findings.baseline} were not timed side by side."
    plain, narrow, step = max(pairs, key=lambda pair: pair[1].value / pair[0].value)
    return (
        f"{context.where(step)} does the work of {formatting.between(plain)} workers with "
        f"{context.findings.baseline} and of {formatting.between(narrow)} with {context.findings.primary}."
    )


def _table(context: Context, places: Sequence[Sequence[Step]]) -> Table:
    rows = []
    for step in (step for same in places for step in same):
        value = effective_workers(step)
        assert value is not None
        cells = (step.model, step.data, context.label(step), formatting.rate(step.rate_name), step.workers)
        rows.append(TableRow((*cells, formatting.between(value), f"{100 * value.value / step.workers:.0f} %"), step))
    heads = ("model", "data", "wire", "link", "workers", "workers' worth (95 %)", "efficiency")
    return Table("Scaling", heads, rows, left=4)


def scaling(context: Context) -> Figure | Absent:
    key, title = "scaling", "Scaling with the number of workers"
    places = _usable(context)
    if not places:
        return Absent(key, title, "needs measured steps with their parts for two numbers of workers")
    return Figure(
        key,
        title,
        _sentence(context, places),
        [_panel(context, same) for same in places],
        "Workers times the share of a step that is forward, backward and update, timed alone in the same run; the "
        "dotted line is ideal. Both axes are logarithmic, whiskers are 95 % intervals. So the figure shows what "
        "communication costs, not what it costs that workers may share cores.",
        _table(context, places),
    )
