"""Svyatkovskiy et al. 2019: recurrent networks train in half precision if the loss is scaled."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from narrowcast.simulate import LossScale, lower
from narrowcast.study import seeded
from narrowcast_research.reproductions.base import Cell, Claim, Options, Result, RowFigures, RowTable, Work
from narrowcast_research.reproductions.pictures import pictures
from narrowcast_research.reproductions.short import SCALED, accuracy_of, train_scaled

WORKERS = 128
"""The paper's order of magnitude: a worker's loss is divided by their number, as where gradients are added."""
ROWS = {
    "float32": (None, False),
    "fp16, loss scaled": ("fp16", True),
    "fp16": ("fp16", False),
    "bf16, loss scaled": ("bf16", True),
    "bf16": ("bf16", False),
}
"""The format of weights, activations, states and gradients; and whether the loss has a dynamic scale."""


class RowsOfAPicture(nn.Module):
    """Reads a picture row by row and names it."""

    def __init__(self, side: int, classes: int, width: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(side, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.cells(x.flatten(0, 1).view(len(x), -1, x.shape[-1]))[0][:, -1])
        return scores


class SvyatkovskiyRnn(RowTable):
    """An LSTM of two layers, all of it in 16 bits; sums of products in float32, as tensor cores have them."""

    name: ClassVar[str] = "svyatkovskiy-rnn"
    title: ClassVar[str] = "A recurrent network in half precision (Svyatkovskiy et al. 2019)"
    needs: ClassVar[str] = "digits"
    rows: ClassVar = ROWS
    row_heading: ClassVar[str] = "format"
    figures: ClassVar = SCALED
    notes: ClassVar = (
        f"one worker's loss, divided by {WORKERS}; master weights in float32; products summed in float32",
    )

    def rows_of(self, options: Options) -> list[str]:
        return [row for row in ROWS if not options.quick or row == "float32" or "scaled" in row]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        data = pictures("digits", options)
        form, scaled = ROWS[cell["row"]]
        width, steps = (24, 90) if options.quick else (64, 500)
        model = seeded(lambda: RowsOfAPicture(data.x_train.shape[-1], data.classes, width), cell["seed"])
        model = model.to(options.device)
        if form is not None:
            lower(model, weights=form, activations=form, gradients=form)
        scaler = LossScale(2.0**14, interval=100) if scaled else LossScale(1.0, dynamic=False)
        skipped = train_scaled(model, data, scaler, steps, cell["seed"], rate=0.2, share=WORKERS)
        return {"accuracy": accuracy_of(model, data), "skipped": skipped, "scale": scaler.get_scale()}

    def claims(self, made: RowFigures, options: Options) -> list[Claim]:
        slack, rows = 5.0 if options.quick else 1.5, ("fp16, loss scaled", "bf16, loss scaled")
        return [Claim.near(f"{row}: as good as float32", made.gap(row), slack) for row in rows]
