"""Accuracy against bits: every wire a row, the one with most bits first, whatever was or was not timed."""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.figures import Row, forest
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.findings import Accuracy
from narrowcast.study.report.accuracy import KEPT, settings
from narrowcast.study.report.figure import Context, Figure, Panel, Table, TableRow
from narrowcast.study.spec_bits import wire_bits


def _bits(row: Accuracy) -> str:
    return f"{wire_bits(row.wire):.3g}"


def _compared(rows: Sequence[Accuracy]) -> list[Accuracy]:
    """Those with a difference, most bits first."""
    return sorted((row for row in rows if row.difference is not None), key=lambda row: -wire_bits(row.wire))


def _row(context: Context, row: Accuracy) -> Row:
    assert row.difference is not None
    interval = row.difference.interval
    name = f"{context.label(row)} · {_bits(row)}"
    tip = f"{context.label(row)}, {_bits(row)} bits: {formatting.points(interval)}"
    look = context.palette.look(row.wire)
    return Row(name, look, interval.value, interval.low, interval.high, tip, row.wire)


def _panel(context: Context, rows: Sequence[Accuracy]) -> Panel:
    margin = context.findings.margin
    title = context.setting(rows[0], "model", "data", "workers")
    label = f"Accuracy difference of wires by their bits: {title}"
    picture = forest(label, [_row(context, row) for row in rows], "accuracy, points", (-margin, 0.0, margin))
    return Panel(title, picture, {"data_model": rows[0].model}, len(rows))


def _sentence(context: Context, groups: Sequence[Sequence[Accuracy]]) -> str:
    """The fewest bits with which accuracy is kept wherever that wire was trained."""
    by_wire: dict[str, list[Accuracy]] = {}
    for row in (row for rows in groups for row in rows):
        by_wire.setdefault(context.label(row), []).append(row)
    kept = {name: rows for name, rows in by_wire.items() if all(row.conclusion in KEPT for row in rows)}
    if not kept:
        return f"No wire is shown to keep the accuracy of {context.findings.baseline} wherever it was trained."
    best = min(kept, key=lambda name: wire_bits(kept[name][0].wire))
    where = formatting.count(len(kept[best]), "setting")
    return (
        f"Accuracy is kept with {len(kept)} of {formatting.count(len(by_wire), 'wire')} wherever they were trained; "
        f"the one with the fewest bits is {best}: {_bits(kept[best][0])} a value, in {where}."
    )


def bits(context: Context) -> Figure | str:
    groups = [compared for rows in settings(context) if (compared := _compared(rows))]
    if not groups:
        return f"no wire was trained beside {context.findings.baseline}"
    rows = [
        TableRow((*cells[:2], context.label(row), *cells[2:]), row)
        for row in (row for same in groups for row in same)
        if row.difference is not None
        for cells in [(row.model, row.data, row.workers, _bits(row), formatting.difference(row.difference.interval))]
    ]
    heads = "model | data | wire | workers | bits a value | difference, points (95 %)"
    return Figure(
        _sentence(context, groups),
        [_panel(context, rows) for rows in groups],
        f"Right is more accurate than {context.findings.baseline} with the same seeds. Behind each wire stand its bits "
        f"a value, scales included. The band is the margin of ±{formatting.margin(context.findings.margin)}; whiskers "
        "are 95 % intervals.",
        Table("Accuracy by bits", heads, rows, left=3),
    )
