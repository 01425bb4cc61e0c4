"""One colour, mark and dash for each wire, the same in every figure. The colours themselves are in report.css."""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.study.analysis.findings import Findings
from narrowcast.study.report.markup import Markup, lone, place

COLOURS = 8
DASHES = (None, "7 3", "2 3", "9 3 2 3")
SHAPES = ("circle", "square", "diamond", "up", "down", "cross", "ring", "box")


class Palette:
    """The baseline is ink, the primary wire blue, others follow by their bits; after eight, dashes tell them apart."""

    def __init__(self, findings: Findings) -> None:
        first = [findings.baseline, findings.primary]
        order = [*first, *(wire for wire in findings.wires if wire not in first)]
        self._slots = {wire: slot for slot, wire in enumerate(order)}

    def slot(self, wire: str) -> int:
        return self._slots[wire]

    def colour(self, wire: str) -> str:
        """The class that sets the colour."""
        slot = self.slot(wire)
        return f"w{slot if slot < COLOURS else 1 + (slot - 1) % (COLOURS - 1)}"

    def dash(self, wire: str) -> str | None:
        return DASHES[min(self.slot(wire) // COLOURS, len(DASHES) - 1)]

    def mark(self, wire: str, x: float, y: float, size: float = 3.6) -> Markup:
        return mark(SHAPES[self.slot(wire) % len(SHAPES)], x, y, size)


def _polygon(points: Sequence[tuple[float, float]]) -> Markup:
    return lone("polygon", points=" ".join(f"{place(x)},{place(y)}" for x, y in points), class_="m")


def mark(shape: str, x: float, y: float, r: float) -> Markup:
    """A mark of about the same weight whatever its shape."""
    match shape:
        case "circle":
            return lone("circle", cx=x, cy=y, r=r, class_="m")
        case "ring":
            return lone("circle", cx=x, cy=y, r=r, class_="m o")
        case "square" | "box":
            return lone("rect", x=x - r, y=y - r, width=2 * r, height=2 * r, class_="m o" if shape == "box" else "m")
        case "diamond":
            return _polygon([(x, y - 1.35 * r), (x + 1.35 * r, y), (x, y + 1.35 * r), (x - 1.35 * r, y)])
        case "up":
            return _polygon([(x, y - 1.3 * r), (x + 1.2 * r, y + r), (x - 1.2 * r, y + r)])
        case "down":
            return _polygon([(x, y + 1.3 * r), (x + 1.2 * r, y - r), (x - 1.2 * r, y - r)])
    return lone(
        "path",
        d=f"M{x - r:.1f} {y - r:.1f}l{2 * r:.1f} {2 * r:.1f}m0 {-2 * r:.1f}l{-2 * r:.1f} {2 * r:.1f}",
        class_="x",
    )
