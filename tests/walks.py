"""`python -m walks` in tests/: how far a reader has to walk to follow one job, counted with sys.settrace.

Columns: calls; functions that were called; files they stand in; changes of file between one call and the next; and the
same with returns: how often control passes from one file of src/narrowcast to another. All threads of a process
count, each by itself, since how threads take turns differs from run to run. Of several ranks rank 0 counts.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from dist.pool import Crew
from torch import nn

import narrowcast as nc

SOURCE = str(Path(nc.__file__).parent) + "/"
SPEC = "int8/256"


@dataclass(frozen=True)
class Walk:
    """What one job passed."""

    calls: int
    functions: int
    files: tuple[str, ...]
    changes: int
    """Between calls."""
    pairs: Counter[tuple[str, str]]
    """How often control passed from a file to another, by calls and returns."""

    @property
    def with_returns(self) -> int:
        return self.pairs.total()


class Counting:
    """Counts what all threads that start inside of `installed` do while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self._calls: list[CodeType] = []
        self._changes = 0
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._here = threading.local()

    @contextmanager
    def installed(self) -> Iterator[Counting]:
        """From before the threads of a channel start: a thread that runs already cannot be traced."""
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            yield self
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if event == "line" or not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_lines = False
        if not self.on:
            return self._trace
        file = frame.f_code.co_filename
        if event == "call":
            self._calls.append(frame.f_code)
            self._changes += getattr(self._here, "called", file) != file
            self._here.called = file
        if event in ("call", "return"):
            before = getattr(self._here, "file", file)
            if before != file:
                self._pairs[before.removeprefix(SOURCE), file.removeprefix(SOURCE)] += 1
            self._here.file = file
        return self._trace

    def walk(self) -> Walk:
        files = sorted({code.co_filename.removeprefix(SOURCE) for code in self._calls})
        return Walk(len(self._calls), len(set(self._calls)), tuple(files), self._changes, self._pairs)


def counted(job: Callable[[], object], warm_up: int = 1) -> Walk:
    """The walk of a job that was done before so many times."""
    with Counting().installed() as counting:
        for _ in range(warm_up):
            job()
        counting.on = True
        job()
        counting.on = False
    return counting.walk()


def _bucket_on_a_rank(group: dist.ProcessGroup) -> Walk:
    """Rank 0 counts a backward pass of a model with one bucket and one codec, from the hook to the last callback."""
    with Counting().installed() as counting:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64, bias=False), process_group=group)
        handle = nc.attach(model, SPEC, algorithm="two_shot", min_values=0)
        for step in range(4):
            loss = model(torch.ones(2, 64)).square().mean()
            counting.on = step == 3
            loss.backward()
        counting.on = False
        handle.detach()
    return counting.walk()


def ddp_bucket() -> Walk:
    with Crew(2, _bucket_on_a_rank, timeout=30) as crew:
        outcomes = [crew.outcome(rank) for rank in range(2)]
    for outcome in outcomes:
        assert outcome is not None
        assert not outcome.error, outcome.traceback
    return outcomes[0].value  # type: ignore[union-attr, no-any-return]


def encode_warm() -> Walk:
    codec, x = nc.codec(SPEC), torch.linspace(-1, 1, 4096)
    return counted(lambda: codec.encode(x))


def world_of_four() -> Walk:
    x = [torch.linspace(-1, rank + 1, 4096) for rank in range(4)]
    world = nc.simulate.World(4, "two_shot", SPEC)
    return counted(lambda: world.all_reduce(x, "avg", step=1))


def predicted_cell() -> Walk:
    from narrowcast.predict import Setup, Sweep, find_model, load_cluster, presets

    cluster = load_cluster(presets()[0])
    profile = find_model("resnet50", cluster=cluster, batch=32).profile
    return counted(lambda: Sweep(profile, cluster).cell(Setup(8, SPEC)), warm_up=0)


STUDY = """
name = "walk"
primary = "int8/256"
baseline = "int8/256"
wires = ["int8/256"]
[[grid]]
kind = "predicted"
models = ["alexnet"]
clusters = ["dgx-1"]
transport = ["nccl"]
workers = [2]
"""


def study_case() -> Walk:
    from narrowcast.study.execution.runner import Options, run
    from narrowcast.study.file import parse

    study = parse(STUDY)

    def job() -> None:
        with TemporaryDirectory() as folder:
            outcome = run(study, Options(Path(folder), launcher="local", quiet=True, processes=1))
            assert outcome.done == outcome.total == 1, outcome

    return counted(job)


WALKS: dict[str, Callable[[], Walk]] = {
    "DDP bucket, two_shot, 2 ranks": ddp_bucket,
    "encode, warm": encode_warm,
    "World.all_reduce of 4": world_of_four,
    "one predicted cell": predicted_cell,
    "one study case": study_case,
}


def main() -> None:
    parser = argparse.ArgumentParser("python -m walks", description="How far a reader has to walk to follow one job.")
    parser.add_argument("name", nargs="?", default="", help="Part of a walk's name; default all of them.")
    parser.add_argument("--pairs", action="store_true", help="Which file hands over to which, and the files.")
    asked = parser.parse_args()
    chosen = {name: walk for name, walk in WALKS.items() if asked.name in name}
    if not chosen:
        parser.error(f"no walk has {asked.name!r} in its name; there are: {'; '.join(WALKS)}")
    print(f"{'walk':32}{'calls':>8}{'functions':>11}{'files':>7}{'changes':>9}{'with returns':>14}")
    for name, walk in chosen.items():
        made = walk()
        print(f"{name:32}{made.calls:8}{made.functions:11}{len(made.files):7}{made.changes:9}{made.with_returns:14}")
        if asked.pairs:
            for (one, other), count in made.pairs.most_common():
                print(f"    {count:4} {one} -> {other}")
            print("   ", *made.files, sep="\n    ")


if __name__ == "__main__":
    main()
