"""What the lines of a study amount to: step times with speedups, accuracies with differences."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from narrowcast.bench.timing import torch_threads
from narrowcast.codecs import codec
from narrowcast.study import statistics as stats
from narrowcast.study.results import Line, ResultsError, latest, read
from narrowcast.study.statistics import Equivalence, Interval

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

DEFAULT_ALGORITHM = "auto"
"""What `attach` takes where nobody says otherwise."""
WITHIN = 0.03
"""Bytes that were counted agree with those that were claimed where they differ by no more."""


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by key, in the order in which keys first appear."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def wire_bits(wire: str) -> float:
    """Bits a value on the wire; a spec that this version does not know counts as 32."""
    try:
        return codec(wire).bits_per_value
    except ValueError:
        return 32.0


def bits_name(wire: str) -> str:
    """`8 bits` for int8/256: the scales are not named."""
    bits = max(1, math.floor(wire_bits(wire) + 1e-9))
    return "float32" if bits == 32 else f"{bits} bit" + "s" * (bits > 1)


def _field(name: str) -> Any:
    return property(lambda case: case.line.get(name))


@dataclass(frozen=True)
class Finding:
    """A case: the axes that every one has."""

    line: Line = field(repr=False)

    kind = _field("kind")
    source = _field("source")
    model = _field("model")
    data = _field("data")
    wire = _field("wire")
    algorithm = _field("algorithm")
    workers = _field("workers")
    rate_name = _field("rate_name")
    transport = _field("transport")
    parallel = _field("parallel")
    cluster = _field("cluster")
    layout = _field("layout")
    error = _field("error")

    @property
    def hosts(self) -> str | None:
        """`2x2` where several workers share a host; None where each has its own."""
        return self.layout if "x" in str(self.layout) else None

    @property
    def rate_bits(self) -> float:
        """Of the link, in bits/s; infinite where it has no limit."""
        rate = self.line.get("rate")
        return math.inf if rate is None else float(rate)

    @property
    def place(self) -> tuple[Any, ...]:
        """Everything but wire and algorithm: within it wires are compared."""
        names = ("source", "cluster", "model", "data", "workers", "layout", "rate_name", "transport", "parallel")
        return tuple(self.line.get(name) for name in names)


@dataclass(frozen=True)
class Step(Finding):
    """A step time, and the speedup over the baseline in the same place."""

    time: Interval
    p95: float | None
    speedup: Interval | None

    @property
    def predicted(self) -> bool:
        return self.line["source"] == "predicted"

    @property
    def faster(self) -> bool | None:
        """None: cannot tell."""
        if self.speedup is None or self.speedup.contains(1.0):
            return None
        return self.speedup.value > 1

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

    @property
    def seeds(self) -> int:
        return len(self.runs)


def _time(line: Line) -> Interval:
    if line["source"] == "predicted":
        low, high = line.get("interval_ms") or (line["step_ms"], line["step_ms"])
        return Interval(line["step_ms"], low, high)
    return stats.median_interval(line["steps_ms"])


def _speedup(base: Line, line: Line, base_time: Interval, time: Interval) -> Interval:
    if "steps_ms" in base and "steps_ms" in line:
        return stats.speedup(base["steps_ms"], line["steps_ms"])
    # two predictions share their errors in part, nobody knows how far: the widest interval
    return Interval(base_time.value / time.value, base_time.low / time.high, base_time.high / time.low)


def _steps_of(place: list[Line], baseline: str) -> list[Step]:
    times = [_time(line) for line in place]
    plain = [i for i, line in enumerate(place) if line["wire"] == baseline]
    # of several algorithms for the baseline the fastest counts: nobody would train with another
    base = min(plain, key=lambda i: times[i].value, default=None)
    found = []
    for line, time in zip(place, times, strict=True):
        gain = None if base is None else _speedup(place[base], line, times[base], time)
        if base is not None and line is place[base]:
            gain = Interval(1.0, 1.0, 1.0)
        p95 = stats.p95(stats.flat(line["steps_ms"])) if "steps_ms" in line else None
        found.append(Step(line, time, p95, gain))
    return found


def _accuracies_of(place: list[Line], baseline: str, margin: float) -> list[Accuracy]:
    found = []
    plain = {line["seed"]: line["accuracy"] for line in place if line["wire"] == baseline}
    for (wire, _), lines in grouped(place, lambda line: (line["wire"], line["algorithm"])).items():
        runs = sorted(lines, key=lambda line: line["seed"])
        pairs = [run["accuracy"] - plain[run["seed"]] for run in runs if run["seed"] in plain]
        difference = stats.equivalence(pairs, margin) if wire != baseline and pairs else None
        mean = stats.mean_interval([run["accuracy"] for run in runs])
        found.append(Accuracy(runs[0], runs, mean, difference))
    return found


@dataclass(frozen=True)
class Findings:
    """A whole study."""

    sessions: list[Line]
    cases: list[Line]

    @classmethod
    def of(cls, folder: Path | str) -> Findings:
        """Read a study's folder; of several lines with one case the last counts."""
        lines = read(folder)
        sessions = [line for line in lines if line["kind"] == "session"]
        if not sessions:
            raise ResultsError(f"{folder}: the results have no session line; run the study again")
        return cls(sessions, list(latest(lines).values()))

    @property
    def session(self) -> Line:
        """The last: a resumed study has several, which must agree in what they ask."""
        return self.sessions[-1]

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
        return [Finding(line) for line in self.cases if line["status"] == "failed"]

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
        models = {(s.model, s.data) for s in self.measured} | {(a.model, a.data) for a in self.accuracies}
        rates = {(s.model, s.data, s.workers, s.rate_name) for s in self.measured}
        forecast = [
            s
            for s in self.steps
            if s.predicted and (s.model, s.data) in models and (s.model, s.data, s.workers, s.rate_name) not in rates
        ]
        return [*self.measured, *forecast]

    @cached_property
    def elsewhere(self) -> list[Step]:
        """Predicted steps of machines and models that were not measured: a grid of its own."""
        here = {id(step.line) for step in self.here}
        models = {(s.model, s.data) for s in self.here}
        return [s for s in self.steps if s.predicted and id(s.line) not in here and (s.model, s.data) not in models]

    @cached_property
    def accuracies(self) -> list[Accuracy]:
        key = ("model", "data", "workers", "layout", "parallel")
        places = grouped(self._done("accuracy"), lambda line: tuple(line.get(name) for name in key))
        return [row for place in places.values() for row in _accuracies_of(place, self.baseline, self.margin)]

    @cached_property
    def buses(self) -> list[Finding]:
        return [Finding(line) for line in self._done("bus")]

    @cached_property
    def wires(self) -> list[str]:
        """All wires: the baseline first, then from many bits to few."""
        found = {str(line["wire"]) for line in self.cases}
        return sorted(found, key=lambda wire: (wire != self.baseline, -wire_bits(wire), wire))

    @cached_property
    def _algorithms(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for line in self.cases:
            if line["kind"] != "bus":
                found[line["wire"]].add(str(line["algorithm"]))
        return found

    def label(self, case: Finding) -> str:
        """The wire; with its algorithm where it is not the usual one and the study ran several."""
        plain = len(self._algorithms[case.wire]) < 2 or case.algorithm == DEFAULT_ALGORITHM
        return str(case.wire) if plain else f"{case.wire} · {case.algorithm}"

    def gaps(self) -> list[Step]:
        """Steps whose counted bytes are further than `WITHIN` from the claimed ones."""
        return [s for s in self.measured if s.bytes_off is not None and abs(s.bytes_off) > WITHIN]
