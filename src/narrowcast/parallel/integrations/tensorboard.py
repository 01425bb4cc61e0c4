"""Counters to TensorBoard, or to any writer with `add_scalar`."""

from __future__ import annotations

from typing import Any

from narrowcast.parallel.stats import Watched

TOTALS = ("ratio",)
"""What is shown as it stands; all else as its growth since the last time, for each step of the handle."""


def scalars(now: dict[str, float], before: dict[str, float] | None = None) -> dict[str, float]:
    """Counters as numbers for a step: of the steps since `before`."""
    before = before or {}
    steps = max(1.0, now.get("steps", 1.0) - before.get("steps", 0.0))
    grown = {k: (v - before.get(k, 0.0)) / steps for k, v in now.items() if k not in (*TOTALS, "steps")}
    return {f"{key}_per_step": value for key, value in grown.items()} | {key: now[key] for key in TOTALS if key in now}


class TensorBoard:
    """Writes the counters of a handle: `TensorBoard(handle, "runs/x")`, then `write(step)` now and then.

    to: a folder, or a writer that is there already. A folder needs the package tensorboard.
    """

    def __init__(self, watched: Watched, to: Any, prefix: str = "narrowcast") -> None:
        self._watched, self._prefix = watched, prefix
        self._own = not hasattr(to, "add_scalar")
        self._writer = _writer(str(to)) if self._own else to
        self._before: dict[str, float] | None = None

    def write(self, step: int) -> None:
        """All counters, as of now."""
        now = self._watched.stats()
        for key, value in scalars(now, self._before).items():
            self._writer.add_scalar(f"{self._prefix}/{key}", value, step)
        self._before = now

    def close(self) -> None:
        """Close the writer, unless it came from outside."""
        if self._own:
            self._writer.close()


def _writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(f"TensorBoard: {error}; install narrowcast[tensorboard], or give a writer") from error
    return SummaryWriter(folder)
