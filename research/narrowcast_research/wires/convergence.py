"""Trainings through several wires and seeds, equal in all else, a line of JSON for each as it is done.

python -m narrowcast_research.wires.convergence --out new/wires.jsonl --done old --text text.bin --gpu --jobs 5
What is done, in --out or below --done, is not done again, so several calls make the whole; --limit ends one in time.
Seed by seed, so that a short call gives whole tables. A seed decides weights, batches and crops, whatever the wire.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from narrowcast_research.reproductions import engine
from narrowcast_research.text import runs
from narrowcast_research.wires import workloads
from narrowcast_research.wires.workloads import Setting, WorkerLoop

WIRES = (
    *("fp32", "int8/256", "int4/128+ef", "int4/128+rot+ef", "int2/4096+top64+ef"),
    *("bf16+rank4+ef", "fp32+rank4+ef"),
)
SEEDS = {"davidnet": 5, "lm": 3, "resnet18": 3, "fashion": 5, "poisoned": 5}
LOOKS = 4
"""Times that a model is scored, the last one at its end."""
LOOK_EVERY = 50
"""Steps between looks at the clock and at the numbers: each makes the host wait."""
MARGIN = 1.1
"""Times the seconds of the last training that must be left for another."""


@dataclass(frozen=True)
class Job:
    model: str
    wire: str
    seed: int


Line = dict[str, Any]


def planned(models: Sequence[str], wires: Sequence[str], seeds: int | None = None) -> list[Job]:
    """Seed by seed; `seeds` of each model, or as many as `SEEDS` says."""
    counts = {model: seeds or SEEDS[model] for model in models}
    most = max(counts.values(), default=0)
    return [
        Job(model, wire, seed) for seed in range(most) for model in models if seed < counts[model] for wire in wires
    ]


def read(paths: Iterable[Path]) -> list[Line]:
    """The lines of some files; one that was cut while it was written is left out."""
    found = []
    for text in (line for path in paths if path.exists() for line in path.read_text().splitlines()):
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def identity(job: Job, setting: Setting) -> Line:
    """What makes a training another one: a line has these, and is not made twice."""
    length = setting.steps if job.model == "lm" else setting.epochs
    return {**asdict(job), "length": length, "batch": setting.batch, "tiny": setting.tiny}


def is_done(job: Job, lines: Iterable[Line], setting: Setting) -> bool:
    """Whether there is a line of this training, as long as it is to be."""
    wanted = identity(job, setting).items()
    return any(wanted <= {key: line.get(key) for key, _ in wanted}.items() for line in lines)


@dataclass
class Deadline:
    """By the clock that processes share; the last training's seconds tell whether another fits."""

    until: float
    last: dict[str, float] = field(default_factory=dict)

    def fits(self, model: str) -> bool:
        return time.time() + MARGIN * self.last.get(model, 0.0) < self.until


def run(job: Job, setting: Setting, deadline: Deadline) -> Line | None:
    """One training; None where time is up."""
    if not deadline.fits(job.model):
        return None
    began = time.time()
    work = workloads.workload(job.model, job.seed, setting)
    loop, curve, lost = WorkerLoop(work, job.wire), [], False
    looks = {math.ceil(work.steps * part / LOOKS) for part in range(1, LOOKS + 1)}
    while loop.done < work.steps and not lost:
        loop.step()
        if loop.done % LOOK_EVERY == 0:
            if time.time() > deadline.until:
                return None
            lost = not all(bool(p.isfinite().all()) for p in work.model.parameters())
        if loop.done in looks and not lost:
            curve.append([loop.done, round(work.score(), 5)])
    deadline.last[job.model] = time.time() - began
    score = None if lost or not math.isfinite(curve[-1][1]) else curve[-1][1]
    facts: Line = {"steps": loop.done, "score": score, "curve": curve}
    facts["bits"] = round(workloads.wire_bits(loop.exchange), 5)
    facts["parameters"] = sum(p.numel() for p in work.model.parameters())
    facts |= {"seconds": round(time.time() - began, 2), "workers": workloads.WORKERS, "where": where(setting)}
    return {**identity(job, setting), **facts}


def where(setting: Setting) -> str:
    """On what machine, and in what precision."""
    text = engine.machine(setting.device)
    return text.replace("products in float32", "products in bfloat16 (autocast)") if setting.on_gpu else text


_deadline = Deadline(math.inf)
"""Of a process: it remembers how long its trainings took."""


def _begin(until: float, threads: int) -> None:
    _deadline.until = until
    torch.set_num_threads(threads)


def _run_here(job: Job, setting: Setting) -> Line | None:
    return run(job, setting, _deadline)


def run_all(jobs: Sequence[Job], setting: Setting, until: float, processes: int = 1) -> Iterator[Line]:
    """Lines as they come. Several processes share a GPU, which one small model does not fill."""
    if processes == 1:
        deadline = Deadline(until)
        yield from (line for job in jobs if (line := run(job, setting, deadline)) is not None)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _begin, (until, max(1, torch.get_num_threads() // processes))) as pool:
        found = pool.imap_unordered(partial(_run_here, setting=setting), jobs)
        for _ in jobs:
            try:
                line = next(found)
            except Exception as error:  # noqa: BLE001  the others go on, whatever it was
                tell(f"a training failed: {type(error).__name__}: {error}")
                continue
            if line is not None:
                yield line


def add_settings(parser: argparse.ArgumentParser) -> None:
    """What every command on workloads takes."""
    parser.add_argument("--gpu", action="store_true", help="Train on this machine's GPU.")
    parser.add_argument("--root", type=Path, help="Where CIFAR-10 is, whole or in pieces.")
    parser.add_argument("--text", type=Path, help="A token file of narrowcast_research.text.corpus.")
    parser.add_argument("--tiny", action="store_true", help="Small models on data that every Python has.")
    parser.add_argument("--epochs", type=float, default=Setting.epochs, help="On pictures.")
    parser.add_argument("--batch", type=int, default=Setting.batch, help="Pictures a step, over all workers.")
    parser.add_argument("--steps", type=int, default=Setting.steps, help="On text.")


def setting_of(arguments: argparse.Namespace) -> Setting:
    if arguments.gpu and not torch.cuda.is_available():
        raise ValueError("--gpu: torch sees no GPU here; leave it out")
    names = ("root", "text", "tiny", "epochs", "batch", "steps")
    return Setting("cuda" if arguments.gpu else "cpu", **{name: getattr(arguments, name) for name in names})


def tell(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="The file that lines are appended to.")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="Files or folders of earlier calls.")
    parser.add_argument("--models", nargs="+", default=["davidnet", "lm"], choices=list(SEEDS))
    parser.add_argument("--wires", nargs="+", default=list(WIRES))
    parser.add_argument("--seeds", type=int, help="Of each model; default 5 of davidnet, 3 of others.")
    parser.add_argument("--jobs", type=int, default=1, help="Processes at once.")
    parser.add_argument("--limit", type=float, default=math.inf, help="Seconds that this call may take.")
    add_settings(parser)
    arguments = parser.parse_args(words)
    until, setting = time.time() + arguments.limit, setting_of(arguments)
    known = read([*runs.files_in(arguments.done), arguments.out])
    every = planned(arguments.models, arguments.wires, arguments.seeds)
    missing = [job for job in every if not is_done(job, known, setting)]
    tell(f"{len(every) - len(missing)} of {len(every)} trainings are done")
    for model in {job.model for job in missing}:
        workloads.workload(model, 0, setting)  # unpacks the data once, and finds what is missing before all begin
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    left = len(missing)
    with arguments.out.open("a") as file:
        if arguments.out.stat().st_size and not arguments.out.read_text().endswith("\n"):
            file.write("\n")  # after a line that was cut
        for line in run_all(missing, setting, until, arguments.jobs):
            left -= 1
            file.write(json.dumps(line) + "\n")
            file.flush()
            tell(f"{line['model']} {line['wire']} seed {line['seed']}: {line['score']} in {line['seconds']} s")
    tell(f"{left} trainings are left")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
