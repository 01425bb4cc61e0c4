"""Lee et al. 2023: the largest tensors in few bits, and back to more where they overflow."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from narrowcast_research.policies import Assignment
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

ROWS = ("float32", "promotes on overflow", "rule off: never promotes")
LOW, SHARE = "e4m3fn@1e-6", 0.9
"""Holds up to 0.000448: less than what the larger gradients need."""


class LeeAssignment(Reproduction):
    name: ClassVar[str] = "lee-assignment"
    title: ClassVar[str] = "Precision by tensor, largest first, promoted on overflow (Lee et al. 2023)"
    needs: ClassVar[str] = "mnist"

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        return [{"row": row, "seed": seed} for seed in range(seeds) for row in ROWS]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        made: list[Assignment] = []

        def spec(model: nn.Module, _: int) -> object:
            if cell["row"] == ROWS[0]:
                return "as-is"
            made.append(Assignment(model, low=LOW, high="bf16", share=SHARE, promote=cell["row"] == ROWS[1]))
            return made[0]

        result = exchange_run(spec, cell["seed"], options, work, epochs=5 if options.quick else 3)
        if result is not None and made:
            result["demoted"], result["promoted"] = sorted(made[0].demoted), dict(made[0].promoted)
            result["promotions"] = len(made[0].promoted)
        return result

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        accuracy, bits, promoted = (by(found, "row", key) for key in ("accuracy", "bits", "promotions"))
        rows = [[row, spread(accuracy[row]), spread(bits[row]), spread(promoted.get(row, []))] for row in accuracy]
        gap = mean_of(accuracy, ROWS[1]) - mean_of(accuracy, ROWS[0])
        loss = mean_of(accuracy, ROWS[2]) - mean_of(accuracy, ROWS[0])
        count = mean_of(promoted, ROWS[1])
        claims = [
            Claim("tensors that overflow are promoted", count >= 1, f"{count:g}"),
            Claim("with promotion accuracy is float32's (within 2 points)", gap > -2, f"{gap:+.2f}"),
            Claim("without it accuracy is lost", loss < -3, f"{loss:+.2f}"),
        ]
        return Report(self.title, ("run", "accuracy, %", "bits a value", "promoted tensors"), rows, claims)
