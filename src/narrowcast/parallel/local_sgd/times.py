"""How long steps stood still for exchanges."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from narrowcast.measure import DeviceClock

MOST_MARKS = 1 << 12
"""That wait to be looked at: a device is waited for so rarely, and a long training keeps no more."""


class ExchangeTimes:
    """By the clock of the device that computes: marks of a GPU are looked at when somebody asks."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock, self._since = clock, 0.0
        self._seconds = {"wait_ms": 0.0, "exchange_ms": 0.0}
        self._marks: list[tuple[str, Any, Any]] = []
        self._begun: Any = None

    def begin(self) -> None:
        """A step is counted."""
        self._since = self._since or time.perf_counter()
        self._begun = self._clock.mark()

    def end(self) -> None:
        """What belongs to exchanges is over."""
        self._add("exchange_ms", self._begun)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait."""
        begun = self._clock.mark()
        yield
        self._add("wait_ms", begun)

    def _add(self, what: str, begun: Any) -> None:
        self._marks.append((what, begun, self._clock.mark()))
        if not self._clock.cuda or len(self._marks) >= MOST_MARKS:
            self._settle()

    def _settle(self) -> None:
        self._clock.wait()
        for what, begun, ended in self._marks:
            self._seconds[what] += self._clock.seconds(begun, ended)
        self._marks.clear()

    def as_dict(self) -> dict[str, float]:
        """Milliseconds, and the share of the time since the first step that was not spent on exchanges."""
        self._settle()
        passed = time.perf_counter() - self._since if self._since else 0.0
        share = 1.0 - self._seconds["exchange_ms"] / passed if passed else 1.0
        return {**{key: 1e3 * value for key, value in self._seconds.items()}, "computing_share": max(0.0, share)}
