"""APS beside what the paper compares it with: one factor for the whole loss, and TernGrad. (flex16+5: 16 bits.)"""

from __future__ import annotations

from typing import ClassVar

from narrowcast.simulate import World
from narrowcast_research.reproductions.base import Cell, Claim, Options, Result, RowFigures, RowTable, Work
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


class ApsRivals(RowTable):
    name: ClassVar[str] = "aps-rivals"
    title: ClassVar[str] = "APS beside loss scaling, TernGrad and QSGD on one network (Han et al.)"
    needs: ClassVar[str] = "digits"
    rows: ClassVar = ROWS
    row_heading: ClassVar[str] = "method"
    figures: ClassVar = {"accuracy, %": "accuracy", "bits a value": "bits:.2f"}
    notes: ClassVar = (
        f"{WORKERS} workers, sums in float32; wires: {', '.join(f'{row} {wire}' for row, wire in ROWS.items())}",
    )

    def rows_of(self, options: Options) -> list[str]:
        return [row for row in ROWS if not options.quick or row == "float32" or row.startswith("(4,3)")]

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

    def claims(self, made: RowFigures, options: Options) -> list[Claim]:
        slack, aps = 5.0 if options.quick else 1.0, [row for row in made.rows if row.endswith("APS")]
        scaled = [made.mean(f"(4,3) loss times 2^{power}") for power in FACTORS]
        lost = max(scaled) - min(scaled)
        wrong = Claim("a factor for all has to be chosen: the wrong one costs", lost > 2, f"{lost:.2f} points")
        return [*(Claim.near(f"{row}: as good as float32", made.gap(row), slack) for row in aps), wrong]
