"""Gupta et al. 2015: 16-bit fixed point trains with stochastic rounding, and does not with rounding to nearest."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from narrowcast.simulate import optim
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

FORMATS = ("fixed8.8", "fixed6.10", "fixed2.14")
"""Sixteen bits, of which 8, 10 and 14 come after the point."""
ROUNDINGS = ("nearest", "stochastic")


class GuptaFixed(Reproduction):
    """Weights, activations, gradients and updates in fixed point; sums of products are wide, as in the paper."""

    name: ClassVar[str] = "gupta-fixed"
    title: ClassVar[str] = "16-bit fixed point, nearest against stochastic (Gupta et al. 2015)"
    needs: ClassVar[str] = "mnist"

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        formats = FORMATS[:1] if options.quick else FORMATS
        rows = ["float32", *(f"{fmt} {rounding}" for fmt in formats for rounding in ROUNDINGS)]
        return [{"row": row, "seed": seed} for seed in range(seeds) for row in rows]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        fmt, _, rounding = cell["row"].partition(" ")
        plain = fmt == "float32"
        name = f"{fmt}+sr" if rounding == "stochastic" else fmt
        lower = {"weights": name, "activations": name, "gradients": name, "seed": cell["seed"]}
        kept = {} if plain else {"weights": fmt, "update": rounding, "seed": cell["seed"]}
        return exchange_run(
            lambda model, per_epoch: "as-is",
            cell["seed"],
            options,
            work,
            epochs=6 if options.quick else 3,
            batch=100,
            workers=1,
            optimizer=partial(_sgd, precision=kept),
            lower=None if plain else lower,
        )

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        accuracy = by(found, "row", "accuracy")
        rows = [[row, spread(accuracy[row])] for row in accuracy]
        claims, base = [], mean_of(accuracy, "float32")
        for fmt in FORMATS:
            if f"{fmt} stochastic" not in accuracy:
                continue
            near, drawn = (mean_of(accuracy, f"{fmt} {rounding}") for rounding in ROUNDINGS)
            slack = 8.0 if options.quick else 3.0
            claims.append(
                Claim(f"{fmt}: stochastic trains (within {slack:g})", drawn > base - slack, f"{drawn - base:+.2f}")
            )
            if fmt != FORMATS[2]:
                claims.append(Claim(f"{fmt}: nearest falls behind it", near < drawn - 3, f"{near - drawn:+.2f}"))
        note = "the paper: nearest fails where few bits come after the point, stochastic is near float32"
        return Report(self.title, ("numbers", "accuracy, %"), rows, claims, [note])


def _sgd(parameters: list[nn.Parameter], precision: dict[str, Any]) -> torch.optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.5, **precision)
