"""Neighbours instead of all: accuracy, variance between replicas and bytes, on pictures that are made here.

python -m narrowcast_research.local.mixing --out new/mixing.jsonl
All replicas train in one process, with the bits of ranks; seeds are paired. What is done in --out is not done again,
so several calls make the whole, and --limit ends one in time. --table prints the table.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate

from narrowcast.parallel import LocalUpdates, TensorRow
from narrowcast.simulate import train
from narrowcast.study import seeded
from narrowcast_research.local import jobs
from narrowcast_research.wires.convergence import Line, read
from narrowcast_research.wires.page import table

WORKERS, SEEDS, STEPS, EVERY = (16, 64, 256), 3, 240, 4
KINDS = ("all", "exponential", "pairs", "ring", "fewer later")
WIRES = ("fp32", "int4/128")
PICTURES, TESTED, CLASSES, SIDE = 8192, 2048, 10, 32
BATCH = 4
"""Pictures of a replica at a step."""
NOISE, SMALLEST = 0.7, 100
RATE = 0.05


@dataclass(frozen=True)
class MixingJob:
    """A training: with whom, by what, how many replicas, and its seed."""

    kind: str
    wire: str
    workers: int
    seed: int
    steps: int

    @property
    def updates(self) -> LocalUpdates:
        """Averages of values; "fewer later" is Ada's order: all, then the exponential graph, then a ring."""
        rounds = max(3, self.steps // EVERY)
        fewer = {0: "all", rounds // 3: "exponential", 2 * rounds // 3: "ring"}
        mixing = fewer if self.kind == "fewer later" else self.kind
        return LocalUpdates(EVERY, mixing=mixing, variance_every=1, outer=lambda a: torch.optim.SGD(a, lr=1.0))


@lru_cache(maxsize=1)
def pictures() -> SimpleNamespace:
    """As CIFAR-10: three colours, ten classes, each of several smooth shapes, shifted and under noise."""
    made = torch.Generator().manual_seed(0)
    shapes = interpolate(torch.randn(CLASSES * 4, 3, 6, 6, generator=made), size=SIDE, mode="bicubic")
    y = torch.randint(CLASSES, (PICTURES + TESTED,), generator=made)
    which = y * 4 + torch.randint(4, y.shape, generator=made)
    x = torch.empty(len(y), 3, SIDE, SIDE)
    for number, (shape, shift) in enumerate(zip(which, torch.randint(-4, 5, (len(y), 2), generator=made), strict=True)):
        x[number] = shapes[shape].roll((int(shift[0]), int(shift[1])), dims=(1, 2))
    x += NOISE * torch.randn(x.shape, generator=made)
    split = {"x_train": x[:PICTURES], "y_train": y[:PICTURES], "x_test": x[PICTURES:], "y_test": y[PICTURES:]}
    return SimpleNamespace(**split)


def net() -> nn.Module:
    """19,274 parameters, without batch statistics: a replica sees four pictures at a time."""
    first, second = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
    third = nn.Conv2d(32, 48, 3, stride=2, padding=1)
    seen = [layer for conv in (first, second, third) for layer in (conv, nn.ReLU())]
    return nn.Sequential(*seen, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, CLASSES))


def run(job: MixingJob) -> Line:
    """One training; its score is the accuracy in % of the mean of all replicas."""
    model = seeded(net, job.seed)
    how: dict[str, Any] = {"steps": job.steps, "batch": BATCH * job.workers, "min_values": SMALLEST, "seed": job.seed}
    how |= {"workers": job.workers, "spec": job.wire, "local": job.updates, "lr": RATE, "test_every": job.steps}
    made = train(model, pictures(), **how)
    looks = [record["variance"] for record in made.log.of_kind("variance")]
    whole = all(bool(p.isfinite().all()) for p in model.parameters())
    score = round(100 * made.accuracy, 3) if whole and made.accuracy is not None else None
    assert made.local is not None
    facts: Line = {"score": score, "variance": statistics.fmean(looks) if all(map(math.isfinite, looks)) else None}
    return facts | {"bytes_a_step": sent_bytes(job, made.local.rows())}


def sent_bytes(job: MixingJob, rows: Sequence[TensorRow]) -> float:
    """Of a replica in a step, the mean over the rounds."""
    wire = sum(row.bits_per_value * row.numel for row in rows) / 8
    rounds = job.steps // EVERY
    of_kind = {"all": 2 * (job.workers - 1) / job.workers, "ring": 2.0}
    messages = [of_kind.get(job.updates.kind_at(number), 1.0) for number in range(rounds)]
    return wire * statistics.fmean(messages) / EVERY


def text(lines: Sequence[Line]) -> str:
    """A table of one length."""
    found = jobs.scores(lines, ("workers", "wire", "kind"))
    rows = [("replicas", "wire", "mixing", "seeds", "accuracy, %", "against all", "variance", "bytes a step")]
    order = {kind: number for number, kind in enumerate(KINDS)}
    for (workers, wire, kind), own in sorted(found.items(), key=lambda item: (*item[0][:2], order[item[0][2]])):
        against = "" if kind == "all" else jobs.difference_text(own, found.get((workers, wire, "all"), {}), 2)
        values = [line["variance"] for line in own.values() if line["variance"] is not None]
        variance = f"{statistics.fmean(values):.2e}" if values else ""
        sent = f"{next(iter(own.values()))['bytes_a_step']:,.0f}"
        accuracy = jobs.mean_text(own, "score", 2)
        rows.append((str(workers), f"`{wire}`", kind, str(len(own)), accuracy, against, variance, sent))
    return table(rows)


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs.add_arguments(parser, SEEDS)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), help="Numbers of replicas.")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--wires", nargs="+", default=list(WIRES))
    parser.add_argument("--steps", type=int, default=STEPS, help="Of each replica.")
    arguments = parser.parse_args(words)
    if arguments.table:
        lines = [line for line in read([arguments.out]) if line["steps"] == arguments.steps]
        sys.stdout.write(text(lines) + "\n")
        return 0
    every = [
        MixingJob(kind, wire, workers, seed, arguments.steps)
        for seed in range(arguments.seeds)
        for workers in arguments.workers
        for wire in arguments.wires
        for kind in arguments.kinds
    ]
    return int(jobs.complete(arguments.out, every, run, arguments.limit, arguments.jobs) > 0)


if __name__ == "__main__":
    sys.exit(main())
