"""The page: the verdict first, then figures with what they prove, then what the numbers rest on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from importlib.resources import files

from narrowcast.figures import Markup, lone, tag
from narrowcast.study.analysis.findings import Findings
from narrowcast.study.analysis.verdict import judge
from narrowcast.study.report import sections
from narrowcast.study.report.accuracy import accuracy_sentence, accuracy_table, time_to_accuracy, trade
from narrowcast.study.report.errors import layers, predictions
from narrowcast.study.report.export import summary
from narrowcast.study.report.figure import FILTERS, Context, Figure, Limits
from narrowcast.study.report.speedups import elsewhere, speedups
from narrowcast.study.report.steps import breakdown, bus, scaling

Maker = Callable[[Context], Figure | str]
"""Gives a figure, or why these data cannot fill it."""
SECTIONS: dict[tuple[str, str], Sequence[tuple[str, str, Maker]]] = {
    ("speed", "Speed"): (
        ("heat", "Speedup by wire and link rate", speedups),
        ("scaling", "Scaling with the number of workers", scaling),
        ("breakdown", "What a step is made of", breakdown),
        ("bus", "Bus bandwidth against message size", bus),
    ),
    ("accuracy", "Accuracy"): (
        ("trade", "Accuracy against speed", trade),
        ("when", "Time to accuracy", time_to_accuracy),
        ("layers", "Error by layer", layers),
    ),
    ("trust", "Predictions"): (
        ("predicted", "Predicted against measured", predictions),
        ("elsewhere", "Predicted: speedup on other machines", elsewhere),
    ),
}
"""Sections and figures, in their order, with their anchors and titles."""
LARGEST = 1_000_000
"""Bytes of the file."""
LIMITS = (Limits(), Limits(data=False), Limits(24, 300, False), Limits(12, 60, False), Limits(6, 12, False))
"""Tried in this order until the file is small enough; what is left out is said where it is missing."""


def _resource(name: str) -> str:
    return (files("narrowcast.study.report") / name).read_text(encoding="utf-8")


def _filters(findings: Findings) -> Markup:
    """Checkboxes, hidden until the script is there to obey them."""
    sets = []
    for name in FILTERS:
        values = list(dict.fromkeys(str(line[name]) for line in findings.cases if line.get(name) not in (None, "")))
        ordered = findings.wires if name == "wire" else sorted(values, key=int) if name == "workers" else values
        boxes = [
            tag("label", lone("input", type="checkbox", name=name, value=value, checked=True), tag("span", value))
            for value in ordered
        ]
        sets.append(tag("fieldset", tag("legend", name.capitalize().removesuffix("s") + "s"), *boxes))
    reset = tag("button", "Show all", type="reset")
    status = tag("output", "", id="shown", aria_live="polite")
    return tag("form", *sets, tag("p", reset, " ", status), id="filters", hidden=True, aria_label="Filters")


def _hatch() -> Markup:
    """The pattern of predicted cells, once for all drawings."""
    path = lone("path", d="M-1 1L1 -1M0 6L6 0M5 7L7 5", class_="hatch")
    pattern = tag("pattern", path, id="hatch", width="6", height="6", patternUnits="userSpaceOnUse")
    return tag("svg", tag("defs", pattern), width="0", height="0", class_="defs", aria_hidden="true")


def _figures(context: Context, limits: Limits) -> list[Markup]:
    parts, numbers = [], itertools.count(1)
    for (key, title), makers in SECTIONS.items():
        parts.append(tag("h2", title, id=key))
        if key == "accuracy" and context.findings.accuracies:
            rows = context.by_wire(context.findings.accuracies)
            ordered = sorted(rows, key=lambda row: (str(row.data), str(row.model), row.workers))
            parts.append(tag("p", accuracy_sentence(context), class_="proves"))
            parts.append(accuracy_table(context, ordered).markup(limits.rows))
        parts += [_figure(make(context), next(numbers), name, head, limits) for name, head, make in makers]
    return parts


def _figure(figure: Figure | str, number: int, key: str, title: str, limits: Limits) -> Markup:
    head = tag("h3", tag("span", f"Figure {number}", class_="number"), " ", title, id=f"{key}-title")
    absent = [tag("p", f"Left out: {figure}.", class_="absent")]
    parts = absent if isinstance(figure, str) else figure.markup(limits)
    return tag("section", head, *parts, class_="figure", id=key, aria_labelledby=f"{key}-title")


def _contents() -> Markup:
    places = [*SECTIONS, ("bytes", "Bytes"), *([("insights", "Insights")] if sections.all_statements() else [])]
    places += [("failed", "Failures"), ("methods", "Methods")]
    links = [tag("li", tag("a", title, href=f"#{key}")) for key, title in places]
    toggle = tag("button", "Light or dark", type="button", id="theme", hidden=True)
    return tag("nav", tag("ul", *links), toggle, aria_label="Contents")


def _page(findings: Findings, limits: Limits) -> str:
    context, verdict = Context(findings), judge(findings)
    title = f"{findings.name}: {verdict.answer.value}"
    text = json.dumps(summary(findings, with_rows=limits.data), separators=(",", ":"), allow_nan=False)
    main = [
        *(_filters(findings), *_figures(context, limits), sections.bytes_section(context, limits)),
        *(sections.insights_section(findings), sections.failures_section(findings, limits)),
        sections.methods_section(findings),
    ]
    head = [
        lone("meta", charset="utf-8"),
        lone("meta", name="viewport", content="width=device-width, initial-scale=1"),
        lone("meta", name="color-scheme", content="light dark"),
        tag("title", f"narrowcast study · {title}"),
        tag("style", Markup(_resource("report.css"))),
    ]
    maker = f"Made by narrowcast {findings.session['versions'].get('narrowcast', '')} from results.jsonl."
    body = [
        *(tag("a", "Skip to the figures", href="#speed", class_="skip"), _hatch(), sections.opening(verdict)),
        *(_contents(), tag("main", *main), tag("footer", tag("p", maker))),
        # a closing tag inside of a string would end the script
        tag("script", Markup(text.replace("<", "\\u003c")), type="application/json", id="data"),
        tag("script", Markup(_resource("report.js"))),
    ]
    return "<!doctype html>\n" + tag("html", tag("head", *head), tag("body", *body), lang="en") + "\n"


def page(findings: Findings) -> str:
    """The whole file; of a study that is too large for it, the first of all panels and rows."""
    for limits in LIMITS:
        text = _page(findings, limits)
        if len(text.encode()) < LARGEST:
            break
    return text
