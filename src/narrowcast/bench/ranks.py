"""Where the ranks of a bench are, hosts of a lab or those that torchrun started, and what they tell, as it comes.

A rank that a lab starts: python -m narrowcast.bench.BENCH '{"gpu": true, ...}', the arguments of that file's `measure`.
"""

from __future__ import annotations

import json
import os
import queue
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.bench import codecs, cuda
from narrowcast.lab import Job, Lab, LabError, Line
from narrowcast.measure import PROGRESS, need_cuda, process_group, run_rank

Row = dict[str, Any]
Measure = Callable[..., Iterable[Row]]
UNLIMITED, CLUSTER = "none", "cluster"
"""Names for a lab without a rate, and for ranks that somebody else started."""
LONGEST = 1800.0
SILENT = 0.2
LAST_WORDS = 40


@dataclass(frozen=True)
class Ranks:
    """So many ranks, one on each host of a lab, or all that torchrun started; on processors, or on GPUs with NCCL."""

    count: int
    rate: str
    """Of each link of a lab; "none" for no limit, "cluster" where there is no lab."""
    gpu: bool = False

    @property
    def backend(self) -> str:
        return "NCCL" if self.gpu else "Gloo"

    def __str__(self) -> str:
        where = {CLUSTER: "ranks of this cluster", UNLIMITED: "hosts of a lab without a rate"}
        return f"{self.count} {where.get(self.rate, f'hosts at {self.rate}')}, {self.backend}"

    def as_dict(self) -> Row:
        return {"hosts": self.count, "rate": self.rate, "backend": self.backend.lower()}


def choose(rate: str | None, hosts: str, gpu: bool) -> list[Ranks]:
    """What a command line asks for: a lab after another for each number of hosts, or the ranks that are there."""
    if gpu:
        need_cuda()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if rate is not None:
            raise ValueError(f"--lab: got {rate!r} under torchrun, whose ranks the bench takes; leave --lab out")
        return [Ranks(int(os.environ["WORLD_SIZE"]), CLUSTER, gpu)]
    counts = [int(part) if part.strip().isdigit() else 0 for part in hosts.split(",")]
    if min(counts) < 2:
        raise ValueError(f"--hosts: got {hosts!r}; give numbers of hosts, 2 or more, as 4 or 2,4,8")
    return [Ranks(count, rate or ("10gbit" if gpu else "1gbit"), gpu) for count in counts]


def rows(
    at: Ranks, module: str, measure: Measure, options: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """What rank 0 measures, as it comes: the machine first. Under torchrun the other ranks give nothing."""
    arguments = {**options, "gpu": at.gpu}
    if at.rate != CLUSTER:
        yield from _lab_rows(at, [sys.executable, "-m", module, json.dumps(arguments)], env)
        return
    with process_group(at.gpu):
        yield from (row for row in _messages(measure, arguments) if dist.get_rank() == 0)


def _messages(measure: Measure, arguments: Mapping[str, Any]) -> Iterator[Row]:
    yield {"machine": describe_machine(arguments["gpu"])}
    yield from measure(**arguments)


def main(measure: Measure) -> None:
    """A rank of a lab."""
    arguments = json.loads(sys.argv[1])
    run_rank(lambda: _messages(measure, arguments), arguments["gpu"])


def describe_machine(gpu: bool) -> dict[str, str]:
    if not gpu:
        return codecs.describe_machine()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {**codecs.describe_machine(), **cuda.describe_machine(), "nccl": nccl}


def _lab_rows(at: Ranks, command: list[str], env: Mapping[str, str] | None) -> Iterator[Row]:
    last: deque[Line] = deque(maxlen=LAST_WORDS)
    with Lab(at.count, None if at.rate == UNLIMITED else at.rate, gpu=at.gpu) as lab:
        heard: queue.SimpleQueue[Line] = queue.SimpleQueue()
        job = lab.start(command, env=env, timeout=LONGEST, output=heard.put)
        for line in lines_of(job, heard):
            if line.rank == 0 and line.stream == "stdout" and line.text.startswith("{"):
                yield json.loads(line.text)
            elif line.rank == 0 and line.text.startswith(PROGRESS):
                sys.stderr.write(f"{line.text}\n")
            else:
                last.append(line)
        result = job.wait()
    if not result.ok:
        raise LabError("\n".join([result.summary(), *map(str, last)]))


def lines_of(job: Job, heard: queue.SimpleQueue[Line]) -> Iterator[Line]:
    """What ranks write, as it comes, until all have ended; `heard.put` is the job's output."""
    while True:
        ended = not job.running
        try:
            yield heard.get(timeout=SILENT)
        except queue.Empty:
            if ended:
                return
