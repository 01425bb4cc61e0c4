"""A simulated training under way, and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowcast.parallel import TensorRow
from narrowcast.simulate import settings as arguments
from narrowcast.simulate.exchange import GradientExchange
from narrowcast.simulate.local import LocalWorld
from narrowcast.simulate.precision.lowering import Lowered
from narrowcast.simulate.settings import Batches, Log, PathLike, Record
from narrowcast.simulate.world import World


@dataclass
class Run:
    """A training under way: what hooks get to see, and what `train` returns."""

    model: nn.Module
    optimizer: Optimizer
    world: World
    gradients: GradientExchange | None
    batches: Batches
    log: Log
    total_steps: int
    lowered: Lowered | None = None
    """What makes the model compute in low precision, where asked for."""
    local: LocalWorld | None = None
    """The workers, where each trains by itself and they exchange now and then."""
    step: int = 0
    """Steps done."""
    stop: bool = False
    """A hook that sets this ends the run after its step."""
    loss: Tensor | None = None
    """Of the last step: the mean over all workers."""
    accuracy: float | None = None
    """On the test set, at the last look."""
    test_loss: float | None = None
    pending: list[tuple[int, Tensor, float]] = field(default_factory=list)

    @property
    def exchange(self) -> GradientExchange:
        """Of gradients, where workers exchange them at every step."""
        if self.gradients is None:
            raise AttributeError("this run has local updates and exchanges no gradients; see run.local")
        return self.gradients

    @property
    def optimizers(self) -> list[Optimizer]:
        """One, or with local updates each worker's own."""
        return self.local.optimizers if self.local is not None else [self.optimizer]

    def rows(self) -> list[TensorRow]:
        """Every tensor: its wire, or why it stays as it is."""
        return self.local.rows() if self.local is not None else self.exchange.rows()

    @property
    def epoch(self) -> float:
        return self.step / self.batches.steps_per_epoch

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps

    @property
    def history(self) -> list[Record]:
        """Loss and accuracy on the test set, each time it was looked at."""
        return self.log.of_kind("test")


@dataclass(frozen=True)
class Saver:
    """Checkpoints of a run, and the way back."""

    _run: Run
    _path: PathLike | None
    settings: dict[str, Any]

    def log_start(self) -> None:
        """The settings, and the wire of every tensor or why it stays as it is."""
        rows = self._run.rows()
        wires = [{"name": row.name, "values": row.numel, "wire": row.wire, "why": row.why} for row in rows]
        facts = {key: value for key, value in self.settings.items() if key != "parameters"}
        self._run.log.write("start", **facts, steps=self._run.total_steps, tensors=wires)

    def save(self) -> None:
        if self._path is None:
            return
        run = self._run
        state: dict[str, Any] = {
            "run": self.settings,
            "step": run.step,
            "model": run.model.state_dict(),
            "residuals": run.world.residuals.exact(),
            "factors": run.world.factors.state_dict(),
            "log": run.log.records,
            "test": [run.accuracy, run.test_loss],
        }
        if run.local is not None:
            state["local"] = run.local.state()
        else:
            state["optimizer"] = run.optimizer.state_dict()
            state |= {"ready": run.exchange.ready, "policy": run.exchange.watch.state_dict()}
        arguments.save_checkpoint(self._path, state)

    def load(self, device: torch.device) -> bool:
        """Whether there was something to go on from."""
        state = arguments.load_checkpoint(self._path, device, self.settings) if self._path is not None else None
        if state is None:
            return False
        run = self._run
        run.model.load_state_dict(state["model"])
        run.world.residuals.load_exact(state["residuals"])
        run.world.factors.load(state.get("factors", {}))
        if run.local is not None:
            run.local.load(state["local"])
        else:
            self._load_gradients(run, state)
        run.step, (run.accuracy, run.test_loss) = state["step"], state["test"]
        run.log.begin(state["log"])
        return True

    @staticmethod
    def _load_gradients(run: Run, state: dict[str, Any]) -> None:
        """What runs have that exchange gradients at every step."""
        run.optimizer.load_state_dict(state["optimizer"])
        if state["ready"]:
            run.exchange.rebuild(state["ready"])
        run.exchange.watch.load_state_dict(state["policy"])
