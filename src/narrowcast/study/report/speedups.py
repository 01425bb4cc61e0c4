"""Heat maps of speedups: wires down, something across, colour by gain or loss, a line where the loss begins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from narrowcast.figures import Box, Markup, drawing, line, lone, tag, text, text_width
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import Finding, grouped, one_each, share_words
from narrowcast.study.analysis.findings import Step
from narrowcast.study.analysis.statistics import Interval
from narrowcast.study.report.figure import Context, Figure, Panel, Table

WIDE, SLIM, CELL_H, TOP, FULL = 62, 46, 26, 24, 8.0
"""Width of a cell by rate and by workers, its height; the speedup (and slowdown) at which the colour is full."""
FAINTEST, DEEPEST = 0.06, 0.66


@dataclass(frozen=True)
class Map:
    """Rows of labelled findings and named columns; a cell may be missing."""

    rows: Sequence[tuple[str, Finding]]
    columns: Sequence[str]
    cells: dict[tuple[int, int], Step]
    by_workers: bool = False
    """Columns are numbers of workers; else they are link rates, from slow to fast, and the gain ends somewhere."""

    @cached_property
    def cell(self) -> float:
        told = (formatting.times(step.speedup) for step in self.cells.values() if step.speedup)
        words = max((text_width(name) for name in (*told, *self.columns)), default=0.0)
        return max(float(SLIM if self.by_workers else WIDE), words + 6)

    @cached_property
    def left(self) -> float:
        return 10 + max(text_width(name, 11.5) for name, _ in self.rows)

    def markup(self, label: str) -> Markup:
        width, height = self.left + self.cell * len(self.columns) + 12, TOP + CELL_H * len(self.rows) + 4
        heads = [
            text(self.left + self.cell * (i + 0.5), TOP - 8, name, class_="t") for i, name in enumerate(self.columns)
        ]
        rows = [self._row(index, name, finding) for index, (name, finding) in enumerate(self.rows)]
        frame = Box(self.left, TOP, self.left + self.cell * len(self.columns), height - 4)
        turns = [] if self.by_workers else self._break_even()
        return drawing(width, height, label, *heads, *rows, *turns, frame=frame)

    def _row(self, index: int, name: str, finding: Finding) -> Markup:
        y = TOP + CELL_H * index
        cells = [self._cell(index, column, self.left + self.cell * column, y) for column in range(len(self.columns))]
        whole = {"x": self.left, "y": y + 1.0, "width": self.cell * len(self.columns), "height": float(CELL_H - 2)}
        # where every cell is predicted, one hatching serves a row
        hatch = [lone("rect", **whole, class_="ht")] if self.by_workers else []
        return tag(
            "g", text(self.left - 8, y + CELL_H / 2 + 4, name, "end", "n"), *cells, *hatch, data_wire=finding.wire
        )

    def _cell(self, row: int, column: int, x: float, y: float) -> Markup:
        step = self.cells.get((row, column))
        middle = (x + self.cell / 2, y + CELL_H / 2 + 4)
        if step is None or step.speedup is None:
            return text(*middle, "–", class_="none")
        box = {"x": x + 1.0, "y": y + 1.0, "width": float(self.cell - 2), "height": float(CELL_H - 2)}
        gain = step.speedup.value
        parts = [lone("rect", **box, class_="up" if gain >= 1 else "down", fill_opacity=_depth(gain))]
        if step.predicted and not self.by_workers:
            parts.append(lone("rect", **box, class_="ht"))
        parts.append(text(*middle, formatting.times(step.speedup), class_="h" if step.faster is not None else "h q"))
        tip = f"{formatting.times_between(step.speedup)}, {'predicted' if step.predicted else 'measured'}"
        return tag("g", tag("title", tip), *parts, data_workers=step.workers if self.by_workers else None)

    def _break_even(self) -> list[Markup]:
        """Behind the columns from the left that are not told to be slower."""
        slower = [place for place, step in self.cells.items() if step.faster is False]
        if not slower:
            return []
        ends = [min((c for r, c in slower if r == row), default=len(self.columns)) for row in range(len(self.rows))]
        places = [self.left + self.cell * end for end in ends]
        parts = [line(x, TOP + CELL_H * i, x, TOP + CELL_H * (i + 1), class_="even") for i, x in enumerate(places)]
        turns = [(i, pair) for i, pair in enumerate(itertools.pairwise(places), 1) if pair[0] != pair[1]]
        return [*parts, *(line(a, TOP + CELL_H * i, b, TOP + CELL_H * i, class_="even") for i, (a, b) in turns)]


def _depth(speedup: float) -> str:
    share = min(1.0, abs(math.log(speedup)) / math.log(FULL))
    return f"{FAINTEST + (DEEPEST - FAINTEST) * share**0.7:.2f}"


def _compared(context: Context, steps: Sequence[Step]) -> list[Step]:
    return [s for s in steps if s.speedup is not None and s.wire != context.findings.baseline]


def _panel_key(step: Step) -> tuple[object, ...]:
    return (step.model, step.data, step.workers, step.hosts, step.transport, step.parallel, step.min_values)


def _map_of(
    context: Context, steps: Sequence[Step], columns: dict[Any, str], column: Callable[[Step], Any], by_workers: bool
) -> Map:
    """`columns` has their names in their order; of several steps for one cell the last counts."""
    rows = list({context.label(step): step for step in context.by_wire(steps)}.items())
    names, places = [name for name, _ in rows], list(columns)
    cells = {(names.index(context.label(s)), places.index(column(s))): s for s in steps}
    return Map(rows, list(columns.values()), cells, by_workers)


def _panel(context: Context, steps: Sequence[Step]) -> Panel:
    rates = sorted({(step.rate_bits, str(step.rate_name)) for step in steps})
    columns = {name: formatting.rate(name) for _, name in rates}
    made = _map_of(context, steps[::-1], columns, lambda s: str(s.rate_name), by_workers=False)
    title = context.setting(steps[0], "model", "data", "workers", "hosts")
    hidden = {"data_model": steps[0].model, "data_workers": steps[0].workers}
    return Panel(title, made.markup(f"Speedup over float32 by wire and link rate: {title}"), hidden, len(made.cells))


def _panel_elsewhere(context: Context, steps: Sequence[Step]) -> Panel:
    columns = {workers: str(workers) for workers in sorted({step.workers for step in steps})}
    made = _map_of(context, steps, columns, lambda s: s.workers, by_workers=True)
    title = f"{context.setting(steps[0], 'model', 'cluster')} · {formatting.primitive(steps[0].transport)}"
    drawing = made.markup(f"Predicted speedup by wire and workers: {title}")
    return Panel(title, drawing, {"data_model": steps[0].model}, len(made.cells))


def _end(ordered: Sequence[Step]) -> tuple[str, str] | None:
    """The first rate that is told to be slower, and the last before it that is told to be faster."""
    slower = next((i for i, step in enumerate(ordered) if step.faster is False), len(ordered))
    before = [step for step in ordered[:slower] if step.faster]
    if slower == len(ordered) or not before:
        return None
    return formatting.rate(before[-1].rate_name), formatting.rate(ordered[slower].rate_name)


def _end_of_gain(primary: Sequence[Step]) -> str:
    """Where the primary wire stops paying, over all settings in which it is not slower from the beginning."""
    settings = [sorted(same, key=lambda s: s.rate_bits) for same in grouped(primary, _panel_key).values()]
    settings = [same for same in settings if len(same) > 1 and same[0].faster is not False]
    ends = grouped((end for same in settings if (end := _end(same))), lambda end: end)
    lasting = sum(all(s.faster for s in same) for same in settings)
    unsure = len(settings) - lasting - sum(map(len, ends.values()))
    parts = [f"ends between {a} and {b} in {formatting.count(len(same), 'setting')}" for (a, b), same in ends.items()]
    parts += [f"lasts over all rates in {formatting.count(lasting, 'setting')}"] * bool(lasting)
    parts += [f"cannot be told from 1 at some rate in {formatting.count(unsure, 'setting')}"] * bool(unsure)
    return f" Its gain {formatting.listed(parts)}." if parts else ""


def _best(steps: Sequence[Step]) -> tuple[Step, Interval]:
    """With the largest speedup."""
    return max(((s, s.speedup) for s in steps if s.speedup is not None), key=lambda pair: pair[1].value)


def _sentence(context: Context, steps: Sequence[Step]) -> str:
    primary = one_each(steps, context.findings.primary)
    if not primary:
        return f"Cannot tell for {context.findings.primary}: it has no step times beside {context.findings.baseline}."
    faster = sum(step.faster is True for step in primary)
    best, speedup = _best(primary)
    return (
        f"{context.findings.primary} is faster than {context.findings.baseline} in {faster} of "
        f"{formatting.count(len(primary), 'cell')}, most with {context.where(best)}: "
        f"{formatting.times_between(speedup)}." + _end_of_gain(primary)
    )


def _gain(step: Step) -> str:
    return formatting.times_between(step.speedup) if step.speedup else ""


def step_table(context: Context) -> Table:
    heads = "model | data | wire | over | link | workers | step ms (95 %) | p95 ms | speedup (95 %) | source"
    rows = []
    for s in context.findings.here:
        source = ", ".join([s.source, *(["not interleaved"] if s.apart else []), *share_words(s)])
        p95 = formatting.significant(s.p95) if s.p95 else ""
        rows.append((s, (formatting.between(s.time), p95, _gain(s), source)))
    return context.table("Step times and speedups", heads, rows, left=5, tail=1)


def elsewhere_table(context: Context) -> Table:
    heads = "model | wire | machine | over | workers | step ms (5–95 %) | speedup | $ an epoch"
    rows = []
    for s in context.findings.elsewhere:
        cost = s.line.get("dollars_per_epoch")
        dollars = "" if cost is None else formatting.significant(cost)
        rows.append((s, (formatting.between(s.time), _gain(s), dollars)))
    return context.table("Predicted, not measured: steps on other machines", heads, rows)


def speedups(context: Context) -> Figure | str:
    """Wire against link rate, a map for each model and number of workers."""
    steps = _compared(context, context.findings.here)
    if not steps:
        return f"no wire was timed beside {context.findings.baseline}"
    return Figure(
        _sentence(context, steps),
        [_panel(context, same) for same in grouped(steps, _panel_key).values()],
        f"Step time of {context.findings.baseline} over that of the wire: blue is faster, orange slower. A number in "
        "grey has an interval that contains 1: cannot tell. The heavy line stands before the first rate at which a "
        "wire is told to be slower. Hatched cells are predicted, not measured.",
        step_table(context),
        narrow=True,
    )


def elsewhere(context: Context) -> Figure | str:
    """Predictions for other machines: wire against workers, a map for each model, machine and transport."""
    steps = _compared(context, context.findings.elsewhere)
    if not steps:
        return "this study asked for no predictions for other machines"
    best, speedup = _best(steps)
    places = grouped(steps, lambda s: (s.model, s.cluster, s.transport, s.min_values)).values()
    return Figure(
        f"Predicted, not measured: {sum(step.faster is True for step in steps)} of {len(steps)} cells are faster than "
        f"{context.findings.baseline} beyond the prediction's own interval; the largest gain is "
        f"{formatting.times(speedup)}, {best.wire} for {best.model} on {best.cluster} with "
        f"{formatting.count(best.workers, 'worker')} over {formatting.primitive(best.transport)}.",
        [_panel_elsewhere(context, same) for same in places],
        "As above, with the number of workers across. Every cell is a prediction from a model of the machine.",
        elsewhere_table(context),
        narrow=True,
    )
