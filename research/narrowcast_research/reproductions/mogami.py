"""Mogami 2020: every multiplication of a training replaced by an addition of bit patterns."""

from __future__ import annotations

from typing import ClassVar

import torch

from narrowcast.simulate import matmul
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

RULES = {"float32": "fp32", "bit patterns added": "fp32+mogami"}
WORST = 1 / 9
"""Mitchell's bound: 11.1 % low, where both mantissas are one half."""


class Mogami(Reproduction):
    name: ClassVar[str] = "mogami"
    title: ClassVar[str] = "Training without multiplications (Mogami 2020)"
    needs: ClassVar[str] = "mnist"

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        return [{"row": row, "seed": seed} for seed in range(seeds) for row in RULES]

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

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        accuracy, mean, worst = (by(found, "row", key) for key in ("accuracy", "mean_error", "worst_error"))
        rows = [[r, spread(accuracy[r]), f"{100 * mean[r][0]:.2f}", f"{100 * worst[r][0]:.2f}"] for r in accuracy]
        row = "bit patterns added"
        gap, low = mean_of(accuracy, row) - mean_of(accuracy, "float32"), mean_of(worst, row)
        claims = [
            Claim(
                "products are up to 11.1 % low, never more", WORST * 0.98 < low <= WORST + 1e-6, f"{100 * low:.2f} %"
            ),
            Claim("accuracy is that of exact products (within 3 points)", gap > -3, f"{gap:+.2f}"),
        ]
        columns = ("products", "accuracy, %", "products too low by, mean %", "at most %")
        return Report(self.title, columns, rows, claims)


def _product_errors(rule: str) -> dict[str, float]:
    """How far single products are below the exact ones, over all pairs of 256 mantissas."""
    mantissas = 1 + torch.arange(256) / 256
    got = matmul(mantissas.view(-1, 1), mantissas.view(1, -1), accumulate=rule).double()
    low = 1 - got / torch.outer(mantissas.double(), mantissas.double())
    return {"mean_error": float(low.mean()), "worst_error": float(low.max())}
