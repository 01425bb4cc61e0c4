"""What stands behind the figures: bytes, insights, failures, methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from narrowcast import plugins
from narrowcast.figures import Markup, tag
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.findings import WITHIN, Findings, Step
from narrowcast.study.report.context import Context
from narrowcast.study.report.markup import Limits, Table, TableRow

METHODS = (
    """Step times: the repeats of all wires of a setting are interleaved and warm-up is dropped. Medians over all steps;
    95 % intervals from a bootstrap that draws repeats, then steps within them, the same repeats for both sides of a
    ratio. A speedup is a ratio of medians. Of a wire's algorithms the verdict takes the default, never the fastest.
    Faster everywhere needs every setting at 95 %; faster in some needs one of them at a confidence that is corrected
    for their number (Bonferroni), since among many settings one looks faster by chance.""",
    """Accuracy: the same seed means the same initial weights and batches for every wire. Mean differences, Student's
    interval; equal means that two one-sided tests at 5 % put it inside of ±{margin}, a margin fixed before
    the study ran. No loss needs that, or better, on every data set, so the several tests need no correction; where a
    training failed, nothing is called kept.""",
    """Predictions carry their own intervals and are never mixed into a measured number.""",
)


class Support(Enum):
    """What the data say about a statement."""

    YES = "supported"
    NO = "not supported"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True)
class Insight:
    """A statement, and what the data say about it."""

    statement: str
    support: Support
    because: str

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "support": self.support.value}


@dataclass(frozen=True)
class Statements:
    """What a plugin holds against the data of a study."""

    source: str
    """Whose they are."""
    note: str
    judge: Callable[[Findings], list[Insight]]


def all_statements() -> list[Statements]:
    return [plugins.resolve(reference) for reference in plugins.loaded().statements]


def insights(findings: Findings) -> list[Insight]:
    """Every statement of every plugin; none where no plugin has any."""
    return [insight for statements in all_statements() for insight in statements.judge(findings)]


SIGNS = {Support.YES: "✓", Support.NO: "✗", Support.UNKNOWN: "?"}


def _byte_row(context: Context, step: Step) -> TableRow:
    sent, off = step.line["bytes"], step.bytes_off
    assert off is not None
    numbers = [f"{sent[name]:,.0f}" for name in ("claimed", "protocol", "counted", "plain")]
    verdict = formatting.percent(off, 2) + ("" if abs(off) <= WITHIN else " — too far")
    head = (step.model, context.label(step), step.transport, formatting.rate(step.rate_name), step.workers)
    return TableRow((*head, *numbers, verdict), step)


def bytes_section(context: Context, limits: Limits) -> Markup:
    measured = context.findings.measured
    steps = [step for step in measured if step.bytes_off is not None]
    head = tag("h2", "Bytes on the wire", id="bytes")
    if not steps:
        why = "Left out: bytes are counted at the interface in the lab only, and this study did not run there."
        return tag("section", head, tag("p", why, class_="absent"))
    off = [abs(step.bytes_off or 0.0) for step in steps]
    within = len(steps) - len(context.findings.gaps())
    sentence = (
        f"In {within} of {formatting.count(len(steps), 'setting')} the bytes counted at the interface agree within "
        f"{100 * WITHIN:.0f} % with what the codec claims plus the protocol's headers; the largest difference is "
        f"{100 * max(off):.1f} %."
    )
    if uncounted := len(measured) - len(steps):
        sentence += f" In {formatting.count(uncounted, 'more setting')} nothing could be counted."
    heads = ("model", "wire", "over", "link", "workers", "claimed", "protocol", "counted", "float32", "difference")
    table = Table("Bytes sent by a rank in a step", heads, [_byte_row(context, s) for s in steps], left=4)
    details = tag(
        "details", tag("summary", f"The numbers ({len(steps)} rows)"), table.markup(limits.rows), class_="numbers"
    )
    return tag("section", head, tag("p", sentence, class_="proves"), details)


def insights_section(findings: Findings) -> Markup:
    """A table for each plugin that brings statements; nothing where none does."""
    parts = [part for statements in all_statements() for part in _judged(statements, findings)]
    head = tag("h2", "What was believed, and what these data say", id="insights")
    return tag("section", head, *parts) if parts else Markup("")


def _judged(statements: Statements, findings: Findings) -> list[Markup]:
    rows = []
    for insight in statements.judge(findings):
        sign = tag("span", f"{SIGNS[insight.support]} ", aria_hidden="true")
        kind = insight.support.name.lower()
        rows.append(
            TableRow((insight.statement, tag("span", sign, insight.support.value, class_=f"s-{kind}"), insight.because))
        )
    table = Table(
        "Statements, and what these data say about them",
        ("statement", "these data", "because"),
        rows,
        left=3,
        prose=True,
    )
    return [tag("p", statements.note), table.markup()]


def failures_section(findings: Findings, limits: Limits) -> Markup:
    head = tag("h2", "What failed", id="failed")
    if not findings.failures:
        return tag("section", head, tag("p", "Nothing: every case that was started ended with a result."))
    rows = [TableRow((failed.line["case"], failed.error or "no message"), failed) for failed in findings.failures]
    sentence = (
        f"{formatting.count(len(rows), 'case')} of {len(findings.cases)} failed; they are missing from all figures."
    )
    return tag(
        "section",
        head,
        tag("p", sentence),
        Table("Failed cases", ("case", "error"), rows, left=2, prose=True).markup(limits.rows),
    )


def methods_section(findings: Findings) -> Markup:
    paragraphs = [text.format(margin=formatting.margin(findings.margin)) for text in METHODS]
    text = findings.session.get("text") or ""
    pre = tag("pre", text, tabindex="0", role="region", aria_label="The study file")
    file = tag("details", tag("summary", "The study file"), pre, class_="numbers") if text else ""
    starts = formatting.listed([formatting.moment(session["started"]) for session in findings.sessions])
    runs = f"Started {formatting.count(len(findings.sessions), 'time')}: {starts}."
    body = [tag("p", paragraph) for paragraph in [*paragraphs, runs]]
    return tag("section", tag("h2", "Methods", id="methods"), *body, file)
