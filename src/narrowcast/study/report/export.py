"""The report for programs, as CSV and JSON, and as Markdown."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from typing import Any

from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import Finding, grouped
from narrowcast.study.analysis.findings import Accuracy, Findings, Step
from narrowcast.study.analysis.statistics import Interval
from narrowcast.study.analysis.verdict import headline, how_sure, judge, speed_sentences
from narrowcast.study.execution.results import map_leaves
from narrowcast.study.report.accuracy import accuracy_table
from narrowcast.study.report.figure import Context, Table
from narrowcast.study.report.sections import all_statements, insights, provenance
from narrowcast.study.report.speedups import elsewhere_table, step_table

AXES = (
    *("kind", "source", "status", "model", "data", "wire", "algorithm", "workers", "layout"),
    *("rate_name", "transport", "parallel", "cluster", "min_values"),
)
COLUMNS = (
    *AXES,
    *("step_ms", "step_ms_low", "step_ms_high", "p95_ms", "speedup", "speedup_low", "speedup_high"),
    *("predicted_ms", "bytes_claimed", "bytes_protocol", "bytes_counted", "dollars_per_epoch"),
    *("seeds", "accuracy", "accuracy_low", "accuracy_high", "difference", "difference_low", "difference_high"),
    *("p_equal", "conclusion", "message_bytes", "bus_gbps", "compressed_values", "compressed_bytes", "error"),
)
"""Of the CSV: one row a setting; what a kind does not have stays empty."""
SPECIAL = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)")
"""What Markdown would take for its own."""


def _axes(finding: Finding) -> dict[str, Any]:
    share = finding.line.get("compressed") or {}
    shares = {f"compressed_{key}": share.get(key) for key in ("values", "bytes")}
    return {**{name: finding.line.get(name) for name in AXES}, **shares}


def _spread(name: str, interval: Interval | None) -> dict[str, Any]:
    if interval is None:
        return {}
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _step_row(step: Step) -> dict[str, Any]:
    sent = step.line.get("bytes") or {}
    return {
        **_axes(step),
        **_spread("step_ms", step.time),
        **_spread("speedup", step.speedup),
        "p95_ms": step.p95,
        "predicted_ms": step.line.get("predicted_ms"),
        **{f"bytes_{name}": sent.get(name) for name in ("claimed", "protocol", "counted")},
        "dollars_per_epoch": step.line.get("dollars_per_epoch"),
    }


def _accuracy_row(row: Accuracy) -> dict[str, Any]:
    cells = {**_axes(row), "seeds": row.seeds, **_spread("accuracy", row.mean)}
    if row.difference is None or row.conclusion is None:
        return cells
    tested = {"p_equal": row.difference.p, "conclusion": row.conclusion.value}
    return {**cells, **_spread("difference", row.difference.interval), **tested}


def tidy(value: object) -> object:
    """Five digits are more than anything here has; what is not finite is not known."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


def rows(findings: Findings) -> list[dict[str, Any]]:
    """One row for each setting that was timed, trained, predicted, or failed."""
    listed = [
        *map(_step_row, findings.steps),
        *map(_accuracy_row, findings.accuracies),
        *({**_axes(f), "message_bytes": f.line["bytes"], "bus_gbps": f.line["bus_gbps"]} for f in findings.buses),
        *({**_axes(failed), "error": failed.error} for failed in findings.failures),
    ]
    return [map_leaves(row, tidy) for row in listed]


def as_csv(findings: Findings) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(findings))
    return out.getvalue()


def _compact(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows as lists beside the names of the columns that are not empty."""
    columns = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    return {"columns": columns, "rows": [[row.get(name) for name in columns] for row in rows]}


def _sessions(findings: Findings) -> list[dict[str, Any]]:
    """Each with the number of cases that come from it."""
    written = list(findings.owners.values())
    return [
        {**{key: value for key, value in line.items() if key != "text"}, "cases": written.count(index)}
        for index, line in enumerate(findings.sessions)
    ]


def summary(findings: Findings, *, with_rows: bool = True) -> dict[str, Any]:
    """All that the report says, for programs."""
    facts: dict[str, Any] = {
        "study": findings.name,
        "sessions": _sessions(findings),
        "verdict": map_leaves(judge(findings).as_dict(), tidy),
        "insights": [insight.as_dict() for insight in insights(findings)],
    }
    if with_rows:
        tables = grouped(rows(findings), lambda row: "failed" if row["status"] == "failed" else str(row["kind"]))
        facts["tables"] = {kind: _compact(same) for kind, same in tables.items()}
    return facts


def _cell(value: object) -> str:
    one_line = " ".join(str(value).splitlines())
    return SPECIAL.sub(r"\\\g<0>", one_line.replace("&", "&amp;").replace("<", "&lt;"))


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _table(table: Table) -> list[str]:
    rule = ["---" if column < table.left else "---:" for column in range(len(table.columns))]
    head = [f"## {_cell(table.caption)}", "", _row(table.columns), _row(rule)]
    return [*head, *(_row(row.cells) for row in table.rows), ""]


def as_markdown(findings: Findings) -> str:
    context, verdict = Context(findings), judge(findings)
    lines = [f"# narrowcast study: {_cell(findings.name)}", "", f"**{_cell(headline(verdict))}**", ""]
    lines += [f"- {_cell(sentence)}" for sentence in [*speed_sentences(verdict), *how_sure(verdict)]]
    lines += ["", "Set-up:", ""]
    lines += [f"- {name}: {_cell(value)}" for name, value in provenance(findings).items()]
    lines += [""]
    lines += _table(accuracy_table(context, findings.accuracies)) if findings.accuracies else []
    lines += _table(step_table(context)) if findings.here else []
    lines += _table(elsewhere_table(context)) if findings.elsewhere else []
    for group in all_statements():
        lines += [f"## Insights of {group.source}", "", "| statement | these data | because |", "|---|---|---|"]
        lines += [_row((one.statement, one.support.value, one.because)) for one in group.judge(findings)]
    if findings.failures:
        lines += ["", f"## {formatting.count(len(findings.failures), 'case')} failed", ""]
        lines += ["| case | error |", "|---|---|"]
        lines += [_row((failed.line["case"], failed.error)) for failed in findings.failures]
    return "\n".join(lines) + "\n"
