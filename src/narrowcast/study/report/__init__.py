"""The report of a study: one HTML file that needs nothing else. Also Markdown, CSV and JSON."""

from __future__ import annotations

from pathlib import Path

FILE = "report.html"


def write_report(folder: Path | str) -> Path:
    """Write the report of a study's folder into it; returns where it is."""
    from narrowcast.study.findings import Findings
    from narrowcast.study.report.page import page

    path = Path(folder) / FILE
    path.write_text(page(Findings.of(folder)), encoding="utf-8")
    return path
