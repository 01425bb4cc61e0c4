"""When to back off: a loss that jumps, and how long a tensor stays at many bits after that."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

COOL_STEPS = 100
"""At 16 bits or more, and twice as long each further time."""
JUMP = 6.0
"""Deviations above the mean of the losses so far."""
LEAST = 0.01
"""Of the mean: losses that hardly differ from each other jump by more."""
MEMORY = 0.95
FIRST = 10
"""Losses before a jump is one."""


class Alarm:
    """What this rank heard, and which tensors all ranks keep at many bits."""

    def __init__(self) -> None:
        self._count, self._mean, self._spread, self._rang = 0, 0.0, 0.0, False
        self._until: dict[str, int] = {}
        self._times: dict[str, int] = {}

    def observe(self, loss: float) -> None:
        """A loss of this rank."""
        if not math.isfinite(loss):
            self._rang = True
            return
        off = abs(loss - self._mean)
        if self._count >= FIRST and loss - self._mean > max(JUMP * self._spread, LEAST * abs(self._mean)):
            self._rang = True
        self._count += 1
        weight = 1 / self._count if self._count <= FIRST else 1 - MEMORY
        self._spread += weight * (off - self._spread) if self._count > 1 else 0.0
        self._mean += weight * (loss - self._mean)

    def rang(self) -> bool:
        """Whether it did since the last time."""
        rang, self._rang = self._rang, False
        return rang

    def cooled(self, step: int, names: Collection[str]) -> frozenset[str]:
        """Keep these at many bits from now on; all that are."""
        for name in names:
            # while it cools, what comes is the same trouble
            if self._until.get(name, 0) <= step:
                self._times[name] = self._times.get(name, 0) + 1
            self._until[name] = step + COOL_STEPS * 2 ** min(self._times[name] - 1, 6)
        return frozenset(name for name, until in self._until.items() if until > step)

    def state(self) -> list[Any]:
        return [self._count, self._mean, self._spread, self._rang, self._until, self._times]

    def load(self, state: Sequence[Any]) -> None:
        self._count, self._mean, self._spread, self._rang, self._until, self._times = state
