"""Lu et al. 2019: 8-bit posits train when each tensor is moved to where posits are dense, after a warm-up."""

from __future__ import annotations

from typing import ClassVar

from narrowcast.formats import format as format_named
from narrowcast.simulate import Caster, LayerScale
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

FORMAT = format_named("posit8.1")
SIGMA = 6
"""Moves the centre towards the large values: most gradients are tiny, and it is the few large ones that count."""
ROWS = ("float32", "posit8.1, scaled by layer", "rule off: posit8.1 as it is")


class LuPosit(Reproduction):
    name: ClassVar[str] = "lu-posit"
    title: ClassVar[str] = "8-bit posits with a scale for each layer (Lu et al. 2019)"
    needs: ClassVar[str] = "mnist"

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        return [{"row": row, "seed": seed} for seed in range(seeds) for row in ROWS]

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

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        accuracy = by(found, "row", "accuracy")
        rows = [[row, spread(accuracy[row])] for row in accuracy]
        gap = mean_of(accuracy, ROWS[1]) - mean_of(accuracy, ROWS[0])
        loss = mean_of(accuracy, ROWS[2]) - mean_of(accuracy, ROWS[0])
        claims = [
            Claim("with the scale posits come near float32 (within 3 points)", gap > -3, f"{gap:+.2f}"),
            Claim("without it they do not", loss < -3, f"{loss:+.2f}"),
        ]
        return Report(self.title, ("weights, activations, gradients", "accuracy, %"), rows, claims)
