"""Counters to TensorBoard, or to any writer with `add_scalar`."""

from __future__ import annotations

from typing import Any

from narrowcast.parallel.integrations.recording import Recording
from narrowcast.parallel.stats import Watched


class Scalars:
    """to: a folder, which needs the package tensorboard, or a writer, which stays its owner's."""

    def __init__(self, to: Any) -> None:
        self._own = not hasattr(to, "add_scalar")
        self._writer = _writer(str(to)) if self._own else to

    def write(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the writer, unless it came from outside."""
        if self._own:
            self._writer.close()


class TensorBoard(Recording):
    """Writes the counters of a handle: `TensorBoard(handle, "runs/x")`, then `write(step)` now and then.

    to: a folder, or a writer that is there already. A folder needs the package tensorboard.
    """

    def __init__(self, watched: Watched, to: Any, prefix: str = "narrowcast") -> None:
        super().__init__(watched, Scalars(to), prefix)


def _writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(f"TensorBoard: {error}; install narrowcast[tensorboard], or give a writer") from error
    return SummaryWriter(folder)
