"""How long calls take on this link, and what backward hides: marks of steps, and short sums through each wire."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Channel
from narrowcast.measure import DeviceClock, MatrixSum, WireSum
from narrowcast.parallel.seeds import made_before, seed_of

PLAIN, HALF, WIRES = "plain", "half", "wires"
"""Roads: the backend's own sum, the same in 16 bits, or the wires of each tensor."""
LARGEST, LEAST, FEWER = 1 << 22, 1 << 17, 4
"""Values of the sums that are timed, cut to what they may cost; and how many times fewer those have that tell latency:
with far fewer a sum takes another way, and tells another one's.
"""
ROUNDS = 3
NEAR = 0.15
"""Of a call: a bucket that is ready in this last part of it may have waited for it."""
KEPT = 32
"""Steps whose marks wait for somebody to ask: of a history that is repeated nobody does."""
Make = Callable[[Tensor], Callable[[], object]]
"""What makes a call of a tensor."""
SEED = seed_of("auto")


@dataclass(frozen=True)
class Fit:
    """Seconds of a call: for itself, and for each value."""

    latency: float
    per_value: float

    def __call__(self, values: int) -> float:
        return self.latency + values * self.per_value

    @classmethod
    def of(cls, small: float, large: float, values: int) -> Fit:
        """Through the times of `values` values and of FEWER times fewer; more are never quicker."""
        few = values // FEWER
        per_value = max(0.0, large - small) / max(1, values - few)
        return cls(max(0.0, small - few * per_value), per_value)


@dataclass(frozen=True)
class Layout:
    """The buckets of a step in the order in which they are ready: when, and which tensors with how many values."""

    ready: tuple[float, ...]
    buckets: tuple[tuple[str, ...], ...]
    values: tuple[int, ...]


class Road(Protocol):
    """What the autopilot measures with: ranks, or a described link."""

    together: bool
    """Whether the wires of a bucket travel as one call."""
    halves: bool
    """Whether the backend adds 16 bits."""
    is_real: bool
    """Whether seconds are measured, those of watching too."""
    shares: bool
    """Whether calls and training share processors, so that codecs are slower beside compute."""
    skips: bool
    """Whether a loss scaler skips steps whose gradients are not finite, so that these are no trouble."""

    def numbers(self) -> tuple[float, float, float]:
        """Of this rank since the last time: 1 where it saw steps, then seconds of a step and of its calls."""

    def fits(self, wires: Sequence[str], values: int) -> dict[str, Fit]:
        """Time the roads and wires with sums of so many values. Collective, and the same on all ranks."""

    def layout(self, stalls: bool) -> Layout:
        """Collective: the slowest rank's times. stalls: whether calls may be what holds up backward."""


@dataclass
class StepMarks:
    """One step: when its forward pass began, when each bucket was ready and done, and what was in it."""

    began: Any = None
    ready: list[Any] = field(default_factory=list)
    done: dict[int, Any] = field(default_factory=dict)
    names: list[tuple[str, ...]] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    looked: bool = False
    """Somebody looked at gradients meanwhile, and what came after that is late."""


class StepTimes:
    """The steps since somebody asked. A rank that has run out of inputs, in `join()`, runs no forward pass: its steps
    are no evidence.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        self._now, self._steps = StepMarks(), deque[StepMarks](maxlen=KEPT)
        self._last = list[StepMarks]()
        """Steps with the buckets of the last one, best those that nobody disturbed."""

    def begin(self) -> None:
        """A forward pass begins; of several only the last one's backward communicates."""
        if self._now.ready:  # of a backward pass that did not get to its end
            self._now = StepMarks()
        self._now.began = self.clock.mark()

    def ready(self, names: tuple[str, ...], values: int) -> Callable[[], None]:
        """A bucket is; what is returned says that it is done, in whatever thread."""
        now, number = self._now, len(self._now.ready)
        now.ready.append(self.clock.mark())
        now.names.append(names)
        now.values.append(values)

        def done() -> None:
            now.done[number] = self.clock.mark()

        return done

    def looks(self) -> None:
        """Gradients of the step under way are looked at."""
        self._now.looked = True

    def end(self) -> None:
        """The last bucket of a step was ready."""
        if self._now.ready:
            self._steps.append(self._now)
        self._now = StepMarks()

    def numbers(self) -> tuple[float, float, float]:
        """Whether there were steps, and the medians of their seconds and of their calls'."""
        steps = list(self._steps)
        self._steps.clear()
        # where a model is one bucket, the last step has only just begun to travel
        whole = [one for one in steps if one.began is not None and len(one.done) == len(one.ready)]
        for mark in whole[-1].done.values() if whole and self.clock.cuda else ():
            mark.synchronize()  # not the device, which is at work on the next step
        # its buckets are those of the other ranks, whatever its times are
        if whole or steps:
            self._last = self._alike(whole or steps)
        if not whole:
            return 0.0, 0.0, 0.0
        return 1.0, statistics.median(map(self._took, whole)), statistics.median(map(self._busy, whole))

    def _took(self, step: StepMarks) -> float:
        """From the forward pass to the last gradient: what comes after that is the same with every wire."""
        return max(self._between(step.began, mark) for mark in (*step.done.values(), step.ready[-1]))

    def _between(self, one: Any, other: Any) -> float:
        return self.clock.seconds(one, other)

    def _busy(self, step: StepMarks) -> float:
        """Seconds in which a call was under way: buckets wait for each other."""
        busy, end = 0.0, step.began
        for number, ready in enumerate(step.ready):
            start = ready if self._between(end, ready) > 0 else end
            busy += max(0.0, self._between(start, step.done[number]))
            end = step.done[number] if self._between(end, step.done[number]) > 0 else end
        return busy

    @staticmethod
    def _alike(steps: Sequence[StepMarks]) -> list[StepMarks]:
        """Buckets are made anew after the first step; and a look, which may compile, holds up the buckets after it."""
        same = [one for one in steps if one.names == steps[-1].names]
        return [one for one in same if not one.looked] or same

    def last(self) -> tuple[list[float], list[float], StepMarks]:
        """Of each bucket of the last steps: when it was ready, after the forward pass began, and how long its call
        took from there; medians.
        """
        if not self._last:
            return [], [], StepMarks()
        marks = self._last[-1]
        begun = [one for one in self._last if one.began is not None]
        if not begun:
            return [0.0] * len(marks.ready), [0.0] * len(marks.ready), marks
        ready = [[self._between(one.began, mark) for mark in one.ready] for one in begun]
        took = [
            [self._between(mark, one.done.get(number, mark)) for number, mark in enumerate(one.ready)] for one in begun
        ]
        return _medians(ready), _medians(took), marks


def without_calls(ready: Sequence[float], took: Sequence[float]) -> list[float]:
    """When buckets would be ready if nothing travelled, where calls may hold up backward: for most of their time no
    bucket was ready before the call of the last one was done. Then nothing is hidden, and as far as a timeline goes all
    calls come after backward. Elsewhere the same. Where calls are short nobody can tell; a change that was to gain by
    it has to show that it does.

    Seen with NCCL on several ranks of one GPU: no bucket was ready while the sum of another was under way.
    """
    done = [at + seconds for at, seconds in zip(ready, took, strict=True)]
    calls = [end - max(at, before) for at, end, before in zip(ready, done, [-math.inf, *done], strict=False)][:-1]
    held = [at >= end - NEAR * call for at, end, call in zip(ready[1:], done, calls, strict=False)]
    stalled = sum(call for call, is_held in zip(calls, held, strict=True) if is_held)
    if not calls or stalled < sum(calls) / 2:
        return list(ready)
    begins = [end if is_held else at for at, end, is_held in zip(ready, done, held, strict=False)]
    gaps = [max(0.0, at - begin) for at, begin in zip(ready[1:], begins, strict=True)]
    return [ready[0] + sum(gaps)] * len(ready)


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def agreed(channel: Channel, mine: Tensor) -> Tensor:
    """The slowest rank's value of each, the same on all ranks."""
    return torch.stack(channel.gather(mine)).amax(dim=0)


def time_sums(
    clock: DeviceClock,
    channel: Channel,
    roads: Mapping[str, Make],
    dtype: torch.dtype,
    values: int,
) -> dict[str, Fit]:
    """A fit for each road and wire, on the device of the clock, so that sums take the links that gradients take.

    roads: by name, what makes a call of a tensor. All take turns, and the first round does not count. Collective.
    """
    sizes = (values // FEWER, values)
    made = {n: torch.linspace(-1, 1, n, dtype=torch.float32, device=clock.device).to(dtype) for n in sizes}
    calls = {(name, n): make(x) for name, make in roads.items() for n, x in made.items()}
    rounds = [[clock.timed(call) for call in calls.values()] for _ in range(ROUNDS + 1)][1:]
    best = agreed(channel, torch.tensor(rounds, dtype=torch.float64).amin(dim=0))
    seconds = dict(zip(calls, best.tolist(), strict=True))
    few = values // FEWER
    return {name: Fit.of(seconds[name, few], seconds[name, values], values) for name in roads}


def plain_sum(x: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """A call of the backend's own sum."""
    return lambda: dist.all_reduce(x, group=group)


def half_sum(x: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """The same in 16 bits, there and back."""

    def call() -> None:
        short = x.bfloat16()
        dist.all_reduce(short, group=group)
        x.copy_(short)

    return call


def wire_sum(x: Tensor, wire: str, channel: Channel, **options: Any) -> Callable[[], object]:
    """A sum through a wire, or of a matrix by low rank."""
    codec = codec_named(wire)
    add = (MatrixSum if codec.rank else WireSum)(x.clone(), codec, seed=SEED, channel=channel, **options)
    # nobody uses what comes back, but its noise is nobody else's either
    return lambda: add((made_before("auto"), channel.rank))
