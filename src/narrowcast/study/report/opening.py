"""The first screen: the answer, the numbers that it rests on, how sure it is, and the set-up."""

from __future__ import annotations

from typing import Any

from narrowcast.study import words
from narrowcast.study.findings import Findings
from narrowcast.study.report.markup import Markup, Row, Table, joined, tag
from narrowcast.study.statistics import Conclusion
from narrowcast.study.verdict import MEANING, Answer, RateFinding, Verdict, headline, how_sure, speed_sentences

ANSWERS = {Answer.YES: "yes", Answer.DEPENDS: "depends", Answer.NO: "no", Answer.LOST: "no", Answer.UNKNOWN: "unknown"}
QUESTION = "Can low-precision communication speed up training with no loss of accuracy?"


def _tile(number: str, what: str, small: str) -> Markup:
    return tag("li", tag("strong", number), tag("span", what), tag("small", small))


def _rate_tile(rate: RateFinding) -> Markup:
    source = "predicted" if rate.predicted else "measured"
    where = words.at_rate(rate.rate_name)
    if len(rate.steps) == 1:
        low, high = rate.speedups[0].low, rate.speedups[0].high
        return _tile(rate.gain, f"as fast {where}", f"{source}, 95 %: {low:.2f}–{high:.2f}")
    faster = sum(step.faster is True for step in rate.steps)
    small = f"{source}; faster in {faster} of {words.count(len(rate.steps), 'setting')}"
    return _tile(rate.gain.replace("× to ", "–"), f"as fast {where}", small)


def _accuracy_tile(verdict: Verdict) -> list[Markup]:
    found = [row.difference for row in verdict.accuracies if row.difference is not None]
    if not found:
        return []
    worst = min(found, key=lambda e: e.mean)
    kept = sum(e.conclusion in (Conclusion.EQUAL, Conclusion.BETTER) for e in found)
    small = f"of accuracy at worst; within ±{worst.margin:g} in {kept} of {words.count(len(found), 'comparison')}"
    return [_tile(words.signed(worst.mean, 2), "points", small)]


def _bytes_tile(verdict: Verdict) -> list[Markup]:
    shares = [
        sent["claimed"] / sent["plain"]
        for s in verdict.findings.measured
        if s.wire == verdict.findings.primary and (sent := s.line.get("bytes") or {}).get("plain")
    ]
    if not shares:
        return []
    return [
        _tile(f"{100 * sum(shares) / len(shares):.0f} %", "of the bytes", f"of {verdict.findings.baseline} on the wire")
    ]


def _tiles(verdict: Verdict) -> Markup:
    tiles = [*(_rate_tile(rate) for rate in verdict.rates[:3]), *_accuracy_tile(verdict), *_bytes_tile(verdict)]
    return tag("ul", *tiles, class_="tiles") if tiles else Markup("")


def _machine(machine: dict[str, Any]) -> str:
    gpu = machine.get("gpu")
    parts = [machine.get("cpu"), words.count(machine.get("cores") or 0, "core"), f"{machine.get('memory_gib')} GiB"]
    return ", ".join(str(part) for part in [*parts, gpu, machine.get("system")] if part)


def _distinct(findings: Findings, name: str, kinds: tuple[str, ...] = ("time", "accuracy")) -> list[str]:
    lines = [line for line in findings.cases if line["kind"] in kinds and line["source"] != "predicted"]
    return list(dict.fromkeys(str(line[name]) for line in lines if line.get(name) not in (None, "")))


def _setup(findings: Findings) -> Markup:
    session = findings.session
    versions = ", ".join(f"{name} {version}" for name, version in session["versions"].items())
    steps = sum(len(repeat) for s in findings.measured for repeat in s.line["steps_ms"])
    rates = sorted({(s.rate_bits, words.rate(s.rate_name)) for s in findings.measured})
    facts = {
        "Machine": _machine(session["machine"]),
        "Run": f"{words.moment(session['started'])}, {session['launcher']} launcher",
        "Versions": f"{versions}, commit {session['commit'] or 'unknown'}",
        "Models": ", ".join(_distinct(findings, "model")),
        "Data": ", ".join(_distinct(findings, "data")),
        "Wires": ", ".join(wire for wire in findings.wires if wire in _distinct(findings, "wire")),
        "Links": ", ".join(name for _, name in rates),
        "Workers": ", ".join(sorted(_distinct(findings, "workers", ("time",)), key=int)),
        "Measured": f"{words.count(len(findings.measured), 'setting')}, {steps:,} steps; "
        f"{words.count(sum(row.seeds for row in findings.accuracies), 'training')}",
    }
    pairs = [joined([tag("dt", key), tag("dd", value)]) for key, value in facts.items() if value]
    return tag("aside", tag("h2", "Set-up"), tag("dl", *pairs), class_="setup", aria_label="Set-up")


def _primary_table(verdict: Verdict) -> Markup:
    if not verdict.accuracies:
        return tag("p", "Accuracy was not compared: nothing was trained with both wires.", class_="absent")
    rows = []
    for row in verdict.accuracies:
        found = row.difference
        assert found is not None
        shown = words.points(found.interval).replace(" points", "")
        rows.append(Row((row.data, row.model, found.seeds, shown, MEANING[found.conclusion]), row))
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
