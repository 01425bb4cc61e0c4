"""Measuring with several ranks: a common start, the slowest of them, and a rank as a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from narrowcast.measure.clock import DeviceClock

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others, as torch does where nobody says otherwise."""


def slowest(values: Sequence[float]) -> list[float]:
    """The largest of each value over all ranks. Collective."""
    mine = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return [float(value) for value in mine]


def mean(values: Sequence[float]) -> list[float]:
    """The mean of each value over all ranks. Collective."""
    mine = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mine)
    return [float(value) / dist.get_world_size() for value in mine]


def first_decides(yes: bool) -> bool:
    """What rank 0 says, on every rank: clocks differ, and ranks must not. Collective."""
    mine = torch.tensor([yes], dtype=torch.uint8)
    dist.broadcast(mine, 0)
    return bool(mine.item())


def from_barrier(
    call: Callable[[], object],
    clock: DeviceClock | None = None,
    group: dist.ProcessGroup | None = None,
    calls: int = 1,
) -> float:
    """This rank's seconds a call; all ranks of the group begin the first one together. Collective."""
    dist.barrier(group)
    return (clock or DeviceClock()).timed(call, calls)


def until_all_done(call: Callable[[], object]) -> float:
    """Seconds until the slowest rank is done: from one barrier to the next. Collective."""

    def call_and_meet() -> None:
        call()
        dist.barrier()

    return from_barrier(call_and_meet)


@contextmanager
def process_group(backend: str | None = "gloo", timeout: timedelta = TIMEOUT) -> Iterator[None]:
    """The group that the environment describes, with one thread a rank; ranks leave it together.

    After an error nobody waits for the others: they may be waiting for this rank.
    """
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timeout)
    yield
    dist.barrier()
    dist.destroy_process_group()


def run_rank(measure: Callable[[], Iterable[object]]) -> None:
    """The main function of a rank: rank 0 prints what `measure` gives, a line of JSON each, as it comes."""
    with process_group():
        for result in measure():
            if dist.get_rank() == 0:
                sys.stdout.write(json.dumps(result) + "\n")
                sys.stdout.flush()
