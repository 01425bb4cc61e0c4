"""What a study has found: one JSON object a line, appended and on the disk before the next case begins."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from narrowcast.study import schema
from narrowcast.toml_file import brief

SCHEMA = 1
FILE = "results.jsonl"
Line = dict[str, Any]
SESSION_FIELDS = ("study", "started", "launcher", "machine", "versions", "margin", "primary", "baseline")
CASE_FIELDS = ("case", "status", "source", "model", "data", "wire", "algorithm", "workers")
RESULT_FIELDS = {"accuracy": ("seed",), "bus": ("bytes", "ms", "bus_gbps")}
"""What a case that is done has beside `CASE_FIELDS`; step times depend on their source."""
REMOVE = "remove the line, its case is then run again"


class ResultsError(ValueError):
    """A file of results that cannot be used: says which, where and why."""


def read(folder: str | os.PathLike[str]) -> list[Line]:
    """Every whole line of a study's folder (or of the file itself); a torn last line is left out."""
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise ResultsError(f"{path}: there are no results; run: narrowcast study run NAME")
    *whole, _ = path.read_bytes().split(b"\n")
    return [_line(path, number, text) for number, text in enumerate(whole, 1) if text.strip()]


def _line(path: Path, number: int, text: bytes) -> Line:
    try:
        # NaN and Infinity are no JSON, but other writers have them: what is not known
        line = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path}:{number}: no JSON ({error}); {REMOVE}") from None
    if not isinstance(line, dict) or line.get("schema") != SCHEMA:
        got = line.get("schema") if isinstance(line, dict) else line
        raise ResultsError(f"{path}:{number}: schema {brief(got)}; this version reads schema {SCHEMA}")
    if (fault := schema.fault_of(line)) is not None:
        raise ResultsError(f"{path}:{number}: {fault}; {REMOVE}")
    return line


def latest(lines: list[Line]) -> dict[str, Line]:
    """The line that counts of each case: the last."""
    return {line["case"]: line for line in lines if "case" in line}


def _needed(line: Line) -> Sequence[str]:
    """The fields without which a line says nothing."""
    kind = line.get("kind")
    if kind == "session":
        return SESSION_FIELDS
    if line.get("status") != "done":
        return CASE_FIELDS
    times = ("step_ms",) if line.get("source") == "predicted" else ("steps_ms",)
    return (*CASE_FIELDS, *(times if kind == "time" else RESULT_FIELDS.get(str(kind), ())))


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same lists and objects, with every name, string and number in them changed."""
    if isinstance(value, dict):
        return {map_leaves(key, change): map_leaves(inner, change) for key, inner in value.items()}
    return [map_leaves(inner, change) for inner in value] if isinstance(value, (list, tuple)) else change(value)


def _printable(value: object) -> object:
    """JSON can hold half of a surrogate pair, which no file and no terminal takes."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _finite(value: object) -> object:
    """JSON knows neither NaN nor Infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def usable_lines(folder: Path | str) -> list[Line]:
    """Every line of a study's folder; ResultsError where one says nothing."""
    lines = []
    for number, raw in enumerate(read(folder), 1):
        if missing := [name for name in ("kind", *_needed(raw)) if raw.get(name) is None]:
            raise ResultsError(f"{folder}: line {number} has no {' or '.join(missing)}; {REMOVE}")
        line = map_leaves(raw, _printable)
        if line["kind"] == "accuracy" and line["status"] == "done" and line.get("accuracy") is None:
            line |= {"status": "failed", "error": "the training ended without an accuracy"}
        lines.append(line)
    return lines


def owners(lines: Sequence[Line]) -> dict[str, int]:
    """Which session, counted from 0, wrote the last line of each case: lines follow the line of their session."""
    sessions, session = {}, -1
    for line in lines:
        if line["kind"] == "session":
            session += 1
        else:
            sessions[line["case"]] = max(0, session)
    return sessions


class Results:
    """A study's folder, open for appending; one process at a time."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.path = self.folder / FILE
        self.lines: list[Line] = []

    def __enter__(self) -> Results:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+")
        except OSError as error:
            cause = f"{self.folder}: {error.strerror}, so it cannot be the folder of a study"
            raise ResultsError(f"{cause}; give --out another one") from error
        self._lock()
        # a process that was killed may have left half a line
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)
        self.lines = read(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _lock(self) -> None:
        """Two studies in one folder would tear each other's lines."""
        try:
            import fcntl
        except ImportError:  # no such locks there
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ResultsError(f"{self.path}: another study is writing here; wait for it, or give --out") from None

    def append(self, **facts: Any) -> Line:
        """Write one line; it is on the disk when this returns."""
        line: Line = {"schema": SCHEMA, **facts}
        plain = map_leaves(line, _finite)
        if (fault := schema.fault_of(plain)) is not None:  # a line that cannot be read would take all others with it
            raise ResultsError(f"{self.path}: {fault}; nothing was written")
        self._file.write(json.dumps(plain, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines.append(line)
        return line

    def done(self) -> set[str]:
        """The cases that are never run again."""
        return {name for name, line in latest(self.lines).items() if line.get("status") == "done"}

    def sessions(self) -> list[Line]:
        return [line for line in self.lines if line.get("kind") == "session"]
