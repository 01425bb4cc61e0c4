"""What the lines of a study amount to: step times with speedups, accuracies with differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from narrowcast.measure import torch_threads
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis import statistics as stats
from narrowcast.study.analysis.finding import DEFAULT_ALGORITHM, NOTHING, Finding, grouped
from narrowcast.study.analysis.statistics import Conclusion, Equivalence, Interval
from narrowcast.study.execution.results import Line, ResultsError, latest, owners, usable_lines
from narrowcast.study.spec_bits import wire_bits

WITHIN = 0.03
"""Bytes that were counted agree with those that were claimed where they differ by no more."""


@dataclass(frozen=True)
class Step(Finding):
    """A step time, and the speedup over the baseline in the same place."""

    time: Interval
    p95: float | None
    speedup: Interval | None
    base: Line | None = field(repr=False)
    """The baseline that the speedup refers to."""

    @property
    def predicted(self) -> bool:
        return self.line["source"] == "predicted"

    @property
    def faster(self) -> bool | None:
        """None: cannot tell."""
        if self.speedup is None or self.speedup.contains(1.0):
            return None
        return self.speedup.value > 1

    def faster_among(self, settings: int) -> bool:
        """Whether it is faster at a confidence that holds for so many settings together (Bonferroni)."""
        if self.base is None or "steps_ms" not in self.base or "steps_ms" not in self.line:
            # the errors of predictions are shared and not chance: there is nothing to correct
            return self.faster is True
        return _speedup(self.base, self.line, 1 - (1 - stats.CONFIDENCE) / settings).low > 1

    @property
    def apart(self) -> bool:
        """Whether it was measured in another start of ranks than the baseline: not interleaved with it."""
        return self.base is not None and not _interleaved(self.base, self.line)

    @property
    def forecast(self) -> Interval | None:
        """What the predictor said before this was measured."""
        value, between = self.line.get("predicted_ms"), self.line.get("predicted_interval_ms")
        if value is None:
            return None
        low, high = between or (value, value)
        return Interval(value, low, high)

    @property
    def bytes_off(self) -> float | None:
        """Counted bytes against claimed ones with their protocol, as a share: 0.01 is one per cent more."""
        sent = self.line.get("bytes") or {}
        if sent.get("counted") is None or not sent.get("claimed"):
            return None
        return float(sent["counted"] / (sent["claimed"] + (sent.get("protocol") or 0)) - 1)


@dataclass(frozen=True)
class Accuracy(Finding):
    """The trainings of one wire over its seeds, and how they differ from the baseline's, seed by seed."""

    runs: Sequence[Line] = field(repr=False)
    mean: Interval
    difference: Equivalence | None
    """None for the baseline itself, and where it was not trained."""
    failed: Sequence[Line] = field(repr=False)
    """Trainings that ended with nothing to compare: of this wire, or of the baseline."""

    @property
    def seeds(self) -> int:
        return len(self.runs)

    @property
    def conclusion(self) -> Conclusion | None:
        """Seeds that failed may be those that lose: without them nothing can be called kept. None: not compared."""
        if self.difference is None:
            return None
        conclusion = self.difference.conclusion
        return Conclusion.UNKNOWN if self.failed and conclusion is not Conclusion.LOST else conclusion


@dataclass(frozen=True)
class Uncompared(Finding):
    """A wire that has no seed in common with the baseline where it was, or should have been, trained, or compressed
    nothing there."""

    why: str


def _time(line: Line) -> Interval:
    if line["source"] == "predicted":
        low, high = line.get("interval_ms") or (line["step_ms"], line["step_ms"])
        return Interval(line["step_ms"], low, high)
    return stats.median_interval(line["steps_ms"])


def _interleaved(base: Line, line: Line) -> bool:
    """Lines that do not name a start are from before there were any."""
    return bool(base.get("start") == line.get("start"))


def _speedup(base: Line, line: Line, confidence: float = stats.CONFIDENCE) -> Interval:
    if "steps_ms" in base and "steps_ms" in line:
        together = _interleaved(base, line)
        return stats.speedup(base["steps_ms"], line["steps_ms"], interleaved=together, confidence=confidence)
    # two predictions share their errors in part, nobody knows how far: the widest interval
    slow, quick = _time(base), _time(line)
    return Interval(slow.value / quick.value, slow.low / quick.high, slow.high / quick.low)


def _steps_of(place: list[Line], baseline: str) -> list[Step]:
    times = [_time(line) for line in place]
    plain = [(time.value, line) for time, line in zip(times, place, strict=True) if line["wire"] == baseline]
    # of several algorithms for the baseline the fastest counts: nobody would train with another
    _, fastest = min(plain, key=lambda pair: pair[0], default=(None, None))
    steps = []
    for line, time in zip(place, times, strict=True):
        # where nothing was compressed a ratio would be noise that looks like a finding
        base = None if fastest is None or _untouched(line, fastest) else fastest
        gain = None if base is None else Interval(1.0, 1.0, 1.0) if line is base else _speedup(base, line)
        p95 = stats.p95(stats.flat(line["steps_ms"])) if "steps_ms" in line else None
        steps.append(Step(line, time, p95, gain, base))
    return steps


def _untouched(*lines: Line) -> bool:
    return any(Finding(line).untouched for line in lines)


def _failed(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line["status"] == "failed"]


def _done_with(place: Iterable[Line], wire: str) -> list[Line]:
    return [line for line in place if line["wire"] == wire and line["status"] == "done"]


def _by_seed(place: Iterable[Line], wire: str) -> dict[int, float]:
    return {line["seed"]: line["accuracy"] for line in _done_with(place, wire)}


def _by_wire(place: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    return grouped(place, lambda line: (line["wire"], line["algorithm"]))


def _accuracies_of(place: list[Line], baseline: str, margin: float) -> list[Accuracy]:
    accuracies = []
    plain, plainly = _by_seed(place, baseline), _done_with(place, baseline)
    without = [line for line in _failed(place) if line["wire"] == baseline and line.get("seed") not in plain]
    for (wire, _), lines in _by_wire(place).items():
        runs = sorted((line for line in lines if line["status"] == "done"), key=lambda line: line["seed"])
        if not runs:
            continue
        pairs = [run["accuracy"] - plain[run["seed"]] for run in runs if run["seed"] in plain]
        compared = wire != baseline and pairs and not _untouched(runs[0], *plainly)
        difference = stats.equivalence(pairs, margin) if compared else None
        mean = stats.mean_interval([run["accuracy"] for run in runs])
        failed = [*_failed(lines), *(without if wire != baseline else [])]
        accuracies.append(Accuracy(runs[0], runs, mean, difference, failed))
    return accuracies


def _why(failed: Sequence[Line], wire: str, baseline: str) -> str:
    if failed:
        return f"{formatting.count(len(failed), 'training')} with {failed[0]['wire']} failed"
    return f"no seed was trained with both {wire} and {baseline}"


def _uncompared_of(place: list[Line], baseline: str, primary: str) -> list[Uncompared]:
    plain, rows = _by_seed(place, baseline), []
    wires = _by_wire(place)
    if plain and primary not in {wire for wire, _ in wires}:
        # the study's question is asked wherever the baseline was trained
        wires[primary, DEFAULT_ALGORITHM] = []
    for (wire, algorithm), lines in wires.items():
        done = [line for line in lines if line["status"] == "done"]
        if wire != baseline and done and _untouched(done[0], *_done_with(place, baseline)):
            rows.append(Uncompared(done[0], NOTHING))
            continue
        if wire == baseline or any(line["seed"] in plain for line in done):
            continue
        line = {**place[0], "wire": wire, "algorithm": algorithm, "compressed": None}
        failed = _failed(lines) or _failed(line for line in place if line["wire"] == baseline)
        rows.append(Uncompared(line, _why(failed, wire, baseline)))
    return rows


@dataclass(frozen=True)
class Findings:
    """A whole study."""

    sessions: list[Line]
    cases: list[Line]
    owners: dict[str, int] = field(default_factory=dict)
    """Which of the sessions each case comes from; without an entry the last."""

    @classmethod
    def of(cls, folder: Path | str) -> Findings:
        """Read a study's folder; of several lines with one case the last counts."""
        lines = usable_lines(folder)
        sessions = [line for line in lines if line["kind"] == "session"]
        if not sessions:
            raise ResultsError(f"{folder}: the results have no session line; run the study again")
        return cls(sessions, list(latest(lines).values()), owners(lines))

    @property
    def session(self) -> Line:
        """The last: a resumed study has several, which must agree in what they ask."""
        return self.sessions[-1]

    def cases_by(self, name: Callable[[Line], str]) -> dict[str, int]:
        """How many cases come from sessions of each name, such as a commit."""
        counts = {name(session): 0 for session in self.sessions}
        for case in self.cases:
            counts[name(self.sessions[self.owners.get(case["case"], -1)])] += 1
        return counts

    @property
    def name(self) -> str:
        return str(self.session["study"])

    @property
    def margin(self) -> float:
        return float(self.session["margin"])

    @property
    def primary(self) -> str:
        return str(self.session["primary"])

    @property
    def baseline(self) -> str:
        return str(self.session["baseline"])

    @cached_property
    def failures(self) -> list[Finding]:
        return [Finding(line) for line in _failed(self.cases)]

    @cached_property
    def untouched(self) -> list[Finding]:
        """Steps and trainings with a wire that is meant to compress and compressed nothing."""
        return [finding for finding in (*self.steps, *self.accuracies) if finding.untouched]

    def _done(self, kind: str) -> list[Line]:
        return [line for line in self.cases if line["kind"] == kind and line["status"] == "done"]

    @cached_property
    def steps(self) -> list[Step]:
        places = grouped(self._done("time"), lambda line: Finding(line).place)
        # the draws are small: several threads would spend their time waiting for one another
        with torch_threads(1):
            return [step for place in places.values() for step in _steps_of(place, self.baseline)]

    @cached_property
    def measured(self) -> list[Step]:
        return [step for step in self.steps if not step.predicted]

    @cached_property
    def here(self) -> list[Step]:
        """Measured steps, and predicted ones of what was trained or timed here and at rates that were not measured."""
        models = {(s.model, s.data) for s in (*self.measured, *self.accuracies)}
        rates = {(s.model, s.data, s.workers, s.rate_name) for s in self.measured}
        forecast = [s for s in self.steps if s.predicted and (s.model, s.data) in models]
        return [*self.measured, *(s for s in forecast if (s.model, s.data, s.workers, s.rate_name) not in rates)]

    @cached_property
    def elsewhere(self) -> list[Step]:
        """Predicted steps of machines and models that were not measured: a grid of its own."""
        here = {id(step.line) for step in self.here}
        models = {(s.model, s.data) for s in self.here}
        return [s for s in self.steps if s.predicted and id(s.line) not in here and (s.model, s.data) not in models]

    @cached_property
    def _trained(self) -> list[list[Line]]:
        """Trainings that may be compared, done and failed."""
        lines = [line for line in self.cases if line["kind"] == "accuracy"]
        return list(grouped(lines, lambda line: Finding(line).place).values())

    @cached_property
    def accuracies(self) -> list[Accuracy]:
        return [row for place in self._trained for row in _accuracies_of(place, self.baseline, self.margin)]

    @cached_property
    def uncompared(self) -> list[Uncompared]:
        return [row for place in self._trained for row in _uncompared_of(place, self.baseline, self.primary)]

    @cached_property
    def buses(self) -> list[Finding]:
        return [Finding(line) for line in self._done("bus")]

    @cached_property
    def wires(self) -> list[str]:
        """All wires: the baseline first, then from many bits to few."""
        specs = {str(line["wire"]) for line in self.cases}
        return sorted(specs, key=lambda wire: (wire != self.baseline, -wire_bits(wire), wire))

    @cached_property
    def _ways(self) -> Counter[str]:
        """With how many algorithms each wire was run."""
        return Counter(wire for wire, _ in _by_wire(line for line in self.cases if line["kind"] != "bus"))

    def label(self, case: Finding) -> str:
        """The wire; with its algorithm where it is not the usual one and the study ran several."""
        plain = self._ways[case.wire] < 2 or case.algorithm == DEFAULT_ALGORITHM
        return str(case.wire) if plain else f"{case.wire} · {case.algorithm}"
