"""Dettmers' 220 transfer timings: a line through half of the sizes, and 8 bits from the 32-bit line and codec rates."""

from __future__ import annotations

from narrowcast_research.validation.metrics import Cell, Result, figures, line
from narrowcast_research.validation.published import rows

SMALLEST = 65_536
"""Parameters; below, the fixed cost of a transfer is most of it."""
COMPRESS, DECOMPRESS = 2.729e-3 / 5120**2, 1.335e-3 / 5120**2
"""Seconds a number, from the raw codec timings of the 5120 x 5120 matrix (the paper's text is ten times too large)."""

COLUMNS = {"t32_ms": "32 bit", "t8_ms_incl_codec": "8 bit", "t1_ms_incl_codec": "1 bit"}


def _points(column: str) -> list[tuple[float, float]]:
    found = [(float(row["params"]), float(row[column]) / 1e3) for row in rows("dettmers_transfer_times.csv")]
    return [point for point in found if point[0] > SMALLEST]


def fitted(column: str) -> tuple[float, float]:
    """Intercept and slope through every second size, each weighted by its relative error."""
    half = _points(column)[::2]
    return line([n for n, _ in half], [t for _, t in half], [t**-2 for _, t in half])


def halves() -> list[Cell]:
    """The sizes that the line has not seen."""
    cells = []
    for column, wire in COLUMNS.items():
        start, slope = fitted(column)
        cells += [Cell((wire, f"{n:.0f}"), t, start + slope * n) for n, t in _points(column)[1::2]]
    return cells


def eight_bits() -> list[Cell]:
    """From the line of 32 bits and the codec's two rates alone: a quarter of the bytes, and the codec."""
    start, slope = fitted("t32_ms")
    rate = slope / 4 + COMPRESS + DECOMPRESS
    return [Cell(("8 bit from 32", f"{n:.0f}"), t, start + rate * n) for n, t in _points("t8_ms_incl_codec")]


def validate() -> Result:
    held, composed = halves(), eight_bits()
    return Result(
        name="transfer",
        title="Dettmers 2016: transfers between two GTX Titans, above 64 k parameters",
        fitted="a line for each wire on every second size, judged on the others; 8 bits composed from the 32-bit line "
        "and the codec's rates at 5120 x 5120, with no 8-bit transfer seen",
        columns=("wire", "parameters"),
        cells=[*held, *composed],
        figures=figures(held),
        extra={"composed": figures(composed)},
        targets={"mape": ("<=", 1.0), "composed/mape": ("<=", 5.0)},
        unit="ms",
        scale=1e3,
    )
