"""Mellempudi et al. 2019: in e5m2 a loss scale that backs off too far flushes gradients; a rising minimum helps."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

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

FP8 = "e5m2"
ROWS = ("no outliers, float32", "dynamic, minimum rises", "rule off: dynamic alone")
OUTLIER, EVERY = 1e5, 4
"""Every so many steps one picture is this much too bright: e5m2 overflows, and the scale is halved."""


class Mellempudi(Reproduction):
    """e5m2 in weights, activations, errors and gradients, on data in which a picture is broken now and then."""

    name: ClassVar[str] = "mellempudi-loss-scale"
    title: ClassVar[str] = "Loss scaling in e5m2 with a rising minimum (Mellempudi et al. 2019)"
    needs: ClassVar[str] = "mnist"

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        return [{"row": row, "seed": seed} for seed in range(seeds) for row in ROWS]

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

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        accuracy, scale, skipped = (by(found, "row", key) for key in ("accuracy", "scale", "skipped"))
        rows = [
            [row, spread(accuracy[row]), f"{mean_of(scale, row):g}", f"{mean_of(skipped, row):g}"] for row in accuracy
        ]
        gap = mean_of(accuracy, ROWS[1]) - mean_of(accuracy, ROWS[0])
        loss = mean_of(accuracy, ROWS[2]) - mean_of(accuracy, ROWS[1])
        claims = [
            Claim("with a rising minimum e5m2 comes near float32 (within 5 points)", gap > -5, f"{gap:+.2f}"),
            Claim("without it the scale falls and accuracy is lost", loss < -3, f"{loss:+.2f}"),
        ]
        columns = ("loss scale", "accuracy, %", "scale at the end", "steps left out")
        return Report(self.title, columns, rows, claims)


def _break_some(step: int, x: Tensor) -> None:
    if step % EVERY == EVERY - 1:
        x[0] *= OUTLIER
