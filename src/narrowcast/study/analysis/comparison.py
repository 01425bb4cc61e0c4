"""Two studies beside one another: the same cells with their differences, and what is in one of them only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Generic, TypeVar

from narrowcast.study.analysis import formatting
from narrowcast.study.analysis import statistics as stats
from narrowcast.study.analysis.finding import NOTHING, Finding, grouped
from narrowcast.study.analysis.findings import Accuracy, Findings, Step
from narrowcast.study.analysis.statistics import Conclusion, Equivalence, Interval

F = TypeVar("F", bound=Finding)

ANSWERS = ("{b} is faster", "{b} is slower", "It depends on the cell", "Cannot tell")
FALSE_SHARE = 0.025
"""Of cells without a difference so many look faster at 95 %, and as many slower."""
SAME = {
    "time": {"batch": "samples a step", "parameters": "parameters"},
    "accuracy": {"epochs": "epochs", "steps_per_epoch": "steps an epoch"},
    "bus": {},
}
"""What must be alike within a cell, by kind: another amount of work is another question."""


@dataclass(frozen=True)
class Pair(Generic[F]):
    """A cell that both have."""

    a: F
    b: F


@dataclass(frozen=True)
class StepPair(Pair[Step]):
    """`gain`: how many times as fast B is."""

    gain: Interval

    @property
    def faster(self) -> bool | None:
        """B beside A; None: cannot tell."""
        return None if self.gain.contains(1.0) else self.gain.value > 1


@dataclass(frozen=True)
class AccuracyPair(Pair[Accuracy]):
    """`difference`: B less A, seed by seed."""

    difference: Equivalence


@dataclass(frozen=True)
class BusPair(Pair[Finding]):
    """`gain`: how many times as fast B is."""

    gain: Interval


@dataclass(frozen=True)
class Refused(Pair[Finding]):
    """A cell that both have, and that cannot be compared."""

    why: str


def _key(finding: Finding) -> tuple[Any, ...]:
    size = finding.line.get("bytes") if finding.kind == "bus" else None
    # where a training runs is no part of what it finds
    place = finding.place if finding.kind != "accuracy" else finding.place[2:6] + finding.place[8:]
    return (finding.kind, *place, finding.wire, finding.algorithm, size)


def _ratio(a: Step, b: Step) -> Interval:
    """A's time over B's. They were measured apart, so that drift of the machines is in the interval."""
    if "steps_ms" in a.line and "steps_ms" in b.line:
        return stats.speedup(a.line["steps_ms"], b.line["steps_ms"], interleaved=False)
    return Interval(a.time.value / b.time.value, a.time.low / b.time.high, a.time.high / b.time.low)


def _unlike(a: Finding, b: Finding) -> str | None:
    """Why two cases of one cell cannot be compared."""
    if a.untouched or b.untouched:
        return NOTHING
    for name, thing in SAME[a.kind].items():
        ours, theirs = a.line.get(name), b.line.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            return f"{ours:g} {thing} in A, {theirs:g} in B"
    return None


@dataclass(frozen=True)
class Comparison:
    """B beside A."""

    a: Findings
    b: Findings
    steps: Sequence[StepPair]
    accuracies: Sequence[AccuracyPair]
    buses: Sequence[BusPair]
    refused: Sequence[Refused]
    only_a: Sequence[Finding]
    only_b: Sequence[Finding]

    @classmethod
    def of(cls, a: Findings, b: Findings) -> Comparison:
        ours, theirs = (_cells(findings) for findings in (a, b))
        common = [key for key in ours if key in theirs]
        if not common:
            raise ValueError(f"{a.name} and {b.name} have no cell in common: {_axes_words(a)}, {_axes_words(b)}")
        made: dict[type, list[Any]] = {kind: [] for kind in (StepPair, AccuracyPair, BusPair, Refused)}
        for key in common:
            pair = _compare(ours[key], theirs[key], a.margin, b.margin)
            made[type(pair)].append(pair)
        only = [[f for key, f in some.items() if key not in other] for some, other in ((ours, theirs), (theirs, ours))]
        return cls(a, b, made[StepPair], made[AccuracyPair], made[BusPair], made[Refused], *only)

    @property
    def names(self) -> tuple[str, str]:
        """Of the two studies; A and B where they are alike."""
        a, b = (findings.name.replace("|", "/") for findings in (self.a, self.b))
        return (a, b) if a != b else (f"{a} (A)", f"{b} (B)")

    @property
    def counted(self) -> Sequence[StepPair]:
        """What the answer rests on: measured steps; predicted ones where none was measured in both."""
        measured = [pair for pair in self.steps if not pair.a.predicted]
        return measured or self.steps

    @property
    def faster_and_slower(self) -> tuple[int, int]:
        """In how many of them B is faster, and slower, each at 95 %."""
        known = [pair.faster for pair in self.counted]
        return known.count(True), known.count(False)

    @property
    def by_chance(self) -> int:
        """So many of them would look faster, and as many slower, if none differed."""
        return math.ceil(FALSE_SHARE * len(self.counted))

    @property
    def kind(self) -> int:
        """Of ANSWERS: what more cells say than chance would."""
        faster, slower = (number > self.by_chance for number in self.faster_and_slower)
        return 2 if faster and slower else 0 if faster else 1 if slower else 3

    @property
    def answer(self) -> str:
        return ANSWERS[self.kind].format(b=self.names[1])

    @property
    def words(self) -> str:
        """Behind the answer."""
        return " ".join([*self._speed_words(), *self._accuracy_words()])

    @property
    def headline(self) -> str:
        return f"{self.answer}. {self.words}"

    def _speed_words(self) -> list[str]:
        counted = self.counted
        if not counted:
            return ["No step time is in both."]
        faster, slower = self.faster_and_slower
        mean = formatting.ratio(math.exp(fmean(math.log(pair.gain.value) for pair in counted)))
        count = formatting.count(len(counted), f"{'predicted' if counted[0].a.predicted else 'measured'} step time")
        a, b = self.names
        parts = [
            f"Of {count} in both, {b} is {mean} as fast as {a} in the geometric mean:",
            f"faster in {faster}, slower in {slower}, and in {len(counted) - faster - slower} it cannot be told.",
        ]
        return [" ".join(parts)]

    def _accuracy_words(self) -> list[str]:
        conclusions = [pair.difference.conclusion for pair in self.accuracies]
        if not conclusions:
            return []
        kept = sum(kind in (Conclusion.EQUAL, Conclusion.BETTER) for kind in conclusions)
        lost = conclusions.count(Conclusion.LOST)
        return [f"Accuracy is kept in {kept} of {formatting.count(len(conclusions), 'training')}, lost in {lost}."]


def _cells(findings: Findings) -> dict[tuple[Any, ...], Finding]:
    """Of several cases of a cell the last counts, as everywhere."""
    every: Iterable[Finding] = (*findings.steps, *findings.accuracies, *findings.buses)
    return {_key(finding): finding for finding in every}


def _axes_words(findings: Findings) -> str:
    """`quick has mlp, cnn with fp32, int8/256`."""
    every = list(_cells(findings).values())
    models, wires = (list(dict.fromkeys(str(getattr(f, name)) for f in every)) for name in ("model", "wire"))
    return f"{findings.name} has {', '.join(filter(None, models)) or 'nothing'} with {', '.join(wires) or 'no wire'}"


def _compare(a: Finding, b: Finding, margin: float, other_margin: float) -> Pair[Any]:
    why = _unlike(a, b)
    if why is None and isinstance(a, Accuracy) and margin != other_margin:
        why = f"the margins differ: {formatting.margin(margin)} in A, {formatting.margin(other_margin)} in B"
    if why is not None:
        return Refused(a, b, why)
    if isinstance(a, Step) and isinstance(b, Step):
        return StepPair(a, b, _ratio(a, b))
    if isinstance(a, Accuracy) and isinstance(b, Accuracy):
        return _paired(a, b, margin)
    return BusPair(a, b, stats.speedup([a.line["ms"]], [b.line["ms"]], interleaved=False))


def _paired(a: Accuracy, b: Accuracy, margin: float) -> Pair[Any]:
    ours = {run["seed"]: run["accuracy"] for run in a.runs}
    differences = [run["accuracy"] - ours[run["seed"]] for run in b.runs if run["seed"] in ours]
    if not differences:
        return Refused(a, b, "no seed was trained in both")
    return AccuracyPair(a, b, stats.equivalence(differences, margin))


def compared_by(pairs: Sequence[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Pairs that one drawing holds."""
    return list(grouped(pairs, lambda pair: key(pair.a)).values())
