"""A text file in Prometheus' format, as node_exporter's textfile collector reads it."""

from __future__ import annotations

import os
import re

import torch.distributed as dist

OTHER = re.compile(r"[^a-zA-Z0-9_]")


class Prometheus:
    """The last numbers, as gauges; the file is replaced as a whole, so that nobody reads half of it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    def write(self, numbers: dict[str, float], step: int) -> None:
        rows: dict[str, list[str]] = {}
        for key, value in {**numbers, "narrowcast/step": float(step)}.items():
            name, colon, tensor = key.partition("/bits/")
            label = f',tensor="{_escaped(tensor)}"' if colon else ""
            metric = OTHER.sub("_", f"{name}_bits" if colon else name)
            rows.setdefault(metric, []).append(f'{metric}{{rank="{self._rank}"{label}}} {value!r}')
        text = "".join(f"# TYPE {metric} gauge\n" + "\n".join(lines) + "\n" for metric, lines in rows.items())
        beside = f"{self._path}.{os.getpid()}"
        with open(beside, "w") as file:
            file.write(text)
        os.replace(beside, self._path)

    def close(self) -> None:
        """The file stays: it says how the run ended."""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
