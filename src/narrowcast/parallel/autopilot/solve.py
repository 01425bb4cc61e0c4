"""Which wire for which tensor: the shortest step whose error stays below a bound.

A bucket becomes ready, waits for the calls before it and travels: one call for each wire that its tensors have, or one
for all of them. The errors of tensors add up. `attach(model, "auto")`, the simulator and `advise` all ask here.

How: a multiplier weighs error against seconds, so that each tensor chooses for itself, and bisection finds the smallest
multiplier whose sum of errors is allowed; the best wires of one kind for all are looked at, too. From the best of these
single tensors, whole wires of a bucket and whole wires of the model move as long as the step gets shorter, or its error
smaller at the same length (what backward hides needs few bits least of all: its error is worth more elsewhere).
Dynamic programming over errors, as L-GreCo has it, minimises a sum; a step is a sum for what is exposed alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Choice = tuple[int, ...]
"""Of each tensor, the number of its wire."""
PASSES = 4
"""Of the search; it ends earlier where nothing moves."""
HALVINGS = 60
PAIRS = 12
"""Of so few tensors two at a time move, too."""


@dataclass(frozen=True)
class Problem:
    """A step: its buckets in the order in which they are ready, and what each wire does to each tensor.

    The first wire is the one that loses nothing, so that there is always a choice.
    """

    ready: tuple[float, ...]
    """Seconds after the step's begin; the last one is the end of backward."""
    buckets: tuple[tuple[int, ...], ...]
    """The numbers of the tensors in each, of those that may change."""
    seconds: tuple[tuple[float, ...], ...]
    """By tensor and wire, beside the latency of the call."""
    errors: tuple[tuple[float, ...], ...]
    """By tensor and wire; infinite where the wire is not allowed."""
    latency: tuple[float, ...]
    """Of a call, by wire."""
    bound: float
    """Of the sum of errors."""
    fixed: tuple[float, ...] = ()
    """Of each bucket, the seconds of what does not change."""
    together: bool = False
    """Whether the wires of a bucket make one call: its latency is the largest of theirs."""

    @property
    def wires(self) -> int:
        return len(self.latency)

    def service(self, bucket: int, choice: Sequence[int]) -> float:
        """Seconds of a bucket's calls."""
        members = self.buckets[bucket]
        own = sum(self.seconds[tensor][choice[tensor]] for tensor in members)
        latencies = [self.latency[wire] for wire in {choice[tensor] for tensor in members}]
        waits = (max(latencies) if self.together else sum(latencies)) if latencies else 0.0
        return own + waits + (self.fixed[bucket] if self.fixed else 0.0)

    def finish(self, services: Sequence[float]) -> float:
        """When the last bucket is done and backward is over: `overlap.queue` for one version."""
        end = 0.0
        for ready, service in zip(self.ready, services, strict=True):
            end = max(end, ready) + service
        return max(end, self.ready[-1]) if self.ready else 0.0

    def step(self, choice: Sequence[int]) -> float:
        return self.finish([self.service(bucket, choice) for bucket in range(len(self.buckets))])

    def error(self, choice: Sequence[int]) -> float:
        return math.fsum(self.errors[tensor][wire] for tensor, wire in enumerate(choice))


@dataclass(frozen=True)
class Solution:
    """What was found, its step in seconds and its error."""

    choice: Choice
    step: float
    error: float

    @classmethod
    def of(cls, problem: Problem, choice: Sequence[int]) -> Solution:
        return cls(tuple(choice), problem.step(choice), problem.error(choice))


def solve(problem: Problem) -> Solution:
    """A choice whose error is allowed and that no single move makes better."""
    starts = [*_uniform(problem), _weighed(problem)]
    allowed = [one for one in (Solution.of(problem, start) for start in starts) if one.error <= problem.bound]
    # from the weighed one and the quickest of one kind; of few tensors from all: they lie in different valleys
    tried = allowed if len(problem.errors) <= PAIRS else [min(allowed, key=_order), allowed[-1]]
    return min((_search(problem, one) for one in dict.fromkeys(tried)), key=_order)


def _order(one: Solution) -> tuple[float, float]:
    return one.step, one.error


def _uniform(problem: Problem) -> Iterator[Choice]:
    """One wire for all tensors that may have it; the others lose nothing."""
    for wire in range(problem.wires):
        yield tuple(wire if math.isfinite(errors[wire]) else 0 for errors in problem.errors)


def _weighed(problem: Problem) -> Choice:
    """The choice of the smallest multiplier of errors whose sum is allowed."""

    def at(multiplier: float) -> Choice:
        costs = zip(problem.seconds, problem.errors, strict=True)
        return tuple(
            min(
                (wire for wire in range(problem.wires) if math.isfinite(errors[wire])),
                key=lambda wire: seconds[wire] + multiplier * errors[wire],
            )
            for seconds, errors in costs
        )

    low, high = 0.0, 1e-12
    while problem.error(at(high)) > problem.bound and high < 1e300:
        low, high = high, high * 16
    if problem.error(at(0.0)) <= problem.bound:
        return at(0.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if problem.error(at(middle)) <= problem.bound else (middle, high)
    return at(high) if problem.error(at(high)) <= problem.bound else (0,) * len(problem.errors)


def _search(problem: Problem, start: Solution) -> Solution:
    state = _State(problem, start)
    for _ in range(PASSES):
        if not sum(state.move(changes) for changes in _moves(problem, state.choice)):
            break
    return Solution.of(problem, state.choice)


def _moves(problem: Problem, choice: Sequence[int]) -> Iterator[dict[int, int]]:
    """Tensors and the wires that they might get. choice changes while they are gone through."""
    wires, every = range(problem.wires), range(len(problem.errors))
    for group in (every, *problem.buckets):
        for old in {choice[tensor] for tensor in group}:
            for new in wires:
                yield {tensor: new for tensor in group if choice[tensor] == old}
    for tensor, new in itertools.product(every, wires):
        yield {tensor: new}
    # one gets more bits so that another may have fewer: with many tensors single moves come as near
    for one, other in itertools.combinations(every, 2) if len(every) <= PAIRS else ():
        for first, second in itertools.product(wires, wires):
            yield {one: first, other: second}


class _State:
    """A choice under way, with what is known of it, so that a move costs little."""

    def __init__(self, problem: Problem, start: Solution) -> None:
        self.problem, self.choice = problem, list(start.choice)
        self.bucket_of = {t: b for b, members in enumerate(problem.buckets) for t in members}
        self.services = [problem.service(b, self.choice) for b in range(len(problem.buckets))]
        self.step, self.error = start.step, start.error

    def move(self, changes: dict[int, int]) -> bool:
        """Give tensors other wires, where that is better. Whether it was."""
        errors = self.problem.errors
        before = {tensor: self.choice[tensor] for tensor in changes}
        if before == changes:
            return False
        error = self.error + sum(errors[t][wire] - errors[t][before[t]] for t, wire in changes.items())
        if not error <= self.problem.bound:
            return False
        self._put(changes)
        services = list(self.services)
        for bucket in {self.bucket_of[tensor] for tensor in changes if tensor in self.bucket_of}:
            services[bucket] = self.problem.service(bucket, self.choice)
        step = self.problem.finish(services)
        if (step, error) >= (self.step, self.error):
            self._put(before)
            return False
        self.services, self.step, self.error = services, step, error
        return True

    def _put(self, changes: dict[int, int]) -> None:
        for tensor, wire in changes.items():
            self.choice[tensor] = wire


def solve_by_trying(problem: Problem) -> Solution:
    """`solve` as it is defined: every choice. For a few tensors."""
    choices = itertools.product(range(problem.wires), repeat=len(problem.errors))
    allowed = (one for one in (Solution.of(problem, c) for c in choices) if one.error <= problem.bound)
    return min(allowed, key=_order)
