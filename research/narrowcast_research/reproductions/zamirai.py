"""Zamirai et al. 2020: bfloat16 weights stall when updates are rounded to nearest; stochastic and Kahan do not."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from narrowcast.simulate import optim
from narrowcast_research import models
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
from narrowcast_research.reproductions.short import exchange_run

UPDATES = ("nearest", "stochastic", "kahan")
ROWS = ("float32", *UPDATES)
SAMPLES, SIZE, RATE = 1000, 10, 0.01
BF16 = {"weights": "bf16", "activations": "bf16", "gradients": "bf16"}


class ZamiraiBf16(Reproduction):
    """Two tasks: the paper's least squares, and a perceptron whose every cast is to bfloat16."""

    name: ClassVar[str] = "zamirai-bf16"
    title: ClassVar[str] = "Pure bfloat16 training by the way the weights are updated (Zamirai et al. 2020)"
    needs: ClassVar[str] = "mnist"

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        tasks = ("least squares", "perceptron")
        return [{"task": t, "update": u, "seed": seed} for seed in range(seeds) for t in tasks for u in ROWS]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        precision = precision_of(cell["update"], "bf16", cell["seed"])
        if cell["task"] == "least squares":
            return {"loss": _least_squares(precision, cell["seed"], 800 if options.quick else 20_000)}
        epochs = 8 if options.quick else 3
        total = epochs * (11 if options.quick else 468)
        return exchange_run(
            lambda model, per_epoch: "as-is",
            cell["seed"],
            options,
            work,
            epochs=epochs,
            workers=1,
            optimizer=partial(_sgd, precision=precision),
            # the smaller the steps become, the more of them nearest rounding loses
            lr=lambda step: 0.03 * (1 - step / total),
            lower=None if cell["update"] == "float32" else {**BF16, "seed": cell["seed"]},
        )

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        loss, accuracy = by(found, "update", "loss"), by(found, "update", "accuracy")
        rows = [[row, spread(loss.get(row, []), 3), spread(accuracy.get(row, []))] for row in ROWS if row in loss]
        floor, stalled = mean_of(loss, "float32"), mean_of(loss, "nearest")
        claims = [
            Claim("least squares: nearest stalls above float32", stalled > 2 * floor, f"{stalled:.3g}/{floor:.3g}")
        ]
        for update in UPDATES[1:]:
            here = mean_of(loss, update)
            claims.append(Claim(f"least squares: {update} gets below nearest", here < stalled / 2, f"{here:.3g}"))
            gap = mean_of(accuracy, update) - mean_of(accuracy, "float32")
            slack = 3.0 if options.quick else 0.5
            claims.append(
                Claim(f"perceptron: {update} reaches float32 (within {slack:g})", gap > -slack, f"{gap:+.2f}")
            )
        columns = ("update of the weights", "least squares: loss", "perceptron: accuracy, %")
        note = "the paper, seven tasks: nearest up to 7 points below the others, these 0.1 below to 0.2 above float32"
        return Report(self.title, columns, rows, claims, [note])


def precision_of(update: str, weights: str, seed: int) -> dict[str, Any]:
    """Arguments of `simulate.optim` for one way of updating; nothing for float32."""
    return {} if update == "float32" else {"weights": weights, "update": update, "seed": seed}


def _sgd(parameters: list[nn.Parameter], precision: dict[str, Any]) -> torch.optim.Optimizer:
    return optim.SGD(parameters, lr=0.0, momentum=0.9, **precision)


def _least_squares(precision: dict[str, Any], seed: int, steps: int) -> float:
    """One sample a step, as in the paper; the mean squared error over all samples at the end."""
    made = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(SAMPLES, SIZE, generator=made), 0.5 * torch.randn(SAMPLES, generator=made)
    y = x @ (100 * torch.rand(SIZE, generator=made)) + noise
    model = models.least_squares(SIZE)
    optimizer = optim.SGD(model.parameters(), lr=RATE, **precision)
    for number in torch.randint(SAMPLES, (steps,), generator=made).tolist():
        optimizer.zero_grad()
        ((model(x[number]) - y[number]) ** 2 / 2).backward()
        optimizer.step()
    with torch.no_grad():
        return float(((model(x) - y) ** 2).mean() / 2)
