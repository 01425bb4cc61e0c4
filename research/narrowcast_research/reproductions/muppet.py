"""MuPPET (Rajagopal et al. 2020): start in few bits, take more when successive gradients stop differing."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from narrowcast_research.policies import GradientDiversity
from narrowcast_research.reproductions.base import Cell, Claim, Options, Result, RowFigures, RowTable, Work
from narrowcast_research.reproductions.short import exchange_run

LADDER = ("int2", "int4", "int8", "as-is")
"""One scale for each tensor, as in the paper."""
ROWS = ("float32", "the rule", "rule off: int2 for good")


class Muppet(RowTable):
    name: ClassVar[str] = "muppet"
    title: ClassVar[str] = "Precision that climbs with gradient diversity (MuPPET)"
    needs: ClassVar[str] = "mnist"
    rows: ClassVar = ROWS
    row_heading: ClassVar[str] = "run"
    figures: ClassVar = {"accuracy, %": "accuracy", "bits a value": "bits"}

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        made: list[GradientDiversity] = []

        def spec(model: nn.Module, per_epoch: int) -> object:
            if cell["row"] != ROWS[1]:
                return "as-is" if cell["row"] == ROWS[0] else LADDER[0]
            # a quick run has few epochs: the threshold falls as fast as they pass
            made.append(GradientDiversity(LADDER, epoch=per_epoch, window=2, patience=1, decay=0.5))
            return made[0]

        result = exchange_run(spec, cell["seed"], options, work, epochs=12 if options.quick else 20, rate=0.05)
        if result is not None and made:
            result["climbs"] = [[step, rung, value] for step, rung, value in made[0].history]
            result["rung"] = made[0].rung
        return result

    def claims(self, made: RowFigures, options: Options) -> list[Claim]:
        saved, climbed = made.mean(ROWS[1], "bits"), made.mean(ROWS[1], "rung")
        return [
            Claim("the rule takes more bits on its own", climbed >= 1, f"rung {climbed:g}"),
            Claim.near("it ends near float32", made.gap(ROWS[1]), 3),
            Claim.lost("few bits for good end below it", made.gap(ROWS[2], ROWS[1]), 1),
            Claim("most of the bits are saved", saved < 24, f"{saved:.1f} of 32"),
        ]
