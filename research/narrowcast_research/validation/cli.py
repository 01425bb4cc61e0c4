"""`narrowcast validate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from narrowcast.cli import one_line, out_file, workers_of
from narrowcast.console import JsonPath, emit, make_console, new_table, progress
from narrowcast.measure import need_cuda
from narrowcast.predict import spreads
from narrowcast_research.validation import calibrate as calibration
from narrowcast_research.validation import lab as lab_validation
from narrowcast_research.validation import registry, table
from narrowcast_research.validation.lab_models import MODELS, SMALL
from narrowcast_research.validation.metrics import Result

SHOWN = 60
"""Of longer tables so many cells are printed, evenly spread."""


@one_line
def validate(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Any of {', '.join(registry.VALIDATIONS)}; default all.")
    ] = None,
    data: Annotated[str, typer.Option(help="A table of your own (see docs/predict.md).")] = "",
    lab: Annotated[
        str, typer.Option(help="Measure training in the lab into this folder (resumable), then judge it.")
    ] = "",
    hosts: Annotated[str, typer.Option(help="Of the lab runs.")] = ",".join(map(str, lab_validation.HOSTS)),
    rates: Annotated[str, typer.Option(help="Of the lab runs.")] = ",".join(lab_validation.RATES),
    models: Annotated[str, typer.Option(help="Of the lab runs.")] = ",".join(SMALL),
    gpu: Annotated[bool, typer.Option("--gpu", help="Lab runs with NCCL; their ranks share the GPU.")] = False,
    loop: Annotated[
        str, typer.Option(help=f"Calibrate each lab with real steps of one of {', '.join(SMALL)}, too.")
    ] = "",
    within: Annotated[float, typer.Option(help="Start no further lab run after so many seconds; 0: run all.")] = 0.0,
    cells: Annotated[bool, typer.Option(help="Print every cell of long tables, too.")] = False,
    calibrate: Annotated[
        str, typer.Option(help="Write the spreads that intervals are made of to this file, from all measured steps.")
    ] = "",
    markdown: Annotated[str, typer.Option(help="Write the page of all results to this file.")] = "",
    json_path: JsonPath = None,
) -> None:
    """The predictor against published and measured data: measured, predicted, error, and what was fitted on what."""
    page = out_file("--markdown", markdown) if markdown else None
    if calibrate:
        out_file("--calibrate", calibrate).write_text(spreads.dump(calibration.calibrated()))
    if lab:
        results = [_validate_lab(Path(lab), hosts, rates, models, within, gpu, loop)]
    elif data:
        results = [table.validate(data)]
    else:
        results = list(registry.run(names or ()))
    if page:
        page.write_text(registry.markdown(results))
    if json_path == "-":
        emit([result.as_dict() for result in results], "", json_path)
    else:
        for result in results:
            _show_result(result, cells or bool(data) or bool(lab))
        if json_path:
            emit([result.as_dict() for result in results], _targets_table(results), json_path)
        else:
            make_console().print(_targets_table(results))
            make_console().print(new_table("Summary", *registry.SUMMARY, rows=registry.summary(results)))
    if any(not all(result.met().values()) for result in results):
        raise typer.Exit(1)


def _validate_lab(folder: Path, hosts: str, rates: str, models: str, within: float, gpu: bool, loop: str) -> Result:
    if loop and loop not in SMALL:
        raise ValueError(f"validate --loop: take one of {', '.join(SMALL)}, got {loop!r}")
    if gpu:
        need_cuda()
    places = lab_validation.grid(workers_of(hosts), rates.split(","), models.split(","))
    unknown = [place.model for place in places if place.model not in MODELS]
    if unknown:
        raise ValueError(f"validate --models: unknown {unknown[0]!r}; there are {', '.join(MODELS)}")
    left, began = lab_validation.missing(folder, places), time.monotonic()
    for place in progress(lab_validation.measure(folder, places, gpu=gpu, loop=loop), len(left), "lab runs"):
        typer.echo(f"{place.model} on {place.hosts} hosts at {place.rate}: measured", err=True)
        if within and time.monotonic() - began > within:
            break
    return lab_validation.validate(folder)


def _show_result(result: Result, every_cell: bool) -> None:
    unit = f" {result.unit}" if result.unit else ""
    each = 1 if every_cell else -(-len(result.cells) // SHOWN)
    ends = ["5-95 %"] if registry.has_intervals(result) else []
    shown = new_table(result.title, *result.columns, f"measured{unit}", f"predicted{unit}", *ends, "error")
    for cell in result.cells[::each]:
        shown.add_row(*registry.cell_row(result, cell))
    shown.caption = f"one in {each} of {len(result.cells)} cells; --cells prints all" if each > 1 else None
    make_console().print(shown)
    figures = new_table(f"{result.title}: figures", "", *registry.HEADINGS)
    figures.add_row("all", *registry.figure_row(result.figures))
    for name, found in result.extra.items():
        figures.add_row(name, *registry.figure_row(found))
    figures.caption = "\n".join([f"fitted: {result.fitted}", *result.notes])
    make_console().print(figures)


def _targets_table(results: list[Result]) -> Table:
    shown = new_table("What was to be reached", "data", "figure")
    shown.columns[1].justify = "left"
    for result in results:
        for line in registry.target_lines(result):
            shown.add_row(result.name, line)
    return shown
