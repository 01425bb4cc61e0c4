"""Mogami 2020: every multiplication of a training replaced by an addition of bit patterns."""

from __future__ import annotations

from typing import ClassVar

import torch

from narrowcast.simulate import matmul
from narrowcast_research.reproductions.base import Cell, Claim, Options, Result, RowFigures, RowTable, Work
from narrowcast_research.reproductions.short import exchange_run

RULES = {"float32": "fp32", "bit patterns added": "fp32+mogami"}
WORST = 1 / 9
"""Mitchell's bound: 11.1 % low, where both mantissas are one half."""


class Mogami(RowTable):
    name: ClassVar[str] = "mogami"
    title: ClassVar[str] = "Training without multiplications (Mogami 2020)"
    needs: ClassVar[str] = "mnist"
    rows: ClassVar = RULES
    row_heading: ClassVar[str] = "products"
    figures: ClassVar = {
        "accuracy, %": "accuracy",
        "products too low by, mean": "mean_error:.2%",
        "at most": "worst_error:.2%",
    }

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        rule = RULES[cell["row"]]
        result = exchange_run(
            lambda model, per_epoch: "as-is",
            cell["seed"],
            options,
            work,
            epochs=4 if options.quick else 2,
            workers=1,
            lower=None if rule == "fp32" else {"accumulate": rule},
        )
        return None if result is None else {**result, **_product_errors(rule)}

    def claims(self, made: RowFigures, options: Options) -> list[Claim]:
        row = "bit patterns added"
        low = made.mean(row, "worst_error")
        return [
            Claim("products are up to 11.1 % low, never more", WORST * 0.98 < low <= WORST + 1e-6, f"{low:.2%}"),
            Claim.near("accuracy is that of exact products", made.gap(row), 3),
        ]


def _product_errors(rule: str) -> dict[str, float]:
    """How far single products are below the exact ones, over all pairs of 256 mantissas."""
    mantissas = 1 + torch.arange(256) / 256
    got = matmul(mantissas.view(-1, 1), mantissas.view(1, -1), accumulate=rule).double()
    low = 1 - got / torch.outer(mantissas.double(), mantissas.double())
    return {"mean_error": float(low.mean()), "worst_error": float(low.max())}
