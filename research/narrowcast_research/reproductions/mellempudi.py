"""Mellempudi et al. 2019: in e5m2 a loss scale that backs off too far flushes gradients; a rising minimum helps."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from narrowcast.data import Dataset
from narrowcast.simulate import Batches, LossScale, lower
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
from narrowcast_research.reproductions.short import perceptron, sgd

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
        broken = cell["row"] != ROWS[0]
        skipped = _train(model, data, scaler, steps, cell["seed"], broken)
        return {"accuracy": _accuracy(model, data), "skipped": skipped, "scale": scaler.get_scale()}

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


def _train(model: nn.Module, data: Dataset, scaler: LossScale, steps: int, seed: int, broken: bool) -> int:
    """How many steps were left out."""
    optimizer, batches, skipped = sgd(list(model.parameters()), 0.05), Batches(len(data.x_train), 64, 1, seed), 0
    for step in range(steps):
        chosen = batches.indices(step, 0).to(data.x_train.device)
        x = data.x_train[chosen]
        if broken and step % EVERY == EVERY - 1:
            x[0] *= OUTLIER
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), data.y_train[chosen])).backward()
        scaler.step(optimizer)
        skipped += scaler.skipped
        scaler.update()
    return skipped


@torch.no_grad()
def _accuracy(model: nn.Module, data: Dataset) -> float:
    right = sum(
        int((model(x).argmax(1) == y).sum())
        for x, y in zip(data.x_test.split(1000), data.y_test.split(1000), strict=True)
    )
    return 100 * right / len(data.y_test)
