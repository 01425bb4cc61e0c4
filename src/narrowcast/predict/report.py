"""One HTML file for a sweep: figures as SVG, a table under each, the data inside. No request, no script needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from narrowcast.figures import Markup, Series, charts, join, lone, tag
from narrowcast.predict.step import BANDWIDTHS, Prediction, Setup
from narrowcast.predict.sweep import Sweep, half_precision

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; background: #fff; } svg text { font: 12px system-ui, sans-serif; fill: #222; }
.grid { stroke: #ddd; } figure { margin: 2rem 0; } figcaption { font-weight: 600; }
table { border-collapse: collapse; font-size: 0.85rem; }
th, td { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; } .scroll { overflow-x: auto; }
@media print { details { display: block; } }
"""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", text, scope="col") for text in heads)))
    body = tag("tbody", *(tag("tr", *(tag("td", text) for text in row)) for row in rows))
    return tag("div", tag("table", head, body), class_="scroll")


def figure(caption: str, picture: Markup, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    below = tag("details", tag("summary", "The numbers"), table(heads, rows))
    return tag("figure", tag("figcaption", caption), picture, below)


@dataclass(frozen=True)
class Shown:
    """A prediction, what was asked for, and what the line is called that it lies on."""

    name: str
    setup: Setup
    cell: Prediction


def _scaling(shown: Sequence[Shown]) -> Markup:
    series = []
    for name in dict.fromkeys(one.name for one in shown):
        line = [one.cell for one in shown if one.name == name]
        xs = [float(c.workers) for c in line]
        band = [[c.speedup * c.step / c.high for c in line], [c.speedup * c.step / c.low for c in line]]
        series.append(Series(name, xs, [c.speedup for c in line], *band))
    top = sorted({float(one.cell.workers) for one in shown})
    series.append(Series("ideal", top, top))
    best = max(shown, key=lambda one: one.cell.speedup)
    caption = (
        f"Samples a second over one device: {best.name} reaches {best.cell.speedup:.1f}x on {best.cell.workers} workers"
    )
    picture = charts.lines("Speedup over one device", caption, series, "workers", "speedup", log_y=len(top) > 4)
    rows = [
        [one.name, c.algorithm, str(c.workers), f"{c.speedup:.2f}", *_ms(c.step, c.low, c.high)]
        for one in shown
        for c in [one.cell]
    ]
    return figure(caption, picture, ("wire", "algorithm", "workers", "speedup", "step ms", "5 %", "95 %"), rows)


def _ms(*seconds: float) -> list[str]:
    return [f"{1e3 * one:.2f}" for one in seconds]


def _parts(shown: Sequence[Shown]) -> Markup:
    most = shown[0].setup.world
    names, cells = [one.name for one in shown], [one.cell for one in shown]
    stacks: dict[str, Sequence[float]] = {
        "compute": [1e3 * c.compute for c in cells],
        "exposed": [1e3 * max(0.0, c.exposed) for c in cells],
    }
    caption = f"What a step on {most} workers is made of: compute, and what communication adds to it"
    picture = charts.bars("Parts of a step", caption, names, stacks, "milliseconds")
    rows = [
        [one.name, *_ms(c.compute, c.exposed, c.communication, c.codec), c.bottleneck]
        for one, c in zip(shown, cells, strict=True)
    ]
    heads = ("wire", "compute ms", "exposed ms", "communication ms", "codec ms", "bottleneck")
    return figure(caption, picture, heads, rows)


def _bandwidth(sweep: Sweep, shown: Sequence[Shown]) -> Markup:
    most = shown[0].setup.world
    base = sweep.tuned_steps(replace(half_precision(sweep.cluster), world=most))
    xs = [float(b) for b in BANDWIDTHS]
    series = [Series(one.name, xs, [float(g) for g in base / sweep.tuned_steps(one.setup)]) for one in shown]
    now = sweep.cluster.levels[-1].bandwidth_gbit
    caption = f"Speedup over 16 bits against the bandwidth of the link, {most} workers; the cluster has {now:.3g} Gb/s"
    picture = charts.lines("Speedup over 16 bits by bandwidth", caption, series, "Gb/s", "speedup over 16 bits")
    rows = [[one.name, one.cell.algorithm, _gbit(one.cell.break_even_gbit), _gbit(one.cell.hide_gbit)] for one in shown]
    return figure(caption, picture, ("wire", "algorithm", "pays below Gb/s", "hidden from Gb/s"), rows)


def _gbit(value: float | None) -> str:
    return "never" if value is None else f"{value:.3g}"


def page(sweep: Sweep, cells: Sequence[Prediction], setups: Sequence[Setup] = ()) -> str:
    """The whole file. setups: what was asked for, one for each cell; default each cell's wire by "auto"."""
    setups = setups or [Setup(cell.workers, cell.wire) for cell in cells]
    # a line for each wire; where several algorithms were asked for, for each of both
    several = len({setup.algorithm for setup in setups}) > 1
    names = [f"{setup.wire} {setup.algorithm}" if several else setup.wire for setup in setups]
    shown = [Shown(*one) for one in zip(names, setups, cells, strict=True)]
    cluster, profile = sweep.cluster, sweep.profile
    title = f"{profile.name} on {cluster.name}"
    state = "measured" if cluster.measured else "not measured: take the intervals seriously"
    size = f"{profile.numel:,} parameters, batch {profile.batch}, {1e3 * profile.compute:.2f} ms ({profile.source})"
    setup = [["model", size], ["cluster", f"{cluster.name}, {state} ({cluster.source})"]]
    setup += [
        [f"link: {one.name}", f"{one.bandwidth_gbit:.3g} Gb/s, {one.latency_us:.3g} us"] for one in cluster.levels
    ]
    most = max(one.setup.world for one in shown)
    last = [one for one in shown if one.setup.world == most] if most > 1 else []
    figures = [_scaling(shown), *([_parts(last), _bandwidth(sweep, last)] if last else [])]
    data = json.dumps([cell.as_dict() for cell in cells]).replace("<", "\\u003c")
    viewport = lone("meta", name="viewport", content="width=device-width")
    head = tag("head", lone("meta", charset="utf-8"), viewport, tag("title", title), tag("style", Markup(STYLE)))
    script = tag("script", Markup(data), type="application/json", id="data")
    body = tag("body", join([tag("h1", title), table(("what", ""), setup), *figures, script], "\n"))
    return "<!doctype html>\n" + tag("html", head, body, lang="en")
