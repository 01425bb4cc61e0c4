"""The log of a run: one JSON object a line, written whole, and cut back to the checkpoint when the run goes on."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

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
