"""Counters as numbers for a step, to wherever they are looked at: one line of SINKS for each place, one file each."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from narrowcast.parallel.handle import Handle
from narrowcast.parallel.stats import Watched

TOTALS = ("ratio", "compressed_share", "compressed_bytes_share", "watch_share", "computing_share", "variance")
"""What is shown as it stands; all else as its growth since the last time, for each step of the handle."""

SINKS = {
    "jsonl": "narrowcast.parallel.integrations.jsonl:JsonLines",
    "prometheus": "narrowcast.parallel.integrations.prometheus:Prometheus",
    "tensorboard": "narrowcast.parallel.integrations.tensorboard:Scalars",
    "wandb": "narrowcast.parallel.integrations.wandb:WandB",
}
"""By the word before the colon of `Recording(handle, "jsonl:run.jsonl")`; each takes what stands after it."""


class Sink(Protocol):
    """Where numbers go."""

    def write(self, numbers: dict[str, float], step: int) -> None:
        """All of a step."""

    def close(self) -> None:
        """Write what is held back, and let go of what was opened here."""


def scalars(now: dict[str, float], before: dict[str, float] | None = None) -> dict[str, float]:
    """Counters as numbers for a step: of the steps since `before`."""
    before = before or {}
    steps = max(1.0, now.get("steps", 1.0) - before.get("steps", 0.0))
    grown = {k: (v - before.get(k, 0.0)) / steps for k, v in now.items() if k not in (*TOTALS, "steps")}
    return {f"{key}_per_step": value for key, value in grown.items()} | {key: now[key] for key in TOTALS if key in now}


def sink_of(to: str) -> Sink:
    """Of "jsonl:run.jsonl" and the like."""
    kind, colon, where = to.partition(":")
    if kind not in SINKS or not colon or not where:
        raise ValueError(f"Recording: got {to!r}; give KIND:WHERE with one of {', '.join(SINKS)}, as jsonl:run.jsonl")
    module, _, name = SINKS[kind].partition(":")
    made: Sink = getattr(import_module(module), name)(where)
    return made


class Recording:
    """Writes the counters of a handle: `Recording(handle, "jsonl:run.jsonl")`, then `write(step)` now and then.

    to: "jsonl:FILE", "prometheus:FILE", "tensorboard:FOLDER", "wandb:PROJECT", or anything with `write` and `close`.
    """

    def __init__(self, watched: Watched, to: str | Sink, prefix: str = "narrowcast") -> None:
        self._watched, self._prefix = watched, prefix
        self._sink = sink_of(to) if isinstance(to, str) else to
        self._before: dict[str, float] | None = None

    def write(self, step: int) -> None:
        """All counters, as of now."""
        now = self._watched.stats()
        numbers = scalars(now, self._before)
        self._before = now
        # where the autopilot decides, the bits of each tensor change
        handle = self._watched
        if isinstance(handle, Handle) and handle.history():
            numbers |= {f"bits/{row.name}": row.bits_per_value for row in handle.rows()}
        self._sink.write({f"{self._prefix}/{key}": value for key, value in numbers.items()}, step)

    def close(self) -> None:
        self._sink.close()
