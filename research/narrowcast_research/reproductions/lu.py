"""Lu et al. 2019: 8-bit posits train when each tensor is moved to where posits are dense, after a warm-up."""

from __future__ import annotations

from typing import ClassVar

from narrowcast.formats import format as format_named
from narrowcast.simulate import Caster, LayerScale
from narrowcast_research.reproductions.base import Cell, Claim, Options, Result, RowFigures, RowTable, Work
from narrowcast_research.reproductions.short import exchange_run

FORMAT = format_named("posit8.1")
SIGMA = 6
"""Moves the centre towards the large values: most gradients are tiny, and it is the few large ones that count."""
ROWS = ("float32", "posit8.1, scaled by layer", "rule off: posit8.1 as it is")


class LuPosit(RowTable):
    name: ClassVar[str] = "lu-posit"
    title: ClassVar[str] = "8-bit posits with a scale for each layer (Lu et al. 2019)"
    needs: ClassVar[str] = "mnist"
    rows: ClassVar = ROWS
    row_heading: ClassVar[str] = "weights, activations, gradients"

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        warmup = 5 if options.quick else 100
        scaled = (
            LayerScale(format=FORMAT, sigma=SIGMA, warmup=warmup) if cell["row"] == ROWS[1] else Caster(format=FORMAT)
        )
        lower = {"weights": scaled, "activations": scaled, "gradients": scaled}
        return exchange_run(
            lambda model, per_epoch: "as-is",
            cell["seed"],
            options,
            work,
            epochs=6 if options.quick else 3,
            workers=1,
            lower=None if cell["row"] == ROWS[0] else lower,
        )

    def claims(self, made: RowFigures, options: Options) -> list[Claim]:
        return [
            Claim.near("with the scale posits come near float32", made.gap(ROWS[1]), 3),
            Claim.lost("without it they do not", made.gap(ROWS[2]), 3),
        ]
