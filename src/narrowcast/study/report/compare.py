"""The page of two studies: the same cells beside one another, and what is in one of them only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from narrowcast import figures
from narrowcast.figures import Look, Markup, Row, forest, tag
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.comparison import AccuracyPair, BusPair, Comparison, Pair, StepPair, compared_by
from narrowcast.study.analysis.finding import Finding
from narrowcast.study.analysis.statistics import Interval
from narrowcast.study.execution.results import map_leaves
from narrowcast.study.report.export import tidy
from narrowcast.study.report.figure import Context, Figure, Limits, Panel, Table, TableRow
from narrowcast.study.report.sections import provenance

KINDS = ("yes", "no", "depends", "unknown")
AXES = (
    *("kind", "source", "model", "data", "wire", "algorithm", "workers"),
    *("layout", "rate_name", "transport", "parallel", "cluster"),
)
MOST_ROWS = 1500
"""Of a table: a page that nobody can mail is none; --json has all."""


class _Sheet:
    """The comparison on its way to paper, with one look for each wire of both."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.a, self.b = Context(comparison.a), Context(comparison.b)
        self.names = comparison.names
        wires = dict.fromkeys([comparison.a.baseline, comparison.a.primary, *comparison.a.wires, *comparison.b.wires])
        self.looks = {wire: Look(slot) for slot, wire in enumerate(wires)}

    def row(self, pair: Pair[Any], interval: Interval, words: str) -> Row:
        name = self.a.label(pair.a)
        look, ends = self.looks[pair.a.wire], (interval.low, interval.high)
        return Row(name, look, interval.value, *ends, f"{name}: {words}", pair.a.wire)

    def setting(self, finding: Finding) -> str:
        names = ("model", "data", "workers", "hosts")
        if finding.cluster:  # a link of its own, and the transport is part of the prediction
            return (
                f"{self.a.setting(finding, *names, 'cluster')} · {formatting.primitive(finding.transport)} · predicted"
            )
        return self.a.setting(finding, *names, "rate_name") + " · predicted" * (finding.source == "predicted")


def _steps(sheet: _Sheet) -> Figure:
    pairs = sheet.comparison.steps
    a, b = sheet.names
    faster, slower = sheet.comparison.faster_and_slower
    rows = []
    for pair in pairs:
        speedups = (formatting.times_between(step.speedup) if step.speedup else "" for step in (pair.a, pair.b))
        times = (formatting.between(pair.a.time), formatting.between(pair.b.time), formatting.times_between(pair.gain))
        rows.append((pair.a, (*times, *speedups, pair.a.source)))
    heads = f"model | data | wire | over | link | workers | {a}, ms | {b}, ms | {b} as fast"
    heads += f" | speedup in {a} | in {b} | source"
    groups = compared_by(sheet.comparison.counted, lambda step: step.place)
    return Figure(
        f"{b} is faster in {faster} and slower in {slower} of "
        f"{formatting.count(len(sheet.comparison.counted), 'step time')}.",
        [_gains(sheet, same) for same in groups],
        f"Right of the line {b} is faster. Whiskers are 95 % intervals, with the drift of both machines in them, since "
        f"the studies were not interleaved. Of so many cells about {sheet.comparison.by_chance} would look faster, and "
        "as many slower, if none differed. A speedup is over the baseline of its own study. Where steps were measured, "
        "predicted ones stand in the table alone.",
        sheet.a.table("Step times of both", heads, rows, left=5, tail=1),
    )


def _gains(sheet: _Sheet, pairs: Sequence[StepPair]) -> Panel:
    rows = [sheet.row(pair, pair.gain, f"{formatting.times_between(pair.gain)} as fast") for pair in pairs]
    title = sheet.setting(pairs[0].a)
    unit, label = f"{sheet.names[1]}, times as fast", f"Step times of both studies: {title}"
    drawn = forest(label, rows, unit, (1.0, 1.0, 1.0), log=True)
    return Panel(title, drawn, shows=len(rows))


def _accuracies(sheet: _Sheet) -> Figure:
    pairs = sheet.comparison.accuracies
    a, b = sheet.names
    margin = sheet.comparison.a.margin
    rows = [
        (
            pair.a,
            (
                pair.difference.seeds,
                *(formatting.between(one.mean, least=1) for one in (pair.a, pair.b)),
                formatting.difference(pair.difference.interval),
                pair.difference.conclusion.value,
            ),
        )
        for pair in pairs
    ]
    told = [pair.difference.conclusion.value for pair in pairs]
    counts = [f"{told.count(kind)} {kind}" for kind in dict.fromkeys(told)]
    heads = f"model | data | wire | workers | seeds in both | {a}, % | {b}, % | difference, points (95 %) | finding"
    return Figure(
        f"{b} beside {a}, at a margin of {formatting.margin(margin)}: {formatting.listed(counts)}.",
        [_differences(sheet, same, margin) for same in compared_by(pairs, lambda row: row.place)],
        f"Right is more accurate in {b}, seed by seed. The band is the margin; whiskers are 95 % intervals.",
        sheet.a.table("Accuracies of both", heads, rows, left=3, tail=1),
    )


def _differences(sheet: _Sheet, pairs: Sequence[AccuracyPair], margin: float) -> Panel:
    rows = [sheet.row(pair, pair.difference.interval, formatting.points(pair.difference.interval)) for pair in pairs]
    title = sheet.a.setting(pairs[0].a, "model", "data", "workers")
    drawn = forest(f"Accuracies of both studies: {title}", rows, "accuracy, points", (-margin, 0.0, margin))
    return Panel(title, drawn, shows=len(rows))


def _buses(sheet: _Sheet) -> Figure:
    pairs = sheet.comparison.buses
    a, b = sheet.names
    rows = []
    for pair in pairs:
        speeds = (formatting.significant(one.line["bus_gbps"]) for one in (pair.a, pair.b))
        rows.append(
            (pair.a, (formatting.byte_size(pair.a.line["bytes"]), *speeds, formatting.times_between(pair.gain)))
        )
    heads = f"wire | algorithm | over | link | workers | size | {a}, GB/s | {b}, GB/s | {b} as fast"
    best, worst = (choose(pairs, key=lambda pair: pair.gain.value) for choose in (max, min))
    gains = f"{formatting.times(worst.gain)} to {formatting.times(best.gain)}"
    sentence = f"In {b} all-reduces alone are {gains} as fast as in {a}."
    return Figure(sentence, [], "", sheet.a.table("Bus bandwidth of both", heads, rows))


def _listed(context: Context, findings: Sequence[Finding], name: str) -> Markup:
    if not findings:
        return tag("p", f"Nothing is in {name} only.")
    heads = "kind | model | data | wire | algorithm | over | link | workers"
    rows = [TableRow(_cell(context, finding)) for finding in findings]
    table = Table(f"In {name} only: {formatting.count(len(findings), 'cell')}", heads, rows, left=7)
    return table.markup(MOST_ROWS)


def _cell(context: Context, f: Finding) -> tuple[object, ...]:
    link = f.cluster or formatting.rate(f.rate_name)
    return (f.kind, f.model, f.data, context.label(f), f.algorithm, f.transport, link, f.workers)


def _refused(sheet: _Sheet) -> Markup:
    rows = [
        TableRow((one.a.kind, sheet.setting(one.a), sheet.a.label(one.a), one.why)) for one in sheet.comparison.refused
    ]
    table = Table("In both, and not compared", "kind | cell | wire | because", rows, left=4, prose=True)
    return table.markup(MOST_ROWS)


def _opening(sheet: _Sheet) -> Markup:
    comparison = sheet.comparison
    counts = {
        "cells in both": len(comparison.steps) + len(comparison.accuracies) + len(comparison.buses),
        "in both, not compared": len(comparison.refused),
        f"in {sheet.names[0]} only": len(comparison.only_a),
        f"in {sheet.names[1]} only": len(comparison.only_b),
    }
    tiles = [figures.tile(str(number), what, "") for what, number in counts.items()]
    boxes = [
        figures.facts(f"{name}", provenance(one))
        for name, one in zip(sheet.names, (comparison.a, comparison.b), strict=True)
    ]
    title = f"narrowcast report · {sheet.names[0]} and {sheet.names[1]}"
    below = (tag("ul", *tiles, class_="tiles"), tag("div", *boxes, class_="two even"))
    return figures.opening(title, KINDS[comparison.kind], comparison.answer, comparison.words, *below)


def compare_page(comparison: Comparison) -> str:
    """The whole file."""
    sheet, limits = _Sheet(comparison), Limits(panels=24, rows=MOST_ROWS)
    wanted = {
        "steps": ("Step times", _steps, comparison.steps),
        "accuracies": ("Accuracy", _accuracies, comparison.accuracies),
        "buses": ("Bus bandwidth", _buses, comparison.buses),
    }
    parts, links, count = [], [], 0
    for key, (title, make, pairs) in wanted.items():
        if pairs:
            figure = make(sheet)
            count += bool(figure.pictures)
            parts.append(figures.figure(key, count if figure.pictures else 0, title, *figure.markup(limits)))
            links.append((key, title))
    if comparison.refused:
        parts.append(tag("section", tag("h2", "Not compared", id="refused"), _refused(sheet)))
        links.append(("refused", "Not compared"))
    only = [_listed(sheet.a, comparison.only_a, sheet.names[0]), _listed(sheet.b, comparison.only_b, sheet.names[1])]
    parts.append(tag("section", tag("h2", "In one only", id="only"), *only))
    navigation = figures.navigation([*links, ("only", "In one only")])
    body = [_opening(sheet), navigation, tag("main", *parts, id="main")]
    return figures.document(f"narrowcast report · {' and '.join(sheet.names)}", body, comparison_facts(comparison))


def _axes(finding: Finding) -> dict[str, Any]:
    facts = {name: finding.line.get(name) for name in AXES} | {"min_values": finding.min_values}
    return facts | ({"message_bytes": finding.line["bytes"]} if finding.kind == "bus" else {})


def _step_numbers(pair: StepPair) -> dict[str, Any]:
    times = {"step_ms_a": asdict(pair.a.time), "step_ms_b": asdict(pair.b.time)}
    return {**_axes(pair.a), **times, "times_as_fast": asdict(pair.gain)}


def _accuracy_numbers(pair: AccuracyPair) -> dict[str, Any]:
    test, means = pair.difference, {"accuracy_a": asdict(pair.a.mean), "accuracy_b": asdict(pair.b.mean)}
    told = {"seeds": test.seeds, "p_equal": test.p, "conclusion": test.conclusion.value}
    return {**_axes(pair.a), **means, "difference": asdict(test.interval), **told}


def _bus_numbers(pair: BusPair) -> dict[str, Any]:
    speeds = {"bus_gbps_a": pair.a.line["bus_gbps"], "bus_gbps_b": pair.b.line["bus_gbps"]}
    return {**_axes(pair.a), **speeds, "times_as_fast": asdict(pair.gain)}


def comparison_facts(comparison: Comparison) -> dict[str, Any]:
    """All that the page says, for programs."""
    facts = {
        "a": comparison.a.name,
        "b": comparison.b.name,
        "headline": comparison.headline,
        "cells": [
            *map(_step_numbers, comparison.steps),
            *map(_accuracy_numbers, comparison.accuracies),
            *map(_bus_numbers, comparison.buses),
        ],
        "not_compared": [{**_axes(one.a), "why": one.why} for one in comparison.refused],
        "only_a": [_axes(finding) for finding in comparison.only_a],
        "only_b": [_axes(finding) for finding in comparison.only_b],
    }
    return map_leaves(facts, tidy)
