"""The report as Markdown: the verdict, the set-up, and tables of step times, accuracy, insights and failures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.findings import Findings
from narrowcast.study.analysis.verdict import headline, how_sure, judge, speed_sentences
from narrowcast.study.report.context import Context
from narrowcast.study.report.figures.accuracy_vs_speed import accuracy_table
from narrowcast.study.report.figures.heat import elsewhere_table, step_table
from narrowcast.study.report.markup import Table
from narrowcast.study.report.sections import all_statements
from narrowcast.study.report.summary import provenance

SPECIAL = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)")
"""What Markdown would take for its own."""


def _cell(value: object) -> str:
    one_line = " ".join(str(value).splitlines())
    return SPECIAL.sub(r"\\\g<0>", one_line.replace("&", "&amp;").replace("<", "&lt;"))


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _table(table: Table) -> list[str]:
    rule = ["---" if column < table.left else "---:" for column in range(len(table.heads))]
    return [
        f"## {_cell(table.caption)}",
        "",
        _row(table.heads),
        _row(rule),
        *(_row(row.cells) for row in table.rows),
        "",
    ]


def as_markdown(findings: Findings) -> str:
    context, verdict = Context(findings), judge(findings)
    lines = [f"# narrowcast study: {_cell(findings.name)}", "", f"**{_cell(headline(verdict))}**", ""]
    lines += [f"- {_cell(sentence)}" for sentence in [*speed_sentences(verdict), *how_sure(verdict)]]
    lines += ["", "Set-up:", ""]
    lines += [f"- {name}: {_cell(told)}" for name, told in provenance(findings).items()]
    lines += [""]
    lines += _table(accuracy_table(context, findings.accuracies)) if findings.accuracies else []
    lines += _table(step_table(context, findings.here)) if findings.here else []
    lines += _table(elsewhere_table(context)) if findings.elsewhere else []
    for group in all_statements():
        lines += [f"## Insights of {group.source}", "", "| statement | these data | because |", "|---|---|---|"]
        lines += [_row((one.statement, one.support.value, one.because)) for one in group.judge(findings)]
    if findings.failures:
        lines += [
            "",
            f"## {formatting.count(len(findings.failures), 'case')} failed",
            "",
            "| case | error |",
            "|---|---|",
        ]
        lines += [_row((failed.line["case"], failed.error)) for failed in findings.failures]
    return "\n".join(lines) + "\n"
