"""The report of a study: one HTML file that needs nothing else. Also Markdown, CSV and JSON."""

from __future__ import annotations

from pathlib import Path

FILE = "report.html"


def default_path(folder: Path | str) -> Path:
    """Where the report of a study's folder (or of the results in it) belongs."""
    path = Path(folder)
    return (path if path.is_dir() else path.parent) / FILE


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror}); give another file") from None


def write_report(folder: Path | str) -> Path:
    """Write the report of a study's folder into it; returns where it is."""
    from narrowcast.study.analysis.findings import Findings
    from narrowcast.study.report.page import page

    path = default_path(folder)
    write(path, page(Findings.of(folder)))
    return path
