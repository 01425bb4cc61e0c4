"""Weights & Biases: into the run that is there, or into one of our own."""

from __future__ import annotations

from typing import Any


class WandB:
    """Needs the package wandb. project: of a run of our own, where the program has begun none."""

    def __init__(self, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(f"Recording: {error}; pip install wandb, or write jsonl:FILE") from error
        self._own = wandb.run is None
        self._run: Any = wandb.init(project=project) if self._own else wandb.run

    def write(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        """Finish the run, unless it is the program's."""
        if self._own:
            self._run.finish()
