"""What every figure needs: the findings, the palette, and names for settings that leave out what never changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from narrowcast.figures import LINE, Markup, Plot, join, mark, spread, tag, text, text_width
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import Finding
from narrowcast.study.analysis.findings import Findings, Step

F = TypeVar("F", bound=Finding)

COLOURS = 8
DASHES = (None, "7 3", "2 3", "9 3 2 3")
SHAPES = ("circle", "square", "diamond", "up", "down", "cross", "ring", "box")

GAP = 9.0
"""From the end of a line to its label."""


class Palette:
    """One colour, mark and dash for each wire, the same in every figure; the colours themselves are in report.css.

    The baseline is ink, the primary wire blue, others follow by their bits; after eight, dashes tell them apart.
    """

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


@dataclass(frozen=True)
class Context:
    """A study, on its way to paper."""

    findings: Findings

    @cached_property
    def palette(self) -> Palette:
        return Palette(self.findings)

    @cached_property
    def _kinds(self) -> dict[str, set[Any]]:
        """The values of axes that are told only where there are several."""
        timed = [*self.findings.here, *self.findings.buses]
        timed = timed or [*self.findings.accuracies]
        return {name: {getattr(f, name) for f in timed} for name in ("transport", "hosts", "parallel", "min_values")}

    def _if_several(self, finding: Finding, name: str) -> Any:
        return getattr(finding, name) if len(self._kinds[name]) > 1 else None

    def label(self, finding: Finding) -> str:
        return self.findings.label(finding)

    def setting(self, finding: Finding, *names: str) -> str:
        """`alexnet · cifar10 · 4 workers`: of the axes that are named, and the transport where there are several."""
        write: dict[str, Callable[[Any], str]] = {
            "workers": lambda n: formatting.count(n, "worker"),
            "rate_name": formatting.rate,
            "hosts": lambda layout: f"{layout} (hosts × ranks)",
        }
        values = [(name, getattr(finding, name)) for name in names]
        parts = [write.get(name, str)(value) for name, value in values if value is not None]
        if finding.kind == "time" and not finding.cluster and (transport := self._if_several(finding, "transport")):
            parts.append(str(transport))
        if finding.parallel == "model":
            parts.append("model parallel")
        if finding.kind != "bus" and (least := self._if_several(finding, "min_values")) is not None:
            parts.append(f"min_values {least}")
        return " · ".join(parts)

    def link(self, finding: Finding) -> str:
        """In a sentence: `with 4 workers at 1 Gb/s over MPI on 2x2 hosts`; what never changes is left out."""
        parts = ["with", formatting.count(finding.workers, "worker"), formatting.at_rate(finding.rate_name)]
        if transport := self._if_several(finding, "transport"):
            parts.append(f"over {formatting.primitive(transport)}")
        if hosts := self._if_several(finding, "hosts"):
            parts.append(f"on {hosts} hosts")
        if self._if_several(finding, "parallel") == "model":
            parts.append("(model parallel)")
        return " ".join(parts)

    def where(self, step: Step) -> str:
        """In a sentence: `alexnet with 4 workers at 1 Gb/s`."""
        return f"{step.model} {self.link(step)}"

    def coloured(self, finding: Finding, *parts: Markup, hide: Sequence[str] = ("wire",)) -> Markup:
        """A group of marks in the colour of its wire, hidden with it."""
        hidden = {f"data_{name}": finding.line.get(name) for name in hide}
        return tag("g", *parts, class_=self.palette.colour(finding.wire), **hidden)

    def end_labels(self, plot: Plot, ends: Sequence[tuple[Finding, float]]) -> list[Markup]:
        """The names of lines at their right ends, none over another. `ends` has the height of each."""
        heights = spread([y for _, y in ends], LINE, plot.y.end + 4, plot.y.begin)
        return [
            text(plot.x.end + GAP, height + 4, self.label(finding), "start", "n")
            for (finding, _), height in zip(ends, heights, strict=True)
        ]

    def label_room(self, findings: Sequence[Finding]) -> float:
        return GAP + 4 + max((text_width(self.label(finding)) for finding in findings), default=0.0)

    def by_wire(self, findings: Sequence[F]) -> list[F]:
        """In the order of all wires."""
        return sorted(findings, key=lambda finding: (self.findings.wires.index(finding.wire), str(finding.algorithm)))

    def legend(self, findings: Sequence[Finding]) -> Markup:
        """Marks and names of all wires that a figure shows."""
        by_label = {self.label(finding): finding for finding in self.by_wire(findings)}
        items = [
            tag("li", self._key(finding), name, class_=self.palette.colour(finding.wire), data_wire=finding.wire)
            for name, finding in by_label.items()
        ]
        return tag("ul", *items, class_="legend", aria_label="Wires")

    def _key(self, finding: Finding) -> Markup:
        picture = join([self.palette.mark(finding.wire, 7, 7)])
        return tag("svg", picture, viewBox="0 0 14 14", width="14", height="14", aria_hidden="true")
