"""`narrowcast simulate NAME`: make a paper's table again, as far as the budget goes, and go on with the next call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from narrowcast.console import JsonPath, emit, new_table
from narrowcast_research import reproductions
from narrowcast_research.reproductions.base import CHOICES, Cell, Options, Report
from narrowcast_research.reproductions.engine import share

EVERYTHING = "all"


def simulate(
    name: Annotated[str | None, typer.Argument(help="A reproduction, or `all`; none: they are listed.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of hours, on the digits within.")] = False,
    model: Annotated[str | None, typer.Option(help="aps-cifar10, pure16: the network, as resnet18.")] = None,
    rows: Annotated[str | None, typer.Option(help="aps-cifar10: core, few, or all (saturating casts, too).")] = None,
    epochs: Annotated[str | None, typer.Option(help="dettmers-mnist, aps-cifar10, pure16: fewer of them.")] = None,
    products: Annotated[str | None, typer.Option(help="aps-cifar10: bf16, by autocast; float32 otherwise.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    budget: Annotated[float | None, typer.Option(help="Seconds after which to stop; call again to go on.")] = None,
    root: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="So many processes share the cells, on one GPU, say.")] = 1,
    out: Annotated[Path, typer.Option(help="Where finished cells and checkpoints are kept.")] = Path("runs"),
    json_path: JsonPath = None,
) -> None:
    """Make a paper's table again: its figures beside ours, and whether they agree. What is finished is kept."""
    if name is None:
        emit([_line(found) for found in reproductions.HOMES], _listing(), json_path)
        return
    given = dict(zip(CHOICES, (model, rows, epochs, products), strict=True))
    chosen = {key: value for key, value in given.items() if value is not None}
    options = Options(quick, device, seeds, budget, root, out, chosen)
    names = list(reproductions.HOMES) if name == EVERYTHING else [name]
    reports = {found: _reproduced(found, options, jobs) for found in names}
    data = {found: report.as_dict() for found, report in reports.items()}
    if json_path == "-":
        emit(data if len(data) > 1 else next(iter(data.values())), "", "-")
        return
    for report in reports.values():
        emit(None, _table(report), None)
    if json_path is not None:
        emit(data if len(data) > 1 else next(iter(data.values())), f"written to {json_path}", json_path)


def _reproduced(name: str, options: Options, jobs: int) -> Report:
    console = Console(stderr=True)

    def show(finished: int, total: int, cell: Cell) -> None:
        console.print(f"{name}: {finished} of {total} finished; next: {', '.join(map(str, cell.values()))}")

    return share(reproductions.named(name), options, jobs, show if sys.stderr.isatty() else None)


def _line(name: str) -> dict[str, Any]:
    found = reproductions.named(name)
    return {
        "name": name,
        "title": found.title,
        "data": found.needs,
        "options": {k: list(v) for k, v in found.choices.items()},
    }


def _listing() -> Table:
    table = new_table("Reproductions: narrowcast simulate NAME", "name", "what", "data", "options")
    for name in reproductions.HOMES:
        line = _line(name)
        options = "; ".join(f"--{key} {'|'.join(values)}" for key, values in line["options"].items())
        table.add_row(name, line["title"], line["data"], options)
    return table


def _table(report: Report) -> Table:
    table = new_table(report.title, *report.columns)
    for row in report.rows:
        table.add_row(*row)
    table.caption = "\n".join(report.footer())
    return table
