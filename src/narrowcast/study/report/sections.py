"""What stands around the figures: the first screen, then bytes, insights, failures, methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from narrowcast import figures, plugins
from narrowcast.figures import Markup, tag, tile
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.findings import WITHIN, Findings
from narrowcast.study.analysis.statistics import Conclusion
from narrowcast.study.analysis.verdict import (
    Answer,
    RateFinding,
    Verdict,
    conclusion_words,
    headline,
    how_sure,
    speed_sentences,
    unknown_words,
)
from narrowcast.study.execution.results import Line
from narrowcast.study.report.figure import Context, Limits, Table, TableRow

ANSWERS = {Answer.YES: "yes", Answer.DEPENDS: "depends", Answer.NO: "no", Answer.LOST: "no", Answer.UNKNOWN: "unknown"}
QUESTION = "Can low-precision communication speed up training with no loss of accuracy?"
SIGNS = {"YES": "✓", "NO": "✗", "UNKNOWN": "?"}
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


def _rate_tile(rate: RateFinding) -> Markup:
    source = "predicted" if rate.predicted else "measured"
    where = formatting.at_rate(rate.rate_name)
    if len(rate.steps) == 1:
        low, high = rate.speedups[0].low, rate.speedups[0].high
        return tile(rate.gain, f"as fast {where}", f"{source}, 95 %: {low:.2f}–{high:.2f}")
    faster = sum(step.faster is True for step in rate.steps)
    small = f"{source}; faster in {faster} of {formatting.count(len(rate.steps), 'setting')}"
    return tile(rate.gain.replace("× to ", "–"), f"as fast {where}", small)


def _accuracy_tile(verdict: Verdict) -> list[Markup]:
    differences = [row.difference for row in verdict.accuracies if row.difference is not None]
    if not differences:
        return []
    worst = min(differences, key=lambda e: e.mean)
    conclusions = [row.conclusion for row in verdict.accuracies]
    kept = sum(conclusion in (Conclusion.EQUAL, Conclusion.BETTER) for conclusion in conclusions)
    how = "not lost" if Conclusion.BETTER in conclusions else f"within ±{worst.margin:g}"
    among = formatting.count(len(conclusions) + len(verdict.uncompared), "comparison")
    return [tile(formatting.signed(worst.mean, 2), "points", f"of accuracy at worst; {how} in {kept} of {among}")]


def _bytes_tile(verdict: Verdict) -> list[Markup]:
    """Of the settings that the verdict counts."""
    sent = [step.line.get("bytes") or {} for step in verdict.settings]
    shares = [100 * each["claimed"] / each["plain"] for each in sent if each.get("claimed") and each.get("plain")]
    if not shares:
        return []
    ends = dict.fromkeys(f"{share:.0f}" for share in (min(shares), max(shares)))
    return [tile(f"{'–'.join(ends)} %", "of the bytes", f"of {verdict.findings.baseline} on the wire")]


def _machine(machine: dict[str, Any]) -> str:
    size = (formatting.count(machine.get("cores") or 0, "core"), f"{machine.get('memory_gib')} GiB")
    parts = (machine.get("cpu"), *size, machine.get("gpu"), machine.get("system"))
    return ", ".join(str(part) for part in parts if part)


def _versions(session: Line) -> str:
    return ", ".join(f"{name} {version}" for name, version in session["versions"].items())


def provenance(findings: Findings) -> dict[str, str]:
    """What the results come from. A study that was resumed may come from several; each has its cases."""
    more = len(findings.sessions) - 1
    again = "once" if more == 1 else f"{more} times"
    return {
        "Machine": formatting.shares(findings.cases_by(lambda session: _machine(session["machine"]))),
        "Run": formatting.moment(findings.sessions[0]["started"]) + (f", resumed {again}" if more else ""),
        "Launcher": formatting.shares(findings.cases_by(lambda session: str(session["launcher"]))),
        "Versions": formatting.shares(findings.cases_by(_versions)),
        "Commit": formatting.shares(findings.cases_by(lambda session: str(session.get("commit") or "unknown"))),
    }


def _distinct(findings: Findings, name: str, kinds: tuple[str, ...] = ("time", "accuracy")) -> list[str]:
    lines = [line for line in findings.cases if line["kind"] in kinds and line["source"] != "predicted"]
    return list(dict.fromkeys(str(line[name]) for line in lines if line.get(name) not in (None, "")))


def _setup(findings: Findings) -> Markup:
    steps = sum(len(repeat) for s in findings.measured for repeat in s.line["steps_ms"])
    rates = sorted({(s.rate_bits, formatting.rate(s.rate_name)) for s in findings.measured})
    facts = {
        **provenance(findings),
        "Models": ", ".join(_distinct(findings, "model")),
        "Data": ", ".join(_distinct(findings, "data")),
        "Wires": ", ".join(wire for wire in findings.wires if wire in _distinct(findings, "wire")),
        "Links": ", ".join(name for _, name in rates),
        "Workers": ", ".join(sorted(_distinct(findings, "workers", ("time",)), key=int)),
        "Measured": f"{formatting.count(len(findings.measured), 'setting')}, {steps:,} steps; "
        f"{formatting.count(sum(row.seeds for row in findings.accuracies), 'training')}",
    }
    return figures.facts("Set-up", facts)


def _primary_table(verdict: Verdict) -> Markup:
    if not verdict.accuracies and not verdict.uncompared:
        return tag("p", "Accuracy was not compared: nothing was trained with both wires.", class_="absent")
    rows = []
    for row in verdict.accuracies:
        assert row.difference is not None
        shown = formatting.difference(row.difference.interval)
        rows.append(TableRow((row.data, row.model, row.difference.seeds, shown, conclusion_words(row)), row))
    rows += [TableRow((row.data, row.model, 0, "", unknown_words(row)), row) for row in verdict.uncompared]
    caption = f"Accuracy of {verdict.findings.primary} beside {verdict.findings.baseline}, points"
    return Table(caption, "data | model | seeds | difference (95 %) | finding", rows, left=2, tail=1).markup()


def opening(verdict: Verdict) -> Markup:
    findings = verdict.findings
    answer, _, rest = headline(verdict).partition(". ")
    tiles = [*map(_rate_tile, verdict.rates[:3]), *_accuracy_tile(verdict), *_bytes_tile(verdict)]
    sure = [tag("li", sentence) for sentence in [*speed_sentences(verdict), *how_sure(verdict)]]
    both = figures.beside("How sure", [tag("ul", *sure), _primary_table(verdict)], _setup(findings))
    question = tag("p", f"{QUESTION} Here: {findings.primary} against {findings.baseline}.", class_="question")
    numbers = tag("ul", *tiles, class_="tiles") if tiles else Markup("")
    kicker, kind = f"narrowcast study · {findings.name}", ANSWERS[verdict.answer]
    return figures.opening(kicker, kind, answer, rest, question, numbers, both)


def bytes_section(context: Context, limits: Limits) -> Markup | str:
    """Or why there is none."""
    measured = context.findings.measured
    steps = [(step, off) for step in measured if (off := step.bytes_off) is not None]
    head = tag("h2", "Bytes on the wire", id="bytes")
    if not steps:
        return "bytes are counted at the interface in the lab only, and this study did not run there"
    within = sum(abs(off) <= WITHIN for _, off in steps)
    sentence = (
        f"In {within} of {formatting.count(len(steps), 'setting')} the bytes counted at the interface agree within "
        f"{100 * WITHIN:.0f} % with what the codec claims plus the protocol's headers; the largest difference is "
        f"{100 * max(abs(off) for _, off in steps):.1f} %."
    )
    if uncounted := len(measured) - len(steps):
        sentence += f" In {formatting.count(uncounted, 'more setting')} nothing could be counted."
    heads = "model | wire | over | link | workers | claimed | protocol | counted | float32 | difference"
    rows = []
    for step, off in steps:
        numbers = [f"{step.line['bytes'][name]:,.0f}" for name in ("claimed", "protocol", "counted", "plain")]
        difference = formatting.percent(off, 2) + ("" if abs(off) <= WITHIN else " — too far")
        rows.append((step, (*numbers, difference)))
    table = context.table("Bytes sent by a rank in a step", heads, rows)
    return tag("section", head, tag("p", sentence, class_="proves"), table.details(limits))


def insights_section(findings: Findings) -> Markup:
    """A table for each plugin that brings statements; nothing where none does."""
    parts = [part for statements in all_statements() for part in _judged(statements, findings)]
    head = tag("h2", "What was believed, and what these data say", id="insights")
    return tag("section", head, *parts) if parts else Markup("")


def _judged(statements: Statements, findings: Findings) -> list[Markup]:
    rows = []
    for insight in statements.judge(findings):
        kind = insight.support.name
        sign = tag("span", f"{SIGNS[kind]} ", aria_hidden="true")
        answer = tag("span", sign, insight.support.value, class_=f"s-{kind.lower()}")
        rows.append(TableRow((insight.statement, answer, insight.because)))
    caption = "Statements, and what these data say about them"
    table = Table(caption, "statement | these data | because", rows, left=3, prose=True)
    return [tag("p", statements.note), table.markup()]


def failures_section(findings: Findings, limits: Limits) -> Markup:
    head = tag("h2", "What failed", id="failed")
    if not findings.failures:
        return tag("section", head, tag("p", "Nothing: every case that was started ended with a result."))
    rows = [TableRow((failed.line["case"], failed.error or "no message"), failed) for failed in findings.failures]
    failed = f"{formatting.count(len(rows), 'case')} of {len(findings.cases)} failed"
    table = Table("Failed cases", "case | error", rows, left=2, prose=True)
    return tag("section", head, tag("p", f"{failed}; they are missing from all figures."), table.markup(limits.rows))


def methods_section(findings: Findings) -> Markup:
    paragraphs = [text.format(margin=formatting.margin(findings.margin)) for text in METHODS]
    text = findings.session.get("text") or ""
    pre = tag("pre", text, tabindex="0", role="region", aria_label="The study file")
    file = tag("details", tag("summary", "The study file"), pre, class_="numbers") if text else ""
    starts = formatting.listed([formatting.moment(session["started"]) for session in findings.sessions])
    runs = f"Started {formatting.count(len(findings.sessions), 'time')}: {starts}."
    body = [tag("p", paragraph) for paragraph in [*paragraphs, runs]]
    return tag("section", tag("h2", "Methods", id="methods"), *body, file)
