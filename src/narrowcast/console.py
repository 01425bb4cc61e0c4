"""What every command shares: tables for people, JSON for programs, progress on a terminal. Needs rich and typer."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

T = TypeVar("T")


def _in_a_folder(path: str | None) -> str | None:
    """Before the work: a long measurement should not end in a file that cannot be."""
    if path not in (None, "-") and not Path(path).parent.is_dir():
        raise ValueError(f"--json {path}: there is no folder {Path(path).parent}; make it, or name another file")
    return path


JsonPath = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", callback=_in_a_folder, help="Write JSON to FILE; - is standard output."),
]

PLAIN_WIDTH = 200
LEAST_WIDTH, INDENTED = 7, 4
WRAPPED_FROM, BETWEEN_COLUMNS, MOST_KEYS = 24, 3, 3
"""Characters: from here on a text may be wrapped; what a column takes beside its cells."""
WORD = re.compile(r"[A-Za-z]{3}")
"""What tells a text from a number and its unit."""


def make_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH, no_color=True)


def emit(data: Any, shown: Table | str, path: str | None) -> None:
    """The table for people, or JSON for programs; with a file name both."""
    save(data, path)
    if path != "-":
        make_console().print(shown)


def save(data: Any, path: str | None) -> None:
    """JSON into a file, or to standard output; nothing without a name."""
    if path == "-":
        print(json.dumps(data, indent=1))
    elif path is not None:
        try:
            Path(path).write_text(json.dumps(data, indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"--json {path}: {error.strerror}; name a file that can be written") from error


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PLAIN_WIDTH


class GrowingTable:
    """A table whose rows are shown as they come, under a title and a heading that stand before the first."""

    def __init__(self, title: str, *columns: str, shown: bool = True) -> None:
        self._title, self._columns, self._shown = title, columns, shown

    def add_row(self, *cells: str) -> None:
        """Cells stand under their column's name, the first one on the left."""
        if not self._shown:
            return
        if self._title:
            print(f"{self._title}\n\n{self._line(self._columns)}")
            self._title = ""
        print(self._line(cells), flush=True)

    def _line(self, cells: Sequence[str]) -> str:
        left, *right = [(cell, max(len(name), LEAST_WIDTH)) for cell, name in zip(cells, self._columns, strict=True)]
        parts, most = [f"{left[0]:<{left[1]}}"], _width()
        lines: list[str] = []
        for cell, width in right:
            part = f"{cell:>{max(width, len(cell))}}"
            if len("  ".join([*parts, part])) > most:  # the rest goes below, indented
                lines.append("  ".join(parts))
                parts = [" " * INDENTED]
            parts.append(part)
        return "\n".join([*lines, "  ".join(parts)])


def progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Show how far a long job is, on a terminal only and never in the output."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task(what, total=total)
        for item in items:
            yield item
            bar.advance(task)


class FittingTable(Table):
    """A table that breaks no number: long texts are wrapped, and where that is not enough, it goes on below with its
    next columns, beside those that tell rows apart; where not even that fits, each row is a list.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # as Text here, too: brackets are no markup
        self.title, self.caption = (Text(str(text)) if text else None for text in (self.title, self.caption))
        cells = [[str(cell) for cell in column.cells] for column in self.columns]
        for position, (column, texts) in enumerate(zip(self.columns, cells, strict=True)):
            longest = max([len(str(column.header)), *map(len, texts)])
            is_text = any(WORD.search(text) for text in texts)
            wraps = is_text and longest > WRAPPED_FROM
            column.justify = "left" if position == 0 or is_text else column.justify
            column.no_wrap, column.min_width = not wraps, WRAPPED_FROM if wraps else longest
        parts = self._parts(cells, options.max_width)
        if parts == [list(range(len(cells)))]:
            yield from super().__rich_console__(console, options)
            return
        if not parts:
            texts = [str(self.title or ""), "", *self._listed(cells), str(self.caption or "")]
            yield Text("\n".join(texts).strip("\n"))
            return
        for number, part in enumerate(parts):
            table = Table(box=self.box, title=self.title if number == 0 else None, title_justify=self.title_justify)
            table.columns = [replace(self.columns[position], _index=at) for at, position in enumerate(part)]
            table.rows = self.rows
            yield table
        if self.caption:
            yield self.caption

    def _parts(self, cells: list[list[str]], width: int) -> list[list[int]]:
        """The columns of each part; none where a column does not fit beside those that tell rows apart."""
        room = [column.min_width or 0 for column in self.columns]
        spare = width - 1 - sum(size + BETWEEN_COLUMNS for size in room)
        if spare >= 0:
            return [list(range(len(cells)))]
        alike = (len(set(zip(*cells[:count], strict=True))) == len(cells[0]) for count in range(1, len(cells)))
        keys = list(range(next((n for n, is_key in enumerate(alike, 1) if is_key and n <= MOST_KEYS), 1)))
        left = width - 1 - sum(room[key] + BETWEEN_COLUMNS for key in keys)
        parts: list[list[int]] = []
        free = -1
        for position in range(len(keys), len(cells)):
            need = room[position] + BETWEEN_COLUMNS
            if need > left:
                return []
            if need > free:
                parts.append([*keys])
                free = left
            parts[-1].append(position)
            free -= need
        return parts

    def _listed(self, cells: list[list[str]]) -> Iterator[str]:
        """Each row as its first cell, and below it the others by name."""
        names = [str(column.header) for column in self.columns]
        for first, *rest in zip(*cells, strict=True):
            yield first
            yield from (f"  {name}: {text}" for name, text in zip(names[1:], rest, strict=True) if text)


def new_table(title: str, *columns: str, rows: Iterable[Iterable[object]] = ()) -> Table:
    style = box.HEAVY_HEAD if sys.stdout.isatty() else box.SIMPLE
    table = FittingTable(title=title, title_justify="left", caption_justify="left", box=style)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right", overflow="fold")
    for row in rows:
        # as Text: rich would take [mpi] for markup, and drop it
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
