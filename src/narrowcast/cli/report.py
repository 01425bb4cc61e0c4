"""`narrowcast report FOLDER`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from narrowcast.console import JsonPath
from narrowcast.study import (
    Findings,
    as_csv,
    as_markdown,
    default_path,
    formatting,
    grouped,
    judge,
    page,
    results,
    summary,
    verdict_lines,
    write,
)

STANDARD_OUTPUT = Path("-")


def _as_json(findings: Findings) -> str:
    return json.dumps(summary(findings), indent=1) + "\n"


MAKERS = {"--out": page, "--markdown": as_markdown, "--csv": as_csv, "--json": _as_json}


def _refuse_to_share(targets: dict[str, Path]) -> None:
    """Of two texts in one file the first would be lost without a word."""
    shared = grouped(
        targets, lambda name: targets[name] if targets[name] == STANDARD_OUTPUT else targets[name].resolve()
    )
    for path, names in shared.items():
        if len(names) > 1:
            raise ValueError(f"{formatting.listed(names)} are all {path}; give each its own file")


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
    paths = {"--out": out or default_path(folder), "--markdown": markdown, "--csv": csv}
    paths |= {"--json": Path(json_path) if json_path else None}
    targets = {option: path for option, path in paths.items() if path is not None}
    _refuse_to_share({"the results": folder / results.FILE if folder.is_dir() else folder, **targets})
    findings = Findings.of(folder)
    texts = {targets[option]: MAKERS[option](findings) for option in targets}
    printed = texts.pop(STANDARD_OUTPUT, None)
    for path, text in texts.items():
        write(path, text)
    if printed is not None:
        typer.echo(printed, nl=False)
        return
    typer.echo("\n".join([*verdict_lines(judge(findings)), "", *(f"written: {path}" for path in texts)]))
