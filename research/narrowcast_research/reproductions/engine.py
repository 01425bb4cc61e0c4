"""Runs the cells of a reproduction that are not finished yet, within a budget; processes with one folder share them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from narrowcast import data
from narrowcast_research.reproductions.base import Cell, Clock, Options, Report, Reproduction, Result, Work

Told = Callable[[int, int, Cell], None]
"""Called before each cell: how many are finished, of how many, and which comes next."""


def reproduce(reproduction: Reproduction, options: Options, told: Told | None = None) -> Report:
    """Run what is missing and report on all that is finished; with a budget, as far as it goes."""
    _check_choices(reproduction, options)
    _check_device(options.device)
    store = Store(options.out / reproduction.name, reproduction, options)
    clock, cells = Clock.of(options.budget), reproduction.cells(options)
    with _products(options.device):
        for number, cell in enumerate(cells):
            if clock.over:
                break
            with store.claimed(cell) as ours:
                if not ours:
                    continue
                if told is not None:
                    told(number, len(cells), cell)
                result = reproduction.run(cell, options, Work(store.folder, store.key(cell), clock))
                if result is None:
                    break
                store.add(cell, result)
        store.read()
        found = [(cell, result) for cell in cells if (result := store.result(cell)) is not None]
        report = reproduction.report(found, options)
    facts = [{"cell": cell, "result": result} for cell, result in found]
    notes = [*report.notes, *store.where([cell for cell, _ in found])]
    return Report(
        report.title, report.columns, report.rows, report.claims, notes, facts, missing=len(cells) - len(found)
    )


def share(reproduction: Reproduction, options: Options, jobs: int, told: Told | None = None) -> Report:
    """As `reproduce`, by so many processes that share the cells: small networks leave a GPU idle."""
    if jobs == 1:
        return reproduce(reproduction, options, told)
    if not options.quick:
        data.load(reproduction.data_of(options), options.root)  # said at once where it is missing, and unpacked once
    command = [sys.executable, "-m", __package__, reproduction.name, *options.as_arguments()]
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(jobs)]
    try:
        failed = [process.pid for process in started if process.wait()]
    finally:
        for process in started:
            process.terminate()
    if failed:
        raise RuntimeError(f"simulate --jobs: {len(failed)} of {jobs} processes failed; what they said stands above")
    return reproduce(reproduction, replace(options, budget=0.0))


class Store:
    """Finished cells, one a line, in a folder for each reproduction and way of running it."""

    def __init__(self, folder: Path, reproduction: Reproduction, options: Options) -> None:
        _make(folder)
        self.folder = folder
        # with the cell itself this is all that changes a figure; budgets and the number of seeds do not
        self._settings = {"quick": options.quick, "of": reproduction.name}
        self._results: dict[str, Result] = {}
        self._where: dict[str, str] = {}
        self._device = options.device
        self.read()

    def read(self) -> None:
        """What is finished by now, by whomever."""
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                self._take(line)

    @contextmanager
    def claimed(self, cell: Cell) -> Iterator[bool]:
        """Whether this cell is ours to run: neither finished nor under way in another process.

        The lock is the kernel's, so it goes with a process that dies.
        """
        if self.result(cell) is not None:
            yield False
            return
        lock = self.folder / f"{self.key(cell)}.lock"
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            self.read()  # it may have been finished since
            ours = self.result(cell) is None
            yield ours
            lock.unlink(missing_ok=True)

    @property
    def path(self) -> Path:
        return self.folder / "cells.jsonl"

    def _take(self, line: str) -> None:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the last line of a run that was killed while writing
            return
        self._results[record["key"]] = record["result"]
        self._where[record["key"]] = record.get("where", "a machine that was not recorded")

    def key(self, cell: Cell) -> str:
        """A name for files: readable, and different for every cell and setting."""
        exact = json.dumps([self._settings, cell], sort_keys=True)
        words = re.sub(r"[^a-zA-Z0-9]+", "-", "-".join(str(value) for value in cell.values())).strip("-")
        return f"{words[:60]}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"

    def result(self, cell: Cell) -> Result | None:
        return self._results.get(self.key(cell))

    def where(self, cells: list[Cell]) -> list[str]:
        """Where these were run; how many on which where it was not one."""
        counts = Counter(self._where[self.key(cell)] for cell in cells)
        return list(counts) if len(counts) == 1 else [f"{number} cells: {where}" for where, number in counts.items()]

    def add(self, cell: Cell, result: Result) -> None:
        where = machine(self._device, cell.get("products"))
        line = json.dumps({"key": self.key(cell), "cell": cell, "result": result, "where": where})
        self._take(line)
        with self.path.open("a") as file:
            file.write(line + "\n")
        for left in (self.folder / f"{self.key(cell)}.pt",):
            left.unlink(missing_ok=True)


def machine(device: str, products: str | None = None) -> str:
    """What a cell is run on; float32 products are not float32 everywhere. products: those that the cell asks for."""
    where, chosen = f"{platform.machine()} processor", products or "float32"
    if torch.device(device).type == "cuda":
        where = torch.cuda.get_device_name()
        if products is None and torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32:
            chosen = "TF32 (10-bit mantissas, float32 sums)"
    return f"torch {torch.__version__} on {where}, products in {chosen}, {date.today().isoformat()}"


@contextmanager
def _products(device: str) -> Iterator[None]:
    """TF32 on a GPU, for as long as we run: said in each report, and put back afterwards."""
    if torch.device(device).type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before: tuple[Any, ...] = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = True, True, True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


def _check_choices(reproduction: Reproduction, options: Options) -> None:
    for key, value in options.choose.items():
        allowed = reproduction.choices.get(key)
        if allowed is None:
            raise ValueError(f"simulate {reproduction.name} has no option --{key}")
        if value not in allowed:
            raise ValueError(f"simulate {reproduction.name}: --{key} is one of {', '.join(allowed)}, got {value!r}")


def _check_device(name: str) -> None:
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = "unknown"
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"simulate: there is no device {name!r}; take --device cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"simulate: --device {name}, but torch sees no GPU here; take --device cpu")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"simulate: cannot keep anything in --out {folder} ({error}); name another folder") from error
