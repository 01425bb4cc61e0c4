"""Gupta et al. 2015: 16-bit fixed point trains with stochastic rounding, and does not with rounding to nearest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from narrowcast.simulate import optim
from narrowcast_research.reproductions.base import Cell, Claim, Options, Result, RowFigures, RowTable, Work
from narrowcast_research.reproductions.short import exchange_run

FORMATS = ("fixed8.8", "fixed6.10", "fixed2.14")
"""Sixteen bits, of which 8, 10 and 14 come after the point."""
ROUNDINGS = ("nearest", "stochastic")
ROWS = ("float32", *(f"{fmt} {rounding}" for fmt in FORMATS for rounding in ROUNDINGS))


class GuptaFixed(RowTable):
    """Weights, activations, gradients and updates in fixed point; sums of products are wide, as in the paper."""

    name: ClassVar[str] = "gupta-fixed"
    title: ClassVar[str] = "16-bit fixed point, nearest against stochastic (Gupta et al. 2015)"
    needs: ClassVar[str] = "mnist"
    rows: ClassVar = ROWS
    row_heading: ClassVar[str] = "numbers"
    notes: ClassVar = ("the paper: nearest fails where few bits come after the point, stochastic is near float32",)

    def rows_of(self, options: Options) -> Sequence[str]:
        return ROWS[: 1 + len(ROUNDINGS)] if options.quick else ROWS

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

    def claims(self, made: RowFigures, options: Options) -> list[Claim]:
        claims, slack = [], 8.0 if options.quick else 3.0
        for fmt in [fmt for fmt in FORMATS if f"{fmt} stochastic" in made.rows]:
            near, drawn = (f"{fmt} {rounding}" for rounding in ROUNDINGS)
            claims.append(Claim.near(f"{fmt}: stochastic trains", made.gap(drawn), slack))
            if fmt != FORMATS[2]:
                claims.append(Claim.lost(f"{fmt}: nearest falls behind it", made.gap(near, drawn), 3))
        return claims


def _sgd(parameters: list[nn.Parameter], precision: dict[str, Any]) -> torch.optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.5, **precision)
