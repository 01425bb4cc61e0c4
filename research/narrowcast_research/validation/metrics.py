"""How good predictions are: errors, order, and whether they would have led to the right decision."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

GOOD_ENOUGH = 0.03
"""A choice is right when it is the best one measured, or within this share of it."""


@dataclass(frozen=True)
class Cell:
    """One measurement and its prediction, with what names it."""

    key: tuple[str, ...]
    measured: float
    predicted: float
    counted: bool = True
    """Shown, but left out of the figures where False."""
    low: float = 0.0
    high: float = 0.0

    @property
    def inside(self) -> bool | None:
        """Whether the measurement lies in the predicted interval, where there is one."""
        return self.low <= self.measured <= self.high if self.high else None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Figures:
    """Relative errors in percent; correlation and decisions as shares, None where there is nothing to order."""

    cells: int
    mape: float
    median: float
    largest: float
    bias: float
    rank: float | None = None
    decisions: float | None = None
    decided: int = 0
    inside: float | None = None
    """The share of cells whose measurement lies in the predicted 5 to 95 % interval, of those that have one."""


@dataclass
class Result:
    """One data set: what was fitted on what, the cells, the figures, and what was to be reached."""

    name: str
    title: str
    fitted: str
    columns: tuple[str, ...]
    cells: list[Cell]
    figures: Figures
    targets: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Figure -> ("<=" or ">=", value)."""
    notes: list[str] = field(default_factory=list)
    unit: str = "s"
    scale: float = 1.0
    extra: dict[str, Figures] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    """Further figures by name."""

    def met(self) -> dict[str, bool]:
        found = {}
        for name, (sign, value) in self.targets.items():
            got = self.value(name)
            found[name] = got is not None and (got <= value if sign == "<=" else got >= value)
        return found

    def value(self, name: str) -> float | None:
        """A figure by its name; "part/mape" for one of the extra parts."""
        if name in self.measures:
            return self.measures[name]
        part, _, figure = name.rpartition("/")
        return getattr(self.extra[part] if part else self.figures, figure)

    def as_dict(self) -> dict[str, Any]:
        cells = [{**vars(cell), "key": list(cell.key), "error": cell.error} for cell in self.cells]
        targets = {
            name: {"sign": sign, "value": value, "met": self.met()[name]}
            for name, (sign, value) in self.targets.items()
        }
        kept = {key: getattr(self, key) for key in ("name", "title", "fitted", "unit", "notes")}
        parts = {name: vars(figures) for name, figures in self.extra.items()}
        return {
            **kept,
            "figures": vars(self.figures),
            "extra": parts,
            "measures": self.measures,
            "targets": targets,
            "cells": cells,
        }


def figures(
    cells: Sequence[Cell],
    case: Callable[[Cell], Hashable] | None = None,
    lower_is_better: bool = True,
) -> Figures:
    """All figures of the counted cells. case: what the cells between which one decides have in common."""
    counted = [cell for cell in cells if cell.counted]
    if not counted:
        return Figures(0, float("nan"), float("nan"), float("nan"), float("nan"))
    errors = [100 * cell.error for cell in counted]
    sizes = [abs(error) for error in errors]
    within = [cell.inside for cell in counted if cell.inside is not None]
    rank, decisions, decided = (None, None, 0) if case is None else order(counted, case, lower_is_better)
    return Figures(
        cells=len(counted),
        mape=statistics.fmean(sizes),
        median=statistics.median(sizes),
        largest=max(sizes),
        bias=statistics.fmean(errors),
        rank=rank,
        decisions=decisions,
        decided=decided,
        inside=statistics.fmean(within) if within else None,
    )


def order(
    cells: Sequence[Cell], case: Callable[[Cell], Hashable], lower_is_better: bool
) -> tuple[float | None, float | None, int]:
    """Kendall's tau within cases, averaged; and the share of cases whose predicted best is good enough."""
    groups: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(case(cell), []).append(cell)
    groups = {key: group for key, group in groups.items() if len(group) > 1}
    if not groups:
        return None, None, 0
    taus = [kendall([c.measured for c in g], [c.predicted for c in g]) for g in groups.values()]
    right = [_right(group, lower_is_better) for group in groups.values()]
    return statistics.fmean(taus), statistics.fmean(right), len(groups)


def _right(group: Sequence[Cell], lower_is_better: bool) -> bool:
    if lower_is_better:
        chosen, best = min(group, key=lambda c: c.predicted).measured, min(c.measured for c in group)
        return chosen <= best * (1 + GOOD_ENOUGH)
    chosen, best = max(group, key=lambda c: c.predicted).measured, max(c.measured for c in group)
    return chosen >= best * (1 - GOOD_ENOUGH)


def kendall(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Kendall's tau-b: pairs in the same order less pairs in the other, ties taken into account."""
    same = other = tied_x = tied_y = 0
    for (x0, y0), (x1, y1) in combinations(list(zip(xs, ys, strict=True)), 2):
        product = (x0 - x1) * (y0 - y1)
        same += product > 0
        other += product < 0
        tied_x += x0 == x1
        tied_y += y0 == y1
    pairs = len(xs) * (len(xs) - 1) // 2
    below = ((pairs - tied_x) * (pairs - tied_y)) ** 0.5
    return (same - other) / below if below else 1.0


def line(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float] | None = None) -> tuple[float, float]:
    """Intercept and slope by weighted least squares."""
    w = list(weights) if weights is not None else [1.0] * len(xs)
    total = sum(w)
    mx = sum(a * x for a, x in zip(w, xs, strict=True)) / total
    my = sum(a * y for a, y in zip(w, ys, strict=True)) / total
    slope = sum(a * (x - mx) * (y - my) for a, x, y in zip(w, xs, ys, strict=True))
    slope /= sum(a * (x - mx) ** 2 for a, x in zip(w, xs, strict=True))
    return my - slope * mx, slope
