"""The first screen: the answer, the numbers that it rests on, how sure it is, and the set-up."""

from __future__ import annotations

from typing import Any

from narrowcast.figures import Markup, join, tag
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import share_words
from narrowcast.study.analysis.findings import Findings
from narrowcast.study.analysis.statistics import Conclusion
from narrowcast.study.analysis.verdict import (
    MEANING,
    Answer,
    RateFinding,
    Verdict,
    failed_words,
    headline,
    how_sure,
    speed_sentences,
    unknown_words,
)
from narrowcast.study.execution.results import Line
from narrowcast.study.report.markup import Table, TableRow

ANSWERS = {Answer.YES: "yes", Answer.DEPENDS: "depends", Answer.NO: "no", Answer.LOST: "no", Answer.UNKNOWN: "unknown"}
QUESTION = "Can low-precision communication speed up training with no loss of accuracy?"


def _tile(number: str, what: str, small: str) -> Markup:
    return tag("li", tag("strong", number), tag("span", what), tag("small", small))


def _rate_tile(rate: RateFinding) -> Markup:
    source = "predicted" if rate.predicted else "measured"
    where = formatting.at_rate(rate.rate_name)
    if len(rate.steps) == 1:
        low, high = rate.speedups[0].low, rate.speedups[0].high
        return _tile(rate.gain, f"as fast {where}", f"{source}, 95 %: {low:.2f}–{high:.2f}")
    faster = sum(step.faster is True for step in rate.steps)
    small = f"{source}; faster in {faster} of {formatting.count(len(rate.steps), 'setting')}"
    return _tile(rate.gain.replace("× to ", "–"), f"as fast {where}", small)


def _accuracy_tile(verdict: Verdict) -> list[Markup]:
    differences = [row.difference for row in verdict.accuracies if row.difference is not None]
    if not differences:
        return []
    worst = min(differences, key=lambda e: e.mean)
    conclusions = [row.conclusion for row in verdict.accuracies]
    kept = sum(conclusion in (Conclusion.EQUAL, Conclusion.BETTER) for conclusion in conclusions)
    how = "not lost" if Conclusion.BETTER in conclusions else f"within ±{worst.margin:g}"
    among = formatting.count(len(conclusions) + len(verdict.uncompared), "comparison")
    return [_tile(formatting.signed(worst.mean, 2), "points", f"of accuracy at worst; {how} in {kept} of {among}")]


def _bytes_tile(verdict: Verdict) -> list[Markup]:
    """Of the settings that the verdict counts."""
    sent = [step.line.get("bytes") or {} for step in verdict.settings]
    shares = [100 * found["claimed"] / found["plain"] for found in sent if found.get("claimed") and found.get("plain")]
    if not shares:
        return []
    ends = dict.fromkeys(f"{share:.0f}" for share in (min(shares), max(shares)))
    return [_tile(f"{'–'.join(ends)} %", "of the bytes", f"of {verdict.findings.baseline} on the wire")]


def _tiles(verdict: Verdict) -> Markup:
    tiles = [*(_rate_tile(rate) for rate in verdict.rates[:3]), *_accuracy_tile(verdict), *_bytes_tile(verdict)]
    return tag("ul", *tiles, class_="tiles") if tiles else Markup("")


def _machine(machine: dict[str, Any]) -> str:
    gpu = machine.get("gpu")
    parts = [
        machine.get("cpu"),
        formatting.count(machine.get("cores") or 0, "core"),
        f"{machine.get('memory_gib')} GiB",
    ]
    return ", ".join(str(part) for part in [*parts, gpu, machine.get("system")] if part)


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
    pairs = [join([tag("dt", key), tag("dd", value)]) for key, value in facts.items() if value]
    return tag("aside", tag("h2", "Set-up"), tag("dl", *pairs), class_="setup", aria_label="Set-up")


def _primary_table(verdict: Verdict) -> Markup:
    if not verdict.accuracies and not verdict.uncompared:
        return tag("p", "Accuracy was not compared: nothing was trained with both wires.", class_="absent")
    rows = []
    for row in verdict.accuracies:
        difference = row.difference
        assert difference is not None
        shown = formatting.points(difference.interval).replace(" points", "")
        assert row.conclusion is not None
        finding = ", ".join([MEANING[row.conclusion], *share_words(row), *failed_words(row)])
        rows.append(TableRow((row.data, row.model, difference.seeds, shown, finding), row))
    rows += [TableRow((row.data, row.model, 0, "", unknown_words(row)), row) for row in verdict.uncompared]
    caption = f"Accuracy of {verdict.findings.primary} beside {verdict.findings.baseline}, points"
    return Table(caption, ("data", "model", "seeds", "difference (95 %)", "finding"), rows, left=2, tail=1).markup()


def opening(verdict: Verdict) -> Markup:
    findings = verdict.findings
    answer, _, rest = headline(verdict).partition(". ")
    badge = tag("span", f"{answer}.", class_=f"answer {ANSWERS[verdict.answer]}")
    left = [
        tag("p", f"narrowcast study · {findings.name}", class_="kicker"),
        tag("h1", badge, " ", rest),
        tag("p", f"{QUESTION} Here: {findings.primary} against {findings.baseline}.", class_="question"),
        _tiles(verdict),
    ]
    sure = [tag("li", sentence) for sentence in [*speed_sentences(verdict), *how_sure(verdict)]]
    below = [
        tag("div", tag("h2", "How sure"), tag("ul", *sure), _primary_table(verdict), class_="sure"),
        _setup(findings),
    ]
    return tag("header", *left, tag("div", *below, class_="two"))
