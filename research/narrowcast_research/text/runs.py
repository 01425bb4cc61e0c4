"""What trainings wrote, line by line, as runs: losses by step and by time."""

from __future__ import annotations

import bisect
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Curve = list[tuple[float, float]]
SMOOTH = 20
"""Steps that a training loss is averaged over: one batch says little."""


@dataclass
class TextRun:
    """A wire, a seed, and a line for each step."""

    wire: str
    seed: int
    facts: dict[str, Any]
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return bool(self.end.get("complete"))

    @property
    def steps(self) -> int:
        return max(self.rows, default=0)

    def step_seconds(self) -> float:
        """The median, of the steps that count."""
        times = [
            self.rows[step]["seconds"] - self.rows[step - 1]["seconds"] for step in self.rows if step - 1 in self.rows
        ]
        return statistics.median([seconds for seconds in times if seconds > 0] or [0.0])

    def smooth(self, step: int) -> float:
        """Training loss, the mean of the steps up to this one."""
        return statistics.mean(self.rows[one]["loss"] for one in range(step - SMOOTH + 1, step + 1) if one in self.rows)

    def train_curve(self, key: str) -> Curve:
        """Smoothed training loss by `step` or `seconds`."""
        return [(self.rows[step][key], self.smooth(step)) for step in sorted(self.rows) if step >= SMOOTH]

    def held_out_curve(self, key: str) -> Curve:
        return [(row[key], row["held_out"]) for _, row in sorted(self.rows.items()) if "held_out" in row]

    def held_out_at(self, step: int) -> float | None:
        return self.rows.get(step, {}).get("held_out")

    def seconds_to(self, loss: float) -> float | None:
        """Until held-out loss was first as low, on the straight line between two of them; None where it never was."""
        curve = self.held_out_curve("seconds")
        lowest: list[float] = []
        for _, value in curve:
            lowest.append(-min(value, -lowest[-1] if lowest else value))
        index = bisect.bisect_left(lowest, -loss)
        if index == len(curve):
            return None
        (after, low), (before, high) = curve[index], curve[max(0, index - 1)]
        return after if index == 0 else before + (high - loss) / (high - low) * (after - before)


def read(paths: Iterable[Path]) -> list[TextRun]:
    """All runs of some files. A run that begins again replaces what it wrote before, unless that was complete."""
    found: dict[tuple[str, int], TextRun] = {}
    for path in paths:
        now: dict[tuple[str, int], TextRun] = {}
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
                key = line["wire"], line["seed"]
                if "run" in line and not (line["run"]["after"] and (key in now or key in found)):
                    now[key] = TextRun(*key, line["run"])
                run = now.setdefault(key, found[key]) if key in found else now[key]
                run.end = line.get("end", {})
                if "loss" in line:
                    run.rows[line["step"]] = line
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: {text[:80]!r} is no line of a run ({error}); remove it") from None
        found |= {key: run for key, run in now.items() if run.complete or not (key in found and found[key].complete)}
    return list(found.values())


def files_in(places: Sequence[Path]) -> list[Path]:
    """Files, and those below folders, by name."""
    return [file for place in places for file in (sorted(place.rglob("*.jsonl")) if place.is_dir() else [place])]
