"""Noune et al. 2022: a loss scale that follows the logarithm of the largest gradient needs no choosing.

The abstract names the rule (LogMax) and does not state it; this is our reading: mean and deviation of log2 of the
largest gradient are tracked, and the scale puts the mean and some deviations at the format's largest value.
"""

from __future__ import annotations

import math
from typing import ClassVar

from torch.optim import Optimizer

from narrowcast.formats import format as format_named
from narrowcast.simulate import LossScale, lower
from narrowcast_research.reproductions.base import Cell, Claim, Options, Result, RowFigures, RowTable, Work
from narrowcast_research.reproductions.pictures import pictures
from narrowcast_research.reproductions.short import SCALED, accuracy_of, perceptron, train_scaled

WEIGHTS, GRADIENTS = "e4m3fnuz", "e5m2fnuz"
"""1.4.3 and 1.5.2 in the paper's terms."""
SHARE = 2.0**12
"""The loss is divided by this, as by many workers and a long sequence: what a bare e5m2 flushes."""
BLIND = 16.0
"""What a scale grows by at a step that shows no gradient at all."""
ROWS = ("float32", "LogMax", "rule off: no scale", "rule off: scale too large")


class LogMaxScale(LossScale):
    """The scale that puts mean + `deviations` of log2 of the largest gradient at `largest`."""

    def __init__(self, largest: float, *, deviations: float = 3.0, decay: float = 0.9) -> None:
        super().__init__(1.0)
        self.top, self.deviations, self.decay = math.log2(largest), deviations, decay
        self._mean: float | None = None
        self._variance = 1.0

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        largest = max((float(g.abs().max()) for g in grads), default=0.0)
        if 0 < largest < math.inf:
            self._follow(math.log2(largest))

    def _follow(self, seen: float) -> None:
        if self._mean is None:
            self._mean = seen
        off = seen - self._mean
        self._mean += (1 - self.decay) * off
        self._variance = self.decay * (self._variance + (1 - self.decay) * off * off)

    def update(self) -> None:
        super().update()
        if self.skipped:
            return
        if self._mean is None:  # every gradient was flushed: there is nothing to follow yet
            self._scale *= BLIND
            return
        self._scale = 2.0 ** math.floor(self.top - self._mean - self.deviations * math.sqrt(self._variance))


class NouneLogMax(RowTable):
    """Weights and activations in 1.4.3, gradients in 1.5.2, a loss so small that it needs a scale."""

    name: ClassVar[str] = "noune-logmax"
    title: ClassVar[str] = "A loss scale that follows the largest gradient (after Noune et al. 2022)"
    needs: ClassVar[str] = "digits"
    rows: ClassVar = ROWS
    row_heading: ClassVar[str] = "loss scale"
    figures: ClassVar = SCALED
    notes: ClassVar = (f"the loss is divided by {SHARE:g}; weights and activations {WEIGHTS}, gradients {GRADIENTS}",)

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        data = pictures("digits", options)
        model = perceptron(data, options, cell["seed"]).to(options.device)
        if cell["row"] != "float32":
            lower(model, weights=WEIGHTS, activations=WEIGHTS, gradients=GRADIENTS)
        scaler = self._scaler(cell["row"])
        steps = 120 if options.quick else 600
        skipped = train_scaled(model, data, scaler, steps, cell["seed"], share=SHARE)
        return {"accuracy": accuracy_of(model, data), "skipped": skipped, "scale": scaler.get_scale()}

    def _scaler(self, row: str) -> LossScale:
        if row == "LogMax":
            return LogMaxScale(format_named(GRADIENTS).max)
        return LossScale(SHARE * 2**24 if row.endswith("too large") else 1.0, dynamic=False)

    def claims(self, made: RowFigures, options: Options) -> list[Claim]:
        slack = 5.0 if options.quick else 1.5
        near = Claim.near("LogMax: as good as float32", made.gap("LogMax"), slack)
        return [near, *(Claim.lost(f"{row}: accuracy is lost", made.gap(row), slack) for row in ROWS[2:])]
