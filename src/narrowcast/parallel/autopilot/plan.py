"""From measurements to a plan: which road and which wires make the shortest step that loses little enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from narrowcast.codecs import Codec
from narrowcast.parallel.autopilot import errors as rule
from narrowcast.parallel.autopilot.errors import TensorErrors
from narrowcast.parallel.autopilot.history import SIXTEEN
from narrowcast.parallel.autopilot.solve import Problem, solve
from narrowcast.parallel.autopilot.times import HALF, PLAIN, WIRES, Fit, Layout
from narrowcast.parallel.policy import AS_IS, TensorInfo


@dataclass(frozen=True)
class StepPlan:
    """A road, and by tensor the wires of those that do not travel as they are."""

    road: str = PLAIN
    wires: tuple[tuple[str, str], ...] = ()

    @property
    def keys(self) -> frozenset[str]:
        """What it is made of, by which its speed is known."""
        return frozenset(wire for _, wire in self.wires) if self.road == WIRES else frozenset([self.road])

    def __str__(self) -> str:
        if self.road != WIRES:
            return {PLAIN: "as it is", HALF: "the backend's 16 bits"}[self.road]
        counts: dict[str, int] = {}
        for _, wire in self.wires:
            counts[wire] = counts.get(wire, 0) + 1
        return ", ".join(f"{wire} for {count}" for wire, count in sorted(counts.items(), key=lambda one: -one[1]))


@dataclass(frozen=True)
class Costed:
    """A plan with its step and the seconds of its calls, as predicted, and its counted error."""

    plan: StepPlan
    step: float
    busy: float
    error: float


@dataclass
class Measurements:
    """All that a decision is made from, the same on every rank."""

    codecs: Sequence[Codec]
    """The first leaves values as they are."""
    bound: float = rule.BOUND
    errors: dict[str, TensorErrors] = field(default_factory=dict)
    fits: dict[str, Fit] = field(default_factory=dict)
    layout: Layout = field(default_factory=lambda: Layout((), (), ()))
    factors: dict[str, float] = field(default_factory=dict)
    """How much longer than its fit the calls of a road or wire took beside compute."""
    common: float = 1.0
    """The same for those that were not seen yet."""
    per_bit: float = 0.0
    """Seconds of a value and bit in the backend's own sum, as it was last seen in training: short sums fit into the
    buffers on the way, and would make few bits look quicker than the link is."""
    drag: float = 1.0
    """How much longer steps with wires took than their calls explain: codecs take processors from computing."""
    width: float = 32.0
    """Bits of a value as it is."""
    together: bool = False
    shares: bool = True
    """As of the road."""
    cooled: frozenset[str] = frozenset()
    """Tensors that may not have fewer than 16 bits now."""

    def limit(self) -> float:
        """Of the counted error of all tensors."""
        known = self.errors.values()
        return rule.allowed(sum(one.energy for one in known), sum(one.noise for one in known), self.bound)

    def error_of(self, name: str, number: int) -> float:
        """Of a tensor with a codec, infinite where it may not have it."""
        codec, known = self.codecs[number], self.errors.get(name)
        if codec == AS_IS:
            return 0.0
        if known is None or (name in self.cooled and codec.bits_per_value < 16):
            return math.inf
        error = rule.counted(codec, known.lost[number])
        return error if error <= rule.CAP * rule.allowed(known.energy, known.noise, self.bound) else math.inf

    def wire_fit(self, codec: Codec) -> Fit:
        """Of a codec in training. One that was not seen there yet: its bits take what bits took there, and what a short
        sum took beyond its bits, the codec, is as much slower as calls were where they share the processors.
        """
        key, fit = str(codec), self.fits.get(str(codec), Fit(0.0, 0.0))
        if key in self.factors or PLAIN not in self.fits or not self.per_bit:
            slower = self.slower(key)
            return Fit(fit.latency * slower, fit.per_value * slower)
        bits, slower = min(self.width, codec.bits_per_value), self.common if self.shares else 1.0
        own = max(0.0, fit.per_value - self.fits[PLAIN].per_value * bits / self.width)
        return Fit(fit.latency * slower, bits * self.per_bit + own * slower)

    def slower(self, key: str) -> float:
        unseen = self.factors.get(PLAIN, self.common) if key == HALF else self.common
        return self.factors.get(key, unseen)

    def seconds(self, road: str) -> Costed:
        """Of a road that takes all alike."""
        fit, slower = self.fits[road], self.slower(road)
        services = [fit(values) * slower for values in self.layout.values]
        sixteen = [n for n, codec in enumerate(self.codecs) if str(codec) == SIXTEEN]
        error = sum(self.error_of(name, sixteen[0]) for name in self.errors) if road == HALF and sixteen else 0.0
        return Costed(StepPlan(road), self._problem(()).finish(services), sum(services), error)

    def _problem(self, tensors: Sequence[TensorInfo]) -> Problem:
        numbers = {info.name: number for number, info in enumerate(tensors)}
        buckets = tuple(tuple(numbers[n] for n in names if n in numbers) for names in self.layout.buckets)
        fits = [self.wire_fit(codec) for codec in self.codecs]
        values = zip(self.layout.values, buckets, strict=True)
        rest = [total - sum(tensors[t].numel for t in members) for total, members in values]
        return Problem(
            ready=self.layout.ready,
            buckets=buckets,
            seconds=tuple(tuple(info.numel * fit.per_value for fit in fits) for info in tensors),
            errors=tuple(tuple(self._wire_error(info, n) for n in range(len(self.codecs))) for info in tensors),
            latency=tuple(fit.latency for fit in fits),
            bound=self.limit(),
            fixed=tuple(values * fits[0].per_value for values in rest),
            together=self.together,
        )

    def _wire_error(self, info: TensorInfo, number: int) -> float:
        codec = self.codecs[number]
        # a matrix that low rank does not suit would travel by another wire, which is a candidate of its own
        return math.inf if codec.for_shape(info.sent_shape)[0] != codec else self.error_of(info.name, number)

    def by_wires(self, tensors: Sequence[TensorInfo]) -> Costed:
        """The best wires for these tensors."""
        problem = self._problem(tensors)
        found = solve(problem)
        return self._costed(problem, tensors, found.choice)

    def cost(self, plan: StepPlan, tensors: Sequence[TensorInfo]) -> Costed:
        """Of a plan, by what is known now."""
        if plan.road != WIRES:
            return self.seconds(plan.road)
        wires, numbers = dict(plan.wires), {str(codec): number for number, codec in enumerate(self.codecs)}
        choice = [numbers[wires.get(info.name, str(AS_IS))] for info in tensors]
        return self._costed(self._problem(tensors), tensors, choice)

    def _costed(self, problem: Problem, tensors: Sequence[TensorInfo], choice: Sequence[int]) -> Costed:
        services = [problem.service(bucket, choice) for bucket in range(len(problem.buckets))]
        wires = [(info.name, str(self.codecs[wire])) for info, wire in zip(tensors, choice, strict=True) if wire]
        step = problem.finish(services) * (self.drag if wires else 1.0)
        return Costed(StepPlan(WIRES, tuple(wires)), step, sum(services), problem.error(choice))

    def options(self, tensors: Sequence[TensorInfo], halves: bool) -> list[Costed]:
        """Everything that there is to choose from, all of it allowed."""
        found = [self.seconds(PLAIN)]
        if halves and self.errors and HALF in self.fits and (half := self.seconds(HALF)).error <= self.limit():
            found.append(half)
        wires = self.by_wires(tensors) if tensors else None
        return [*found, *([wires] if wires is not None and wires.plan.wires else [])]
