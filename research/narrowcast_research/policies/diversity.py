"""MuPPET's rule: raise the precision when successive gradients stop differing (Rajagopal et al., ICML 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import TensorInfo, Watching

Seen = Mapping[str, tuple[float, ...]]


class GradientDiversity(Watching):
    """Climbs a ladder of wires, from the fewest bits up, whenever gradient diversity has fallen too often.

    Once an epoch one gradient of each tensor is taken; every `window` epochs the diversity is the mean over tensors of
    sum ||g||^2 / ||sum g||^2. Where the largest diversity at this rung, divided by the present one, exceeds
    1 + scale * exp(-decay * epoch), that is a violation; after `patience` of them the next rung is taken.
    """

    looks_at = "mean"

    def __init__(
        self,
        ladder: Sequence[str | Codec],
        *,
        epoch: int,
        window: int = 3,
        patience: int = 2,
        scale: float = 1.5,
        decay: float = 0.1,
    ) -> None:
        if len(ladder) < 2:
            raise ValueError(f"GradientDiversity: a ladder has two wires or more, got {list(ladder)}")
        if epoch < 1:
            raise ValueError(f"GradientDiversity: epoch is the number of steps in one, got {epoch}")
        self.ladder = tuple(codec_named(wire) for wire in ladder)
        self.epoch, self.window, self.patience, self.scale, self.decay = epoch, window, patience, scale, decay
        self.rung, self.violations, self.largest, self.epochs = 0, 0, 0.0, 0
        self.history: list[tuple[int, int, float]] = []
        """(step, rung, diversity) of each time that it was measured."""
        self._norms: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}

    def __call__(self, info: TensorInfo, step: int) -> Codec:
        return self.ladder[self.rung]

    def due(self, step: int) -> bool:
        """Once an epoch, at its last step, as long as there is a rung left to climb."""
        return self.rung < len(self.ladder) - 1 and step % self.epoch == self.epoch - 1

    def look(self, info: TensorInfo, gradient: Tensor) -> tuple[float, ...]:
        """Of the window so far: sum ||g||^2 and ||sum g||^2."""
        g = gradient.detach().double().flatten()
        total = self._sums.get(info.name)
        self._sums[info.name] = g.clone() if total is None else total.add_(g)
        self._norms[info.name] = self._norms.get(info.name, 0.0) + float(g.square().sum())
        return self._norms[info.name], float(self._sums[info.name].square().sum())

    def threshold(self, epoch: int) -> float:
        return 1 + self.scale * math.exp(-self.decay * epoch)

    def decide(self, step: int, seen: Seen, world: int) -> None:
        self.epochs += 1
        if self.epochs % self.window:
            return
        self._norms.clear()
        self._sums.clear()
        ratios = [norms / squared for norms, squared in seen.values() if squared > 0 and math.isfinite(norms)]
        if not ratios:
            return
        diversity = sum(ratios) / len(ratios)
        self.history.append((step, self.rung, diversity))
        self.largest = max(self.largest, diversity)
        if self.largest / diversity > self.threshold(self.epochs):
            self._violated()

    def _violated(self) -> None:
        self.violations += 1
        if self.violations >= self.patience:
            self.rung, self.violations, self.largest = self.rung + 1, 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        numbers = {key: getattr(self, key) for key in ("rung", "violations", "largest", "epochs")}
        return {**numbers, "history": list(self.history), "norms": dict(self._norms), "sums": dict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key in ("rung", "violations", "largest", "epochs"):
            setattr(self, key, state[key])
        self.history = [tuple(entry) for entry in state["history"]]
        self._norms, self._sums = dict(state["norms"]), dict(state["sums"])
