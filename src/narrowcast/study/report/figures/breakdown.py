"""What a step is made of: stacked bars."""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.figures import WIDTH, Axis, Markup, drawing, lines, tag, text, text_width, tick_names
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import grouped, one_each
from narrowcast.study.analysis.findings import Step
from narrowcast.study.report.context import Context
from narrowcast.study.report.markup import Absent, Figure, Panel, Table, TableRow

PARTS = ("forward", "backward", "update", "encode", "wire", "decode")
"""Compute first, then what compression adds and what the link takes."""
BAR, GAP, TOP, BOTTOM = 16, 7, 4, 36


def _share(step: Step, part: str) -> float:
    # communication that overlaps better than compute alone would allow comes out below zero: nothing is added
    return max(0.0, (step.line.get("breakdown_ms") or {}).get(part) or 0.0)


def _bar(context: Context, step: Step, y: float, across: Axis) -> Markup:
    parts, begin = [], 0.0
    for part in PARTS:
        end = begin + _share(step, part)
        left, right = across.at(begin), across.at(end)
        if right - left >= 0.05:
            tip = f"{part} {formatting.significant(end - begin)} ms"
            box = {"x": left, "y": y, "width": right - left, "height": float(BAR)}
            parts.append(tag("rect", tag("title", tip), **box, class_=f"p-{part}"))
        begin = end
    total = text(across.at(begin) + 5, y + BAR - 4, formatting.significant(step.time.value), "start", "t")
    name = text(across.begin - 8, y + BAR - 4, context.label(step), "end", "n")
    return tag("g", name, *parts, total, data_wire=step.wire)


def _panel(context: Context, steps: Sequence[Step]) -> Panel:
    ordered = context.by_wire(steps)
    left = 12 + max(text_width(context.label(step), 11.5) for step in ordered)
    totals = [sum(_share(step, part) for part in PARTS) for step in ordered]
    height = TOP + (BAR + GAP) * len(ordered) + BOTTOM
    across = Axis([0.0, *totals], left, WIDTH - 46, log=False, zero=True)
    bottom = height - BOTTOM
    ticks = {across.at(tick): name for tick, name in tick_names(across).items()}
    parts = [lines([(x, TOP, x, bottom) for x in ticks], "grid")]
    parts += [text(x, bottom + 14, name, class_="t") for x, name in ticks.items()]
    bars = [_bar(context, step, TOP + (BAR + GAP) * i, across) for i, step in enumerate(ordered)]
    axis = text((across.begin + across.end) / 2, height - 5, "milliseconds a step", class_="a")
    title = context.setting(steps[0], "model", "data", "workers", "hosts", "rate_name")
    hidden = {"data_model": steps[0].model, "data_workers": steps[0].workers}
    return Panel(title, drawing(WIDTH, height, f"Parts of a step: {title}", *parts, *bars, axis), hidden)


def _sentence(context: Context, steps: Sequence[Step]) -> str:
    """Of the setting whose float32 step waits most for the link."""
    plain = [s for s in steps if s.wire == context.findings.baseline]
    if not plain:
        return f"Cannot tell what {context.findings.baseline} waits for: it was not timed."
    worst = max(plain, key=lambda s: _share(s, "wire") / s.time.value)
    share = _share(worst, "wire") / worst.time.value
    text_ = f"{context.where(worst)} spends {100 * share:.0f} % of a step with {worst.wire} waiting for the link"
    touched = (s for s in steps if s.place == worst.place and not s.untouched)
    narrow = one_each(touched, context.findings.primary)
    if not narrow:
        return f"{text_}."
    best = narrow[0]
    codec = _share(best, "encode") + _share(best, "decode")
    return (
        f"{text_}; with {best.wire} {100 * _share(best, 'wire') / best.time.value:.0f} %, and "
        f"{100 * codec / best.time.value:.1f} % encoding and decoding."
    )


def _table(context: Context, steps: Sequence[Step]) -> Table:
    rows = [
        TableRow(
            (
                *(s.model, s.data, context.label(s), formatting.rate(s.rate_name), s.workers),
                *(formatting.significant(_share(s, part)) for part in PARTS),
            ),
            s,
        )
        for s in steps
    ]
    return Table("Parts of a step, ms", ("model", "data", "wire", "link", "workers", *PARTS), rows, left=4)


def _legend() -> Markup:
    names = {"update": "update", "wire": "exposed wire"}
    keys = [tag("li", tag("span", class_=f"key p-{part}", aria_hidden="true"), names.get(part, part)) for part in PARTS]
    return tag("ul", *keys, class_="legend", aria_label="Parts of a step")


def breakdown(context: Context) -> Figure | Absent:
    key, title = "breakdown", "What a step is made of"
    steps = [s for s in context.findings.measured if s.line.get("breakdown_ms")]
    if not steps:
        return Absent(key, title, "no measured step has its parts")
    places = sorted(grouped(steps, lambda s: s.place).values(), key=lambda same: (same[0].rate_bits, -same[0].workers))
    return Figure(
        key,
        title,
        _sentence(context, steps),
        [_panel(context, same) for same in places],
        "Medians. The exposed wire is what communication adds to the step beyond what compute hides. The number behind "
        "a bar is the median of the whole step, which need not be the sum of the medians of its parts.",
        _table(context, steps),
        _legend(),
    )
