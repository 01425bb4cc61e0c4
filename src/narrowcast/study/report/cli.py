"""`narrowcast report FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowcast.console import JsonPath, emit
from narrowcast.study.findings import Findings
from narrowcast.study.report import FILE
from narrowcast.study.report.export import as_csv, summary
from narrowcast.study.report.markdown import as_markdown
from narrowcast.study.report.page import page
from narrowcast.study.verdict import judge, verdict_lines

STANDARD_OUTPUT = Path("-")


def report(
    folder: Annotated[Path, typer.Argument(help="A study's folder, as `narrowcast study run` wrote it.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the page; report.html in the folder.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as Markdown, too; - prints it.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a row for each setting, too; - prints it.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Turn the results of a study into one HTML file: the verdict, figures with what they prove, tables."""
    findings = Findings.of(folder)
    page_path = out or folder / FILE
    files = {page_path: page(findings)}
    if markdown is not None:
        files[markdown] = as_markdown(findings)
    if csv is not None:
        files[csv] = as_csv(findings)
    printed = files.pop(STANDARD_OUTPUT, None)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    if printed is not None:
        typer.echo(printed, nl=False)
        return
    shown = "\n".join([*verdict_lines(judge(findings)), "", *(f"written: {path}" for path in files)])
    emit(summary(findings), shown, json_path)
