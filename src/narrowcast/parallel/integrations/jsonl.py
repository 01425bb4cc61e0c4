"""A line of JSON for each write."""

from __future__ import annotations

import json
import time


class JsonLines:
    """Appends to a file; each line is on the disk's way at once, so a run that dies loses none."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a")  # noqa: SIM115  closed by close()

    def write(self, numbers: dict[str, float], step: int) -> None:
        self._file.write(json.dumps({"step": step, "time": time.time(), **numbers}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
