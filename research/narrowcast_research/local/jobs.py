"""Trainings that are made one after another, a line of JSON for each as it is done, and tables of them."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from narrowcast.study import equivalence
from narrowcast_research.wires.convergence import Line, read, tell

Job = Any
"""A frozen dataclass, what makes a training another one, with its `seed`."""


def add_arguments(parser: argparse.ArgumentParser, seeds: int) -> None:
    """What every command on such trainings takes."""
    parser.add_argument("--out", type=Path, required=True, help="The file that lines are appended to.")
    parser.add_argument("--seeds", type=int, default=seeds, help="Of each training; all have the same ones.")
    parser.add_argument("--limit", type=float, default=math.inf, help="Seconds after which no training begins.")
    parser.add_argument("--jobs", type=int, default=1, help="Processes at once.")
    parser.add_argument("--table", action="store_true", help="Print the table of what is done, and make nothing.")


def is_done(job: Job, lines: Iterable[Line]) -> bool:
    """Whether there is a line of this training."""
    wanted = asdict(job)
    return any(wanted.items() <= line.items() for line in lines)


def complete(out: Path, jobs: Sequence[Job], run: Callable[[Any], Line], limit: float, processes: int = 1) -> int:
    """Make what is not done yet; returns how many are left."""
    known, until = read([out]), time.time() + limit
    missing = [job for job in jobs if not is_done(job, known)]
    tell(f"{len(jobs) - len(missing)} of {len(jobs)} trainings are done")
    out.parent.mkdir(parents=True, exist_ok=True)
    left = len(missing)
    with out.open("a") as file:
        if out.stat().st_size and not out.read_text().endswith("\n"):
            file.write("\n")  # after a line that was cut
        for line in _lines(missing, run, until, processes):
            file.write(json.dumps(line) + "\n")
            file.flush()
            left -= 1
            tell(f"{ {key: line[key] for key in asdict(missing[0])} }: {line['score']} in {line['seconds']} s")
    tell(f"{left} trainings are left")
    return left


def _lines(jobs: Sequence[Job], run: Callable[[Any], Line], until: float, processes: int) -> Iterator[Line]:
    """As they come. Several processes share a GPU, which one small model does not fill."""
    make = partial(_line, run=run, until=until)
    if processes == 1:
        found: Iterable[Line | None] = map(make, jobs)
        yield from (line for line in found if line is not None)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, torch.set_num_threads, (max(1, torch.get_num_threads() // processes),)) as pool:
        yield from (line for line in pool.imap_unordered(make, jobs) if line is not None)


def _line(job: Job, run: Callable[[Any], Line], until: float) -> Line | None:
    """None where time is up."""
    began = time.time()
    if began >= until:
        return None
    return {**asdict(job), **run(job), "seconds": round(time.time() - began, 1)}


def scores(lines: Iterable[Line], keys: Sequence[str]) -> dict[tuple[Any, ...], dict[int, Line]]:
    """By what was trained, and by seed."""
    found: dict[tuple[Any, ...], dict[int, Line]] = {}
    for line in lines:
        found.setdefault(tuple(line[key] for key in keys), {})[line["seed"]] = line
    return found


def differences(own: Mapping[int, Line], first: Mapping[int, Line]) -> list[float]:
    """By seed that both have; none where a training lost its numbers."""
    pairs = [(own[seed]["score"], first[seed]["score"]) for seed in sorted(own.keys() & first.keys())]
    return [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]


def difference_text(own: Mapping[int, Line], first: Mapping[int, Line], digits: int) -> str:
    """The mean of paired differences, with an interval of 95 % where there are several seeds."""
    found = differences(own, first)
    if not found:
        return ""
    test = equivalence(found, 1.0)
    if len(found) == 1:
        return f"{test.mean:+.{digits}f}"
    return f"{test.mean:+.{digits}f} ({test.interval.low:+.{digits}f} to {test.interval.high:+.{digits}f})"


def mean_text(own: Mapping[int, Line], key: str, digits: int) -> str:
    """Of all seeds, and how many have no number."""
    values = [line[key] for line in own.values() if line[key] is not None]
    lost = len(own) - len(values)
    text = f"{sum(values) / len(values):.{digits}f}" if values else ""
    return f"{text} ({lost} of {len(own)} lost their numbers)" if lost else text
