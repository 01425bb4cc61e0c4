"""The lines of a results file as findings need them: whole, printable, and with failed trainings called failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowcast.study.analysis import formatting
from narrowcast.study.run.results import REMOVE, Line, ResultsError, read

SESSION = ("study", "started", "launcher", "machine", "versions", "margin", "primary", "baseline")
CASE = ("case", "status", "source", "model", "data", "wire", "algorithm", "workers")
RESULT = {"accuracy": ("seed",), "bus": ("bytes", "ms", "bus_gbps")}
"""What a case that is done has beside `CASE`; step times depend on their source."""


def _needed(line: Line) -> Sequence[str]:
    """The fields without which a line says nothing."""
    kind = line.get("kind")
    if kind == "session":
        return SESSION
    if line.get("status") != "done":
        return CASE
    times = ("step_ms",) if line.get("source") == "predicted" else ("steps_ms",)
    return (*CASE, *(times if kind == "time" else RESULT.get(str(kind), ())))


def _checked(folder: Path | str, number: int, line: Line) -> Line:
    missing = [name for name in ("kind", *_needed(line)) if line.get(name) is None]
    if missing:
        raise ResultsError(f"{folder}: line {number} has no {formatting.listed(missing, 'or')}; {REMOVE}")
    return line


def _printable(value: Any) -> Any:
    """JSON can hold half of a surrogate pair, which no file and no terminal takes."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list) else value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _judged(line: Line) -> Line:
    """A training that ended without an accuracy has failed, whatever its status says."""
    if line["kind"] != "accuracy" or line["status"] != "done" or _is_number(line.get("accuracy")):
        return line
    return {**line, "status": "failed", "error": "the training ended without an accuracy"}


def usable_lines(folder: Path | str) -> list[Line]:
    """Every line of a study's folder; ResultsError where one says nothing."""
    found = [_checked(folder, number, line) for number, line in enumerate(read(folder), 1)]
    return [_judged(_printable(line)) for line in found]


def owners(lines: Sequence[Line]) -> dict[str, int]:
    """Which session, counted from 0, wrote the last line of each case: lines follow the line of their session."""
    found, session = {}, -1
    for line in lines:
        if line["kind"] == "session":
            session += 1
        else:
            found[line["case"]] = max(0, session)
    return found
