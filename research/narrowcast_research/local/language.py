"""A small language model by local updates and by DDP in float32: losses after equally many tokens.

python -m narrowcast_research.local.language --text text.bin --out new/local.jsonl
Eight workers in one process, with the bits of ranks; seeds are paired. What is done in --out is not done again, so
several calls make the whole, and --limit ends one in time. --table prints losses and what they lose against DDP.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.codecs import codec
from narrowcast.parallel import MIN_VALUES, LocalUpdates
from narrowcast.simulate import LocalWorld, World
from narrowcast_research.local import jobs
from narrowcast_research.text import train as text_training
from narrowcast_research.wires import workloads
from narrowcast_research.wires.convergence import Line, read
from narrowcast_research.wires.page import table
from narrowcast_research.wires.workloads import Setting, WorkerLoop, Workload

WORKERS, SEEDS, STEPS, ROWS = 8, 3, 1200, 1
EVERY = (15, 50, 150)
WIRES = ("fp32", "int4/128+ef", "e3m0/64+ef", "int2/4096+top64+ef95")
WAYS = ("blocks", "stream")
FRAGMENTS, OVERLAP = 4, 10
"""Of what streams: into how many parts the model is cut, and what part of a round an exchange may take."""
BASELINE = ("ddp", 1, "fp32")


@dataclass(frozen=True)
class TextJob:
    """A training: its way, steps between exchanges, wire, and seed."""

    way: str
    every: int
    wire: str
    seed: int
    steps: int
    rows: int
    tiny: bool
    size: str

    @property
    def updates(self) -> LocalUpdates:
        """How it exchanges. With decaying feedback there is no outer momentum, as SparseLoCo has it."""
        outer: dict[str, Any] = {"outer": average} if codec(self.wire).decay < 1 else {}
        if self.way == "blocks":
            return LocalUpdates(self.every, **outer)
        fragments, delay = min(FRAGMENTS, self.every), min(self.every - 1, max(1, self.every // OVERLAP))
        return LocalUpdates(self.every, fragments, delay, **outer)


def average(anchors: list[Tensor]) -> torch.optim.Optimizer:
    """The outer optimizer of SparseLoCo."""
    return torch.optim.SGD(anchors, lr=1.0)


class LocalLoop:
    """Workers that train by themselves, each with its own AdamW."""

    def __init__(self, work: Workload, updates: LocalUpdates, wire: str, setting: Setting) -> None:
        self.work, self.done, self._setting = work, 0, setting
        world = World(work.workers, seed=work.seed)
        make = partial(text_training.make_optimizer, rate=0.0)
        self.local = LocalWorld(work.model, world, updates, wire, MIN_VALUES, work.seed, make)

    def step(self) -> None:
        """Of all workers."""
        for worker, (model, optimizer) in enumerate(zip(self.local.models, self.local.optimizers, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = self.work.rate(self.done)
            with workloads.autocast(self._setting):
                loss = model.train()(self.work.batch(self.done, worker))
            loss.backward()
            if self.work.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.work.clip)
            optimizer.step()
            optimizer.zero_grad()
        self.local.step()
        self.done += 1


def run(job: TextJob, setting: Setting) -> Line:
    """One training; its score is the loss on held-out text."""
    work = workloads.workload(
        "lm", job.seed, replace(setting, steps=job.steps, rows=job.rows, workers=WORKERS, size=job.size)
    )
    if job.way == "ddp":
        loop: WorkerLoop | LocalLoop = WorkerLoop(work, job.wire)
    else:
        loop = LocalLoop(work, job.updates, job.wire, setting)
    while loop.done < work.steps:
        loop.step()
    rows = loop.exchange.rows() if isinstance(loop, WorkerLoop) else loop.local.rows()
    if isinstance(loop, LocalLoop):
        loop.local.mean_into(work.model)
    score = work.score()
    bits = sum(row.bits_per_value * row.numel for row in rows) / sum(row.numel for row in rows)
    facts: Line = {"score": round(score, 5) if math.isfinite(score) else None, "workers": WORKERS}
    return facts | {"bits_a_step": bits / job.every, "parameters": sum(row.numel for row in rows)}


def planned(every: Sequence[int], wires: Sequence[str], ways: Sequence[str], seeds: int, **how: Any) -> list[TextJob]:
    """Seed by seed, DDP first, so that a short call gives whole tables. how: length and size."""
    kinds = [BASELINE] + [(way, steps, wire) for way in ways for steps in every for wire in wires]
    return [TextJob(*kind, seed, **how) for seed in range(seeds) for kind in kinds]


def text(lines: Sequence[Line]) -> str:
    """A table of one length and size."""
    found = jobs.scores(lines, ("way", "every", "wire"))
    first = found.get(BASELINE, {})
    rows = [("way", "H", "wire", "bits a parameter and step", "seeds", "loss", "against DDP in float32")]
    for (way, every, wire), own in sorted(found.items(), key=lambda item: (item[0] != BASELINE, item[0])):
        bits = f"{next(iter(own.values()))['bits_a_step']:.4f}"
        against = "" if (way, every, wire) == BASELINE else jobs.difference_text(own, first, 3)
        rows.append((way, str(every), f"`{wire}`", bits, str(len(own)), jobs.mean_text(own, "score", 3), against))
    return table(rows)


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs.add_arguments(parser, SEEDS)
    parser.add_argument("--text", type=Path, help="A token file of narrowcast_research.text.corpus.")
    parser.add_argument("--tiny", action="store_true", help="A tiny model on the text that every Python has.")
    parser.add_argument("--size", default="3m", choices=workloads.GPTS, help="Parameters.")
    parser.add_argument("--gpu", action="store_true", help="Train on this machine's GPU.")
    parser.add_argument("--steps", type=int, default=STEPS, help="Inner steps of each worker.")
    parser.add_argument("--rows", type=int, default=ROWS, help="Pieces of 128 tokens that a worker sees at a step.")
    parser.add_argument("--every", type=int, nargs="+", default=list(EVERY), help="Steps between exchanges.")
    parser.add_argument("--wires", nargs="+", default=list(WIRES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    arguments = parser.parse_args(words)
    if arguments.gpu and not torch.cuda.is_available():
        raise ValueError("--gpu: torch sees no GPU here; leave it out")
    how = {key: getattr(arguments, key) for key in ("steps", "rows", "tiny", "size")}
    if not arguments.table:
        setting = Setting("cuda" if arguments.gpu else "cpu", text=arguments.text, tiny=arguments.tiny)
        every = planned(arguments.every, arguments.wires, arguments.ways, arguments.seeds, **how)
        left = jobs.complete(arguments.out, every, partial(run, setting=setting), arguments.limit, arguments.jobs)
        return int(left > 0)
    sys.stdout.write(text([line for line in read([arguments.out]) if how.items() <= line.items()]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
