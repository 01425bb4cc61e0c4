"""Running law 8's cases: one on the ranks of a job, many of them over a pool of processes."""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from dist.law8 import gradients, local
from dist.law8.cases import Case, case_of
from dist.law8.ledger import Ledger
from dist.pool import LARGEST, Pool, WorkerError

BATCH = 12
"""Cases in one job."""
JOB_SECONDS = 300.0
"""For a job on a machine that has much else to do. Ranks that wait for each other in vain raise long before."""


@dataclass(frozen=True)
class Failure:
    """A case in which something was lost, or that could not be run."""

    seed: int
    what: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.what}\n  {case_of(self.seed).features()}"


def run_case(group: dist.ProcessGroup, case: Case) -> dict[str, float]:
    """By how much wanted and arrived + residual differ on this rank, where that is too much."""
    ledger, state = Ledger(), {}
    cuts = [case.iterations * n // len(case.worlds) for n in range(len(case.worlds) + 1)]
    wrong: dict[str, float] = {}
    for world, (first, last) in zip(case.worlds, itertools.pairwise(cuts), strict=True):
        if dist.get_rank() < world:
            wrong |= _run_part(case, world, range(first, last), state, ledger)
        if last < case.iterations:
            shared = [ledger, state]
            dist.broadcast_object_list(shared, 0, group=group)
            ledger, state = shared
    return wrong


def _run_part(case: Case, world: int, iterations: range, state: dict[str, object], ledger: Ledger) -> dict[str, float]:
    """Go on from a checkpoint, and fill the next one."""
    kind = local.Training if case.kind == "local" else gradients.Training
    training = kind(case, world, iterations.start, state)
    ledger.each(training.part)
    wrong: dict[str, float] = {}
    for iteration in iterations:
        compare = iteration in case.looks or iteration == iterations.stop - 1
        training.iterate(iteration, ledger, compare)
        if compare:
            wrong |= ledger.wrong(training.residuals())
    if iterations.stop < case.iterations:
        state.update(training.state())
        ledger.each(training.whole)
    training.close()
    return wrong


def run_batch(group: dist.ProcessGroup, seeds: Sequence[int]) -> list[dict[str, float]]:
    """Several cases of one world."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return [run_named(group, seed) for seed in seeds]


def run_named(group: dist.ProcessGroup, seed: int) -> dict[str, float]:
    try:
        return run_case(group, case_of(seed))
    except Exception as error:
        raise RuntimeError(f"seed {seed}: {type(error).__name__}: {error}") from error


def batches(seeds: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Jobs: the ranks that they need and their seeds."""
    by_world: dict[int, list[int]] = {}
    for seed in seeds:
        case = case_of(seed)
        by_world.setdefault(max(case.worlds), []).append(seed)
    for world, members in by_world.items():
        for at in range(0, len(members), BATCH):
            yield world, members[at : at + BATCH]


def run_all(current: Callable[[], Pool], seeds: Sequence[int]) -> Iterator[tuple[list[int], list[Failure]]]:
    """Batch by batch: the seeds that were run, and what failed of them. After an error the ranks are made anew."""
    waiting = list(batches(seeds))
    while waiting:
        world, batch = waiting.pop(0)
        try:
            pool = current()
            pool.run(LARGEST, gradients.make_groups)
            ranks = pool.run(world, run_batch, batch, timeout=JOB_SECONDS)
        except (WorkerError, TimeoutError, AssertionError) as error:
            seed = _seed_of(error, batch)
            if seed is None:
                waiting[:0] = [(world, [each]) for each in batch]
                continue
            others = [each for each in batch if each != seed]
            waiting[:0] = [(world, others)] if others else []
            yield [seed], [Failure(seed, str(error)[-1500:])]
        else:
            yield batch, [_failure(seed, found) for seed, *found in zip(batch, *ranks, strict=True) if any(found)]


def _seed_of(error: BaseException, batch: Sequence[int]) -> int | None:
    """The case that raised. Where a rank did not come back at all it is known only if there was but one."""
    named = re.findall(r"RuntimeError: seed (\d+):", str(error))
    return int(named[0]) if named else batch[0] if len(batch) == 1 else None


def _failure(seed: int, found: Sequence[dict[str, float]]) -> Failure:
    worst = {name: max(f.get(name, 0.0) for f in found) for name in sorted(set().union(*found))}
    return Failure(seed, "lost " + ", ".join(f"{value:.3g} of {name}" for name, value in worst.items()))
