"""FP8-LM (Peng et al. 2023): a factor for gradients that finds its own size, from far too small and far too large."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from narrowcast_research.policies import AutoScale
from narrowcast_research.reproductions.base import Cell, Claim, Options, Result, RowFigures, RowTable, Work
from narrowcast_research.reproductions.short import exchange_run

STARTS = {"too small": 2.0**-6, "too large": 2.0**30}
NEVER = 10**9
RULES = ("adapts", "rule off")
ROWS = ("float32", *(f"{start}, {rule}" for start in STARTS for rule in RULES))


class Fp8Lm(RowTable):
    name: ClassVar[str] = "fp8-lm"
    title: ClassVar[str] = "The automatic scaling factor of FP8-LM, wire e4m3fn"
    needs: ClassVar[str] = "mnist"
    rows: ClassVar = ROWS
    row_heading: ClassVar[str] = "start of the factor"
    figures: ClassVar = {"factor at the end": "factor:g", "accuracy, %": "accuracy"}

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        made: list[AutoScale] = []

        def spec(model: nn.Module, per_epoch: int) -> object:
            start, _, rule = cell["row"].partition(", ")
            if not rule:
                return "as-is"
            # FP8-LM doubles in 1,000 steps of some 100,000; a run of hundreds doubles as much faster
            growth, threshold = (NEVER, 1.0) if rule == "rule off" else (max(per_epoch // 10, 1), 1e-5)
            made.append(AutoScale("e4m3fn", start=STARTS[start], growth=growth, threshold=threshold))
            return made[0]

        result = exchange_run(spec, cell["seed"], options, work, epochs=8 if options.quick else 5)
        if result is not None and made:
            result["factor"] = made[0].factor()
        return result

    def claims(self, made: RowFigures, options: Options) -> list[Claim]:
        claims = []
        for start in STARTS:
            claims.append(Claim.near(f"from {start} the factor recovers", made.gap(f"{start}, adapts"), 4))
            claims.append(
                Claim.lost(f"from {start} without the rule accuracy is lost", made.gap(f"{start}, rule off"), 4)
            )
        return claims
