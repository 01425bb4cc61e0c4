"""APS beside what the paper compares it with: one factor for the whole loss, and TernGrad. (flex16+5: 16 bits.)"""

from __future__ import annotations

from typing import ClassVar

from narrowcast.simulate import World
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

WORKERS = 8
FACTORS = (0, 6, 12)
"""Powers of two that the loss is multiplied by, for all tensors alike."""
ROWS = {
    "float32": "as-is",
    "(5,2) APS": "e5m2+aps",
    "(4,3) APS": "e4m3+aps",
    **{f"(4,3) loss times 2^{power}": f"e4m3@{2.0**-power!r}+cpd" for power in FACTORS},
    "TernGrad": "ternary/512",
    "QSGD, 8 bits": "qsgd8/512",
}
"""The wire of each. value = scale x code, so a loss times f is a scale of 1 / f; CPD's cast overflows to Inf."""


class ApsRivals(Reproduction):
    name: ClassVar[str] = "aps-rivals"
    title: ClassVar[str] = "APS beside loss scaling, TernGrad and QSGD on one network (Han et al.)"
    needs: ClassVar[str] = "digits"

    def cells(self, options: Options) -> list[Cell]:
        seeds = 1 if options.quick else options.seeds
        rows = [row for row in ROWS if not options.quick or row == "float32" or row.startswith("(4,3)")]
        return [{"row": row, "seed": seed} for seed in range(seeds) for row in rows]

    def run(self, cell: Cell, options: Options, work: Work) -> Result | None:
        spec = ROWS[cell["row"]]
        return exchange_run(
            lambda model, per_epoch: spec,
            cell["seed"],
            options,
            work,
            epochs=4 if options.quick else 20,
            data="digits",
            world=World(WORKERS, "two_shot", seed=cell["seed"]),
        )

    def report(self, found: list[tuple[Cell, Result]], options: Options) -> Report:
        accuracy, bits = by(found, "row", "accuracy"), by(found, "row", "bits")
        rows = [[row, f"`{ROWS[row]}`", spread(accuracy[row]), f"{mean_of(bits, row):.2f}"] for row in accuracy]
        slack = 5.0 if options.quick else 1.0
        claims = []
        for row in (row for row in accuracy if row.endswith("APS")):
            gap = mean_of(accuracy, row) - mean_of(accuracy, "float32")
            claims.append(Claim(f"{row}: as good as float32 (within {slack:g})", gap > -slack, f"{gap:+.2f}"))
        scaled = [mean_of(accuracy, f"(4,3) loss times 2^{power}") for power in FACTORS]
        lost = max(scaled) - min(scaled)
        claims.append(Claim("a factor for all has to be chosen: the wrong one costs", lost > 2, f"{lost:.2f} points"))
        columns = ("method", "wire", "accuracy, %", "bits a value")
        return Report(self.title, columns, rows, claims, [f"{WORKERS} workers, sums in float32"])
