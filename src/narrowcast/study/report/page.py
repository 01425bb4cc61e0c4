"""The page: the verdict first, then figures with what they prove, then what the numbers rest on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from narrowcast import figures
from narrowcast.figures import Markup, document, lone, navigation, tag
from narrowcast.study.analysis.findings import Findings
from narrowcast.study.analysis.verdict import judge
from narrowcast.study.report import sections
from narrowcast.study.report.accuracy import accuracy_sentence, accuracy_table, trade
from narrowcast.study.report.bits import bits
from narrowcast.study.report.courses import time_to_accuracy
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
        ("by-bits", "Accuracy against bits", bits),
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


@dataclass
class Body:
    """Sections as they are made: what is drawn has a number, and what is not is listed with the reason."""

    context: Context
    limits: Limits
    parts: list[Markup] = field(default_factory=list)
    contents: list[tuple[str, str]] = field(default_factory=list)
    absent: list[tuple[str, str]] = field(default_factory=list)
    figures: int = 0

    def section(self, key: str, title: str, first: Sequence[Markup], makers: Sequence[tuple[str, str, Maker]]) -> None:
        """Without anything to show there is no heading either."""
        made = [(name, head, make(self.context)) for name, head, make in makers]
        self.absent += [(head, why) for _, head, why in made if isinstance(why, str)]
        figures = [self._figure(figure, name, head) for name, head, figure in made if isinstance(figure, Figure)]
        if first or figures:
            self.contents.append((key, title))
            self.parts += [tag("h2", title, id=key), *first, *figures]

    def add(self, key: str, title: str, made: Markup | str) -> None:
        """A section that is ready, or why there is none."""
        if isinstance(made, Markup):
            self.contents += [(key, title)] if made else []
            self.parts.append(made)
        else:
            self.absent.append((title, made))

    def _figure(self, figure: Figure, key: str, title: str) -> Markup:
        self.figures += bool(figure.pictures)
        return figures.figure(key, self.figures if figure.pictures else 0, title, *figure.markup(self.limits))

    def not_drawn(self) -> Markup:
        items = [tag("li", tag("b", f"{head}:"), f" {why}.") for head, why in self.absent]
        return (
            tag("section", tag("h2", "Not drawn", id="absent"), tag("ul", *items, class_="absent"))
            if items
            else Markup("")
        )


def _accuracy(context: Context, limits: Limits) -> list[Markup]:
    if not context.findings.accuracies:
        return []
    rows = context.by_wire(context.findings.accuracies)
    ordered = sorted(rows, key=lambda row: (str(row.data), str(row.model), row.workers))
    return [
        tag("p", accuracy_sentence(context), class_="proves"),
        accuracy_table(context, ordered).markup(limits.rows),
    ]


def _body(context: Context, limits: Limits) -> Body:
    body = Body(context, limits)
    for (key, title), makers in SECTIONS.items():
        body.section(key, title, _accuracy(context, limits) if key == "accuracy" else [], makers)
    body.add("bytes", "Bytes on the wire", sections.bytes_section(context, limits))
    body.add("insights", "Insights", sections.insights_section(context.findings))
    body.add("failed", "Failures", sections.failures_section(context.findings, limits))
    body.add("absent", "Not drawn", body.not_drawn())
    body.add("methods", "Methods", sections.methods_section(context.findings))
    return body


def _page(findings: Findings, limits: Limits) -> str:
    context, verdict = Context(findings), judge(findings)
    title = f"{findings.name}: {verdict.answer.value}"
    made = _body(context, limits)
    maker = f"Made by narrowcast {findings.session['versions'].get('narrowcast', '')} from results.jsonl."
    body = [
        *(tag("a", "Skip to the figures", href="#main", class_="skip"), _hatch(), sections.opening(verdict)),
        *(navigation(made.contents), tag("main", _filters(findings), *made.parts, id="main")),
        tag("footer", tag("p", maker)),
    ]
    return document(f"narrowcast study · {title}", body, summary(findings, with_rows=limits.data))


def page(findings: Findings) -> str:
    """The whole file; of a study that is too large for it, the first of all panels and rows."""
    for limits in LIMITS:
        text = _page(findings, limits)
        if len(text.encode()) < LARGEST:
            break
    return text
