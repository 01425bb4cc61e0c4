"""Raposo et al. 2021 (PositNN): 8-bit posits need sums that are exact until one rounding, the quire."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from narrowcast.simulate import LossScale, lower
from narrowcast.study import seeded
from narrowcast_research.reproductions.base import Cell, Claim, Options, Result, RowFigures, RowTable, Work
from narrowcast_research.reproductions.pictures import pictures
from narrowcast_research.reproductions.short import accuracy_of, train_scaled

ROWS: dict[str, dict[str, str]] = {
    "float32": {},
    "posit(8,1), quire": {"form": "posit8.1", "sums": "posit8.1+quire"},
    "posit(8,1), float32 sums": {"form": "posit8.1", "sums": "fp32"},
}
"""Sums of posits rounded after each term run in the plain reference, a Python step a term: too slow to train by."""
SCALE = 2.0**6
"""Of the loss: gradients near 1 are where posits are dense."""


def lenet(side: int, classes: int, width: int) -> nn.Module:
    """LeNet-5's shape: two convolutions with pooling, two linear layers; narrower where there are few pixels."""
    after = side // 4
    return nn.Sequential(
        nn.Conv2d(1, width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * after * after, 10 * width), nn.ReLU(), nn.Linear(10 * width, classes),
    )  # fmt: skip


class PositNN(RowTable):
    """Weights, activations, gradients and every sum in posits; float32 copies of the weights are updated."""

    name: ClassVar[str] = "positnn-quire"
    title: ClassVar[str] = "8-bit posits by the way sums are made (Raposo et al. 2021)"
    needs: ClassVar[str] = "digits"
    rows: ClassVar = ROWS
    row_heading: ClassVar[str] = "weights, activations, gradients; sums"
    notes: ClassVar = ("the paper: posit(8,0), LeNet-5 on Fashion-MNIST, 88.15 % where float32 has 90.42",)

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        data, formats = pictures("digits", options), ROWS[cell["row"]]
        width, steps = (3, 60) if options.quick else (4, 250)
        model = seeded(lambda: lenet(data.x_train.shape[-1], data.classes, width), cell["seed"])
        model = model.to(options.device)
        if formats:
            form = formats["form"]
            lower(model, weights=form, activations=form, gradients=form, accumulate=formats["sums"])
        train_scaled(model, data, LossScale(SCALE, dynamic=False), steps, cell["seed"], rate=0.05)
        return {"accuracy": accuracy_of(model, data)}

    def claims(self, made: RowFigures, options: Options) -> list[Claim]:
        slack = 12.0 if options.quick else 4.0
        return [Claim.near("with a quire posits come near float32", made.gap("posit(8,1), quire"), slack)]
