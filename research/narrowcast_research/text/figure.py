"""Loss against steps and against time, as one SVG, and a table of the same runs.

python -m narrowcast_research.text.figure runs.jsonl --page docs/text.md: the figure goes to figures/ beside the page,
the table between the page's two marks.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from narrowcast.figures import COLOURS, Axis, Markup, join, line, lone, mark, number, points, tag
from narrowcast_research.text.runs import Curve, TextRun, files_in, read

WIDTH, HEIGHT = 900, 420
LEFT, BETWEEN, RIGHT, TOP, BOTTOM = 60, 40, 20, 74, 56
PANEL = (WIDTH - LEFT - BETWEEN - RIGHT) / 2
DASHES = (None, "7 3", "2 3", "9 3 2 3")
BEGIN, END = "<!-- runs -->", "<!-- end of runs -->"
LEVELS = (0.25, 0.5, 1.0)
"""Losses that are timed: those of the first wire after these parts of its steps, to a tenth above."""
HIGHEST = 0.05
"""What came before this part of the steps is above the figure: the first losses would press all others together."""
POINTS = 250
"""About as many of each curve are drawn."""

ByWire = dict[str, list[TextRun]]


def by_wire(runs: Sequence[TextRun], first: str | None = None) -> ByWire:
    """Complete runs, seeds in order; `first`, where given, is what the others are compared with."""
    found: ByWire = {}
    for run in sorted((run for run in runs if run.complete), key=lambda run: (run.wire != first, run.seed)):
        found.setdefault(run.wire, []).append(run)
    if not found:
        raise ValueError("no complete run; let narrowcast_research.text.plan make some")
    return found


def draw(wires: ByWire, title: str) -> Markup:
    """Two panels with one scale of losses. The run with most steps is drawn thick, with marks of held-out loss."""
    longest = max(run.steps for runs in wires.values() for run in runs)
    panels = [("step", "steps", LEFT), ("seconds", "seconds of training", LEFT + PANEL + BETWEEN)]
    shown = {
        key: {wire: [_from(run, key, HIGHEST * longest) for run in runs] for wire, runs in wires.items()}
        for key, _, _ in panels
    }
    losses = [y for curves in shown["step"].values() for curve in curves for _, y in curve]
    losses += [y for runs in wires.values() for run in runs for _, y in run.held_out_curve("step")[1:]]
    up = Axis([math.floor(min(losses) * 2) / 2, max(losses)], HEIGHT - BOTTOM, TOP, log=False)
    parts = [
        tag("title", title, id="title"),
        tag("desc", "; ".join(_words(wire, runs) for wire, runs in wires.items()), id="description"),
        lone("rect", width=WIDTH, height=HEIGHT, fill="white"),
        tag("text", title, x=LEFT, y=24, font_size=15),
        *_legend(list(wires)),
    ]
    for key, name, left in panels:
        xs = [0.0, *(x for curves in shown[key].values() for curve in curves for x, _ in curve)]
        across = Axis(xs, left, left + PANEL, log=False)
        parts += _frame(across, up, name)
        for place, (wire, runs) in enumerate(wires.items()):
            for run, curve in zip(runs, shown[key][wire], strict=True):
                thick = run.seed == runs[0].seed
                parts += _curve(curve, run.held_out_curve(key) if thick else [], across, up, place, thick)
    head = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img"}
    font = {"aria_labelledby": "title description", "font_family": "sans-serif", "font_size": 13}
    return tag("svg", join(parts, "\n"), **head, **font)


def _from(run: TextRun, key: str, step: float) -> Curve:
    first = run.rows[min((s for s in run.rows if s >= step), default=run.steps)][key]
    curve = [(x, y) for x, y in run.train_curve(key) if x >= first]
    # the last point stays, whatever is left out before
    return curve[:: -max(1, len(curve) // POINTS)][::-1]


def _words(wire: str, runs: Sequence[TextRun]) -> str:
    ends = ", ".join(
        f"seed {run.seed} after {run.steps} steps and {run.end['seconds']:.0f} s {run.smooth(run.steps):.3f}"
        for run in runs
    )
    return f"{wire}: training loss of {ends}"


def _style(place: int) -> dict[str, object]:
    return {"stroke": COLOURS[place % len(COLOURS)], "stroke_dasharray": DASHES[place % len(DASHES)], "fill": "none"}


def _legend(names: Sequence[str]) -> list[Markup]:
    parts = []
    for place, name in enumerate(names):
        x = LEFT + 190.0 * place
        parts.append(line(x, 46, x + 30, 46, stroke_width=2, **_style(place)))
        parts.append(tag("text", name, x=x + 36, y=50))
    note = "thin: other seeds; dots: held-out loss"
    return [*parts, tag("text", note, x=WIDTH - RIGHT, y=50, text_anchor="end", fill="#444")]


def _frame(across: Axis, up: Axis, unit: str) -> list[Markup]:
    parts = [line(across.begin, up.begin, across.end, up.begin, stroke="#333")]
    below = {across.at(value): number(value) for value in across.ticks()}
    parts += [tag("text", name, x=x, y=up.begin + 18, text_anchor="middle") for x, name in below.items()]
    for value in up.ticks():
        parts.append(line(across.begin, up.at(value), across.end, up.at(value), stroke="#ddd"))
        parts.append(tag("text", number(value), x=across.begin - 6, y=up.at(value) + 4, text_anchor="end"))
    centre = (across.begin + across.end) / 2
    return [*parts, tag("text", f"loss against {unit}", x=centre, y=HEIGHT - 14, text_anchor="middle")]


def _curve(curve: Curve, dots: Curve, across: Axis, up: Axis, place: int, thick: bool) -> list[Markup]:
    style = {**_style(place), "stroke_width": "2" if thick else "0.8"}
    path = points((across.at(x), up.at(y)) for x, y in curve)
    seen = [(across.at(x), up.at(y)) for x, y in dots if y <= up.high]
    marks = [mark("circle", x, y, 2.5, fill=COLOURS[place % len(COLOURS)]) for x, y in seen]
    return [lone("polyline", points=path, **style), *marks]


def common_step(wires: ByWire) -> int:
    """The last one at which every run has held-out loss."""
    steps = [{step for step, row in run.rows.items() if "held_out" in row} for runs in wires.values() for run in runs]
    return max(set.intersection(*steps), default=0)


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation, where there are several."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def levels(run: TextRun) -> list[float]:
    """Losses to be timed, the highest first."""
    curve = run.held_out_curve("step")
    chosen = {min(y for x, y in curve if x <= max(curve[0][0], share * run.steps)) for share in LEVELS}
    return sorted({math.ceil(loss * 10 - 1e-6) / 10 for loss in chosen}, reverse=True)


def tables(wires: ByWire) -> str:
    """Losses with their spread over seeds, then times, as Markdown."""
    step, first = common_step(wires), next(iter(wires.values()))[0]
    last = min(runs[0].steps for runs in wires.values())
    wanted: Mapping[str, Callable[[str, list[TextRun]], str]] = {
        "wire": lambda wire, runs: f"`{wire}`",
        "seeds": lambda wire, runs: str(len(runs)),
        f"training loss, step {step}": lambda wire, runs: mean_and_spread([run.smooth(step) for run in runs]),
        f"held-out, step {step}": lambda wire, runs: mean_and_spread([run.rows[step]["held_out"] for run in runs]),
        f"training loss, seed {first.seed}, step {last}": lambda wire, runs: f"{runs[0].smooth(last):.3f}",
        f"held-out, step {last}": lambda wire, runs: _loss(runs[0].held_out_at(last)),
    }
    base = {loss: first.seconds_to(loss) for loss in levels(first)}
    timed: dict[str, Callable[[str, list[TextRun]], str]] = {
        "wire": lambda wire, runs: f"`{wire}`",
        "step, ms": lambda wire, runs: f"{1e3 * statistics.median(run.step_seconds() for run in runs):.0f}",
        f"s for {last} steps": lambda wire, runs: f"{runs[0].rows[last]['seconds']:.0f}",
    }
    for loss, seconds in base.items():
        timed[f"s to held-out {loss:g}"] = lambda wire, runs, loss=loss, seconds=seconds: _time(  # type: ignore[misc]
            runs[0].seconds_to(loss), seconds
        )
    return "\n\n".join(_table(columns, wires) for columns in (wanted, timed))


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _time(seconds: float | None, base: float | None) -> str:
    if seconds is None:
        return "not reached"
    return f"{seconds:.0f} ({base / seconds:.2f}x)" if base and seconds else f"{seconds:.0f}"


def _table(columns: Mapping[str, Callable[[str, list[TextRun]], str]], wires: ByWire) -> str:
    rows = [list(columns), ["---"] * len(columns)]
    rows += [[cell(wire, runs) for cell in columns.values()] for wire, runs in wires.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def put_into(page: str, text: str) -> str:
    """The page with the text between its marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"--page: needs {BEGIN} and {END} once each, around what is to be replaced")
    return re.sub(f"(?s){BEGIN}.*{END}", lambda _: f"{BEGIN}\n{text}\n{END}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="Files or folders of runs.")
    parser.add_argument("--page", type=Path, help="Markdown with two marks; without it the table is printed.")
    parser.add_argument("--figure", type=Path, help="Default figures/text.svg beside the page, or text.svg.")
    parser.add_argument("--first", default="bf16-hook", help="The wire that others are compared with.")
    arguments = parser.parse_args()
    wires = by_wire(read(files_in(arguments.runs)), arguments.first)
    figure = arguments.figure or (arguments.page.parent / "figures/text.svg" if arguments.page else Path("text.svg"))
    figure.parent.mkdir(parents=True, exist_ok=True)
    title = "Loss of a language model by what travels between its ranks"
    figure.write_text(draw(wires, title) + "\n")
    text = tables(wires)
    if arguments.page is None:
        sys.stdout.write(text + "\n")
        return
    shown = f"![{title}](figures/{figure.name})\n\n{text}"
    arguments.page.write_text(put_into(arguments.page.read_text(), shown))


if __name__ == "__main__":
    main()
