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
from narrowcast_research.reproductions.base import (
    Cell,
    Claim,
    Options,
    Report,
    Reproduction,
    Result,
    Work,
    by,
    mean_of,
    spread,
)
from narrowcast_research.reproductions.pictures import pictures
from narrowcast_research.reproductions.short import accuracy_of, perceptron, train_scaled

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


class NouneLogMax(Reproduction):
    """Weights and activations in 1.4.3, gradients in 1.5.2, a loss so small that it needs a scale."""

    name: ClassVar[str] = "noune-logmax"
    title: ClassVar[str] = "A loss scale that follows the largest gradient (after Noune et al. 2022)"
    needs: ClassVar[str] = "digits"

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        return [{"row": row, "seed": seed} for seed in range(seeds) for row in ROWS]

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

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        accuracy, scale, skipped = (by(found, "row", key) for key in ("accuracy", "scale", "skipped"))
        rows = [
            [row, spread(accuracy[row]), f"{mean_of(scale, row):g}", f"{mean_of(skipped, row):g}"] for row in accuracy
        ]
        slack = 5.0 if options.quick else 1.5
        plain = mean_of(accuracy, "float32")
        gap = mean_of(accuracy, "LogMax") - plain
        claims = [Claim(f"LogMax: as good as float32 (within {slack:g})", gap > -slack, f"{gap:+.2f}")]
        for row in ROWS[2:]:
            lost = mean_of(accuracy, row) - plain
            claims.append(Claim(f"{row}: accuracy is lost", lost < -slack, f"{lost:+.2f}"))
        notes = [f"the loss is divided by {SHARE:g}; weights and activations {WEIGHTS}, gradients {GRADIENTS}"]
        return Report(
            self.title, ("loss scale", "accuracy, %", "scale at the end", "steps left out"), rows, claims, notes
        )
