"""One HTML file for a sweep: figures as SVG, a table under each, the data inside. No request, no script needed."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from narrowcast.predict import svg
from narrowcast.predict.step import Prediction, Setup
from narrowcast.predict.svg import Series
from narrowcast.predict.sweep import BANDWIDTHS, Sweep, half_precision

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


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def figure(caption: str, picture: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    below = f"<details><summary>The numbers</summary>{table(heads, rows)}</details>"
    return f"<figure><figcaption>{html.escape(caption)}</figcaption>{picture}{below}</figure>"


def _lines_of(cells: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    found: dict[str, list[Prediction]] = {}
    for cell in cells:
        found.setdefault(cell.wire, []).append(cell)
    return found


def _scaling(cells: Sequence[Prediction]) -> str:
    series = []
    for wire, line in _lines_of(cells).items():
        xs = [float(c.workers) for c in line]
        band = [[c.speedup * c.step / c.high for c in line], [c.speedup * c.step / c.low for c in line]]
        series.append(Series(wire, xs, [c.speedup for c in line], *band))
    top = sorted({float(c.workers) for c in cells})
    series.append(Series("ideal", top, top))
    best = max(cells, key=lambda c: c.speedup)
    caption = f"Samples a second over one device: {best.wire} reaches {best.speedup:.1f}x on {best.workers} workers"
    picture = svg.lines("Speedup over one device", caption, series, "workers", "speedup", log_y=len(top) > 4)
    rows = [
        [c.wire, str(c.workers), f"{c.speedup:.2f}", f"{1e3 * c.step:.2f}", f"{1e3 * c.low:.2f}", f"{1e3 * c.high:.2f}"]
        for c in cells
    ]
    return figure(caption, picture, ("wire", "workers", "speedup", "step ms", "5 %", "95 %"), rows)


def _parts(cells: Sequence[Prediction]) -> str:
    most = max(c.workers for c in cells)
    shown = [c for c in cells if c.workers == most]
    names = [c.wire for c in shown]
    stacks: dict[str, Sequence[float]] = {
        "compute": [1e3 * c.compute for c in shown],
        "exposed": [1e3 * max(0.0, c.exposed) for c in shown],
    }
    caption = f"What a step on {most} workers is made of: compute, and what communication adds to it"
    picture = svg.bars("Parts of a step", caption, names, stacks, "milliseconds")
    rows = [
        [
            c.wire,
            f"{1e3 * c.compute:.2f}",
            f"{1e3 * c.exposed:.2f}",
            f"{1e3 * c.communication:.2f}",
            f"{1e3 * c.codec:.2f}",
            c.bottleneck,
        ]
        for c in shown
    ]
    heads = ("wire", "compute ms", "exposed ms", "communication ms", "codec ms", "bottleneck")
    return figure(caption, picture, heads, rows)


def _bandwidth(sweep: Sweep, cells: Sequence[Prediction]) -> str:
    most = max(c.workers for c in cells)
    shown = [c for c in cells if c.workers == most]
    half = half_precision(sweep.cluster)
    base = sweep.tuned_steps(Setup(most, half.wire, half.algorithm))
    xs = [float(b) for b in BANDWIDTHS]
    algorithm = {c.wire: c.algorithm for c in shown}
    gains = {c.wire: base / sweep.tuned_steps(Setup(most, c.wire)) for c in shown}
    series = [Series(wire, xs, [float(g) for g in gain]) for wire, gain in gains.items()]
    now = sweep.cluster.levels[-1].bandwidth_gbit
    caption = f"Speedup over 16 bits against the bandwidth of the link, {most} workers; the cluster has {now:.3g} Gb/s"
    picture = svg.lines("Speedup over 16 bits by bandwidth", caption, series, "Gb/s", "speedup over 16 bits")
    rows = [[c.wire, algorithm[c.wire], _gbit(c.break_even_gbit), _gbit(c.hide_gbit)] for c in shown]
    return figure(caption, picture, ("wire", "algorithm", "pays below Gb/s", "hidden from Gb/s"), rows)


def _gbit(value: float | None) -> str:
    return "never" if value is None else f"{value:.3g}"


def page(sweep: Sweep, cells: Sequence[Prediction]) -> str:
    """The whole file."""
    cluster, profile = sweep.cluster, sweep.profile
    title = f"{profile.name} on {cluster.name}"
    state = "measured" if cluster.measured else "not measured: take the intervals seriously"
    setup = [
        [
            "model",
            f"{profile.numel:,} parameters, batch {profile.batch}, {1e3 * profile.compute:.2f} ms ({profile.source})",
        ],
        ["cluster", f"{cluster.name}, {state} ({cluster.source})"],
        *(
            [f"link: {level.name}", f"{level.bandwidth_gbit:.3g} Gb/s, {level.latency_us:.3g} us"]
            for level in cluster.levels
        ),
    ]
    several = [c for c in cells if c.workers > 1]
    figures = [_scaling(cells), *([_parts(several), _bandwidth(sweep, several)] if several else [])]
    data = json.dumps([cell.as_dict() for cell in cells]).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>',
            f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
            table(("what", ""), setup),
            *figures,
            f'<script type="application/json" id="data">{data}</script></body></html>',
        ]
    )
