"""The report as Markdown: the verdict, the set-up, and tables of step times, accuracy, insights and failures."""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.study import words
from narrowcast.study.findings import Findings
from narrowcast.study.insights import insights
from narrowcast.study.report.context import Context
from narrowcast.study.report.figures.heat import elsewhere_table, step_table
from narrowcast.study.report.figures.trade import accuracy_table
from narrowcast.study.report.markup import Table
from narrowcast.study.verdict import headline, how_sure, judge, speed_sentences


def _cell(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _table(table: Table) -> list[str]:
    rule = ["---" if column < table.left else "---:" for column in range(len(table.heads))]
    return [f"## {table.caption}", "", _row(table.heads), _row(rule), *(_row(row.cells) for row in table.rows), ""]


def as_markdown(findings: Findings) -> str:
    context, verdict, session = Context(findings), judge(findings), findings.session
    machine = ", ".join(f"{key} {value}" for key, value in session["machine"].items() if value is not None)
    versions = ", ".join(f"{name} {version}" for name, version in session["versions"].items())
    lines = [f"# narrowcast study: {_cell(findings.name)}", "", f"**{headline(verdict)}**", ""]
    lines += [f"- {sentence}" for sentence in [*speed_sentences(verdict), *how_sure(verdict)]]
    lines += ["", f"Set-up: {machine}; {versions}; commit {session['commit'] or 'unknown'}; {session['started']}.", ""]
    lines += _table(accuracy_table(context, findings.accuracies)) if findings.accuracies else []
    lines += _table(step_table(context, findings.here)) if findings.here else []
    lines += _table(elsewhere_table(context)) if findings.elsewhere else []
    lines += ["## Insights of Grubic et al. (EDBT 2018)", "", "| statement | these data | because |", "|---|---|---|"]
    lines += [_row((found.statement, found.support.value, found.because)) for found in insights(findings)]
    if findings.failures:
        lines += ["", f"## {words.count(len(findings.failures), 'case')} failed", "", "| case | error |", "|---|---|"]
        lines += [_row((failed.line["case"], failed.error)) for failed in findings.failures]
    return "\n".join(lines) + "\n"
