"""What a run writes: its log, one JSON object a line, and its checkpoints."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VERSION = 2
"""Of checkpoints."""
Record = dict[str, Any]


class Log:
    """Records in memory and, where a path is given, in a file.

    Kinds: "start" (the settings and the wire of every tensor), "step" (loss, lr), "error" (a layer), "test" (loss and
    accuracy after so many steps), "end".
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = Path(path) if path is not None else None
        self.records: list[Record] = []

    def write(self, kind: str, **facts: Any) -> None:
        record = {"kind": kind, **{key: _plain(value) for key, value in facts.items()}}
        self.records.append(record)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def begin(self) -> None:
        """Start an empty log."""
        self.records = []
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("")

    def go_on(self, records: list[Record]) -> None:
        """Start from the records of a checkpoint: whatever was written after it never happened."""
        self.begin()
        self.records = list(records)
        if self._path is not None:
            self._path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read_log(path: str | os.PathLike[str]) -> list[Record]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _plain(value: Any) -> Any:
    """JSON knows neither NaN nor Infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Written under another name, which then becomes `path`, so that there is always a whole one."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            torch.save({"version": VERSION, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def load_checkpoint(
    path: str | os.PathLike[str], device: torch.device, run: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The state of a run with the same settings; None where there is no file yet."""
    if not Path(path).exists():
        return None
    state = _read_checkpoint(path, device)
    if state.get("version") != VERSION:
        raise ValueError(f"train: {path} is no checkpoint of this version; give another path or resume=False")
    other = {key: (state["run"].get(key), value) for key, value in run.items() if state["run"].get(key) != value}
    if other:
        differences = ", ".join(f"{key} was {was!r} and is {now!r}" for key, (was, now) in other.items())
        raise ValueError(f"train: {path} is of another run: {differences}; give another path or resume=False")
    return state


def _read_checkpoint(path: str | os.PathLike[str], device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # whatever a file that is something else makes of torch
        problem = f"train: {path} is no checkpoint, or a broken one ({type(error).__name__}: {str(error)[:200]})"
        raise ValueError(f"{problem}; give another path or resume=False") from error
    return state if isinstance(state, dict) else {}
