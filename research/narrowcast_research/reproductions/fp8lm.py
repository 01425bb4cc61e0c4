"""FP8-LM (Peng et al. 2023): a factor for gradients that finds its own size, from far too small and far too large."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from narrowcast_research.policies import AutoScale
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

STARTS = {"too small": 2.0**-6, "too large": 2.0**30}
NEVER = 10**9


class Fp8Lm(Reproduction):
    name: ClassVar[str] = "fp8-lm"
    title: ClassVar[str] = "The automatic scaling factor of FP8-LM, wire e4m3fn"
    needs: ClassVar[str] = "mnist"

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        runs = ["float32", *(f"{start}, {rule}" for start in STARTS for rule in ("adapts", "rule off"))]
        return [{"row": row, "seed": seed} for seed in range(seeds) for row in runs]

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

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        accuracy, factor = by(found, "row", "accuracy"), by(found, "row", "factor")
        rows = [[row, f"{mean_of(factor, row):g}" if row in factor else "", spread(accuracy[row])] for row in accuracy]
        claims = []
        for start in STARTS:
            gap = mean_of(accuracy, f"{start}, adapts") - mean_of(accuracy, "float32")
            loss = mean_of(accuracy, f"{start}, rule off") - mean_of(accuracy, "float32")
            claims.append(Claim(f"from {start} the factor recovers (within 4 points)", gap > -4, f"{gap:+.2f}"))
            claims.append(Claim(f"from {start} without the rule accuracy is lost", loss < -4, f"{loss:+.2f}"))
        return Report(self.title, ("start of the factor", "factor at the end", "accuracy, %"), rows, claims)
