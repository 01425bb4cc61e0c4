"""Lee et al. 2023: the largest tensors in few bits, and back to more where they overflow."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from narrowcast_research.policies import Assignment
from narrowcast_research.reproductions.base import Cell, Claim, Options, Result, RowFigures, RowTable, Work
from narrowcast_research.reproductions.short import exchange_run

ROWS = ("float32", "promotes on overflow", "rule off: never promotes")
LOW, SHARE = "e4m3fn@1e-6", 0.9
"""Holds up to 0.000448: less than what the larger gradients need."""


class LeeAssignment(RowTable):
    name: ClassVar[str] = "lee-assignment"
    title: ClassVar[str] = "Precision by tensor, largest first, promoted on overflow (Lee et al. 2023)"
    needs: ClassVar[str] = "mnist"
    rows: ClassVar = ROWS
    row_heading: ClassVar[str] = "run"
    figures: ClassVar = {"accuracy, %": "accuracy", "bits a value": "bits", "promoted tensors": "promotions"}

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

    def claims(self, made: RowFigures, options: Options) -> list[Claim]:
        count = made.mean(ROWS[1], "promotions")
        return [
            Claim("tensors that overflow are promoted", count >= 1, f"{count:g}"),
            Claim.near("with promotion accuracy is float32's", made.gap(ROWS[1]), 2),
            Claim.lost("without it accuracy is lost", made.gap(ROWS[2]), 3),
        ]
