"""Interleaved timing: every candidate runs once a round, so that all of them see the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

ROUNDS = 15


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median, and the quartiles as spread."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high)


def _timed(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def interleaved(
    candidates: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, calls: int = 1
) -> dict[str, Timing]:
    """Time each candidate in `rounds` rounds of `calls` calls, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(rounds + 1):
        for name, call in candidates.items():
            spent = _timed(call, calls)
            if round_number:
                seconds[name].append(spent)
    return {name: Timing.of(spent) for name, spent in seconds.items()}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with `count` CPU threads, then put the number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
