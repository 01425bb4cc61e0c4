"""Time on the device that does the work: marks, the seconds of a call, and candidates that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

CPU = torch.device("cpu")
ROUNDS = 15


class DeviceClock:
    """Marks in time: of the processor, or of a CUDA stream, whose work is done later than it is asked for."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device, self.cuda = device, device.type == "cuda"

    def mark(self) -> Any:
        """Now; on CUDA when the device's current stream gets to it."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        """Until all marks so far can be compared."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self.cuda else end - begin

    def timed(self, call: Callable[[], object], calls: int = 1) -> float:
        """Seconds a call until the device has done it, with nothing else under way when the first begins."""
        self.wait()
        begin = self.mark()
        for _ in range(calls):
            call()
        end = self.mark()
        self.wait()
        return self.seconds(begin, end) / calls


@dataclass(frozen=True)
class Timing:
    """Seconds a call, of each round; the quartiles are its spread."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        return statistics.quantiles(self.seconds, n=4, method="inclusive")[0]

    @property
    def high(self) -> float:
        return statistics.quantiles(self.seconds, n=4, method="inclusive")[2]


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int = ROUNDS,
    calls: int = 1,
    device: torch.device = CPU,
    first_calls: int | None = None,
    timed: Callable[[Callable[[], object], int], float] | None = None,
    after_round: Callable[[Mapping[str, Sequence[float]]], None] = lambda seconds: None,
) -> dict[str, Timing]:
    """Every candidate runs once a round, so that all of them see the same machine.

    Each round makes `calls` calls; a first one, of `first_calls`, compiles and warms up and does not count (0: none).
    timed: seconds a call, by default those of the device's clock. after_round gets all seconds so far.
    """
    timed = timed or DeviceClock(device).timed
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    if first_calls != 0:
        for call in candidates.values():
            timed(call, first_calls or calls)
    for _ in range(rounds):
        for name, call in candidates.items():
            seconds[name].append(timed(call, calls))
        after_round(seconds)
    return {name: Timing(tuple(spent)) for name, spent in seconds.items()}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with `count` CPU threads, then put the number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
