"""MuPPET (Rajagopal et al. 2020): start in few bits, take more when successive gradients stop differing."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from narrowcast_research.policies import GradientDiversity
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

LADDER = ("int2", "int4", "int8", "as-is")
"""One scale for each tensor, as in the paper."""
ROWS = ("float32", "the rule", "rule off: int2 for good")


class Muppet(Reproduction):
    name: ClassVar[str] = "muppet"
    title: ClassVar[str] = "Precision that climbs with gradient diversity (MuPPET)"
    needs: ClassVar[str] = "mnist"

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        return [{"row": row, "seed": seed} for seed in range(seeds) for row in ROWS]

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

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        accuracy, bits, rung = (by(found, "row", key) for key in ("accuracy", "bits", "rung"))
        rows = [[row, spread(accuracy[row]), spread(bits[row])] for row in ROWS if row in accuracy]
        gap = mean_of(accuracy, ROWS[1]) - mean_of(accuracy, ROWS[0])
        gain = mean_of(accuracy, ROWS[1]) - mean_of(accuracy, ROWS[2])
        saved, climbed = mean_of(bits, ROWS[1]), mean_of(rung, ROWS[1])
        claims = [
            Claim("the rule takes more bits on its own", climbed >= 1, f"rung {climbed:g}"),
            Claim("it ends near float32 (within 3 points)", gap > -3, f"{gap:+.2f}"),
            Claim("it ends above few bits for good", gain > 1, f"{gain:+.2f}"),
            Claim("most of the bits are saved", saved < 24, f"{saved:.1f} of 32"),
        ]
        return Report(self.title, ("run", "accuracy, %", "bits a value"), rows, claims)
