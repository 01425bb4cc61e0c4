"""Mellempudi et al. 2019: in e5m2 a loss scale that backs off too far flushes gradients; a rising minimum helps."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from narrowcast.simulate import LossScale, lower
from narrowcast_research.reproductions.base import Cell, Claim, Options, Result, RowFigures, RowTable, Work
from narrowcast_research.reproductions.pictures import pictures
from narrowcast_research.reproductions.short import SCALED, accuracy_of, perceptron, train_scaled

FP8 = "e5m2"
ROWS = ("no outliers, float32", "dynamic, minimum rises", "rule off: dynamic alone")
OUTLIER, EVERY = 1e5, 4
"""Every so many steps one picture is this much too bright: e5m2 overflows, and the scale is halved."""


class Mellempudi(RowTable):
    """e5m2 in weights, activations, errors and gradients, on data in which a picture is broken now and then."""

    name: ClassVar[str] = "mellempudi-loss-scale"
    title: ClassVar[str] = "Loss scaling in e5m2 with a rising minimum (Mellempudi et al. 2019)"
    needs: ClassVar[str] = "mnist"
    rows: ClassVar = ROWS
    row_heading: ClassVar[str] = "loss scale"
    figures: ClassVar = SCALED

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        data = pictures("mnist", options)
        model = perceptron(data, options, cell["seed"]).to(options.device)
        steps = 150 if options.quick else 1000
        if cell["row"] == ROWS[0]:
            scaler = LossScale(1.0, dynamic=False)
        else:
            lower(model, weights=FP8, activations=FP8, gradients=FP8)
            # rises twice, at a third and at two thirds of the run, as gradients shrink
            rising = {0: 2.0**8, steps // 3: 2.0**9, 2 * steps // 3: 2.0**10} if cell["row"] == ROWS[1] else {}
            scaler = LossScale(2.0**10, interval=2 * steps, minimums=rising)
        change = None if cell["row"] == ROWS[0] else _break_some
        skipped = train_scaled(model, data, scaler, steps, cell["seed"], change=change)
        return {"accuracy": accuracy_of(model, data), "skipped": skipped, "scale": scaler.get_scale()}

    def claims(self, made: RowFigures, options: Options) -> list[Claim]:
        return [
            Claim.near("with a rising minimum e5m2 comes near float32", made.gap(ROWS[1], ROWS[0]), 5),
            Claim.lost("without it the scale falls and accuracy is lost", made.gap(ROWS[2], ROWS[1]), 3),
        ]


def _break_some(step: int, x: Tensor) -> None:
    if step % EVERY == EVERY - 1:
        x[0] *= OUTLIER
