"""One rank of a study. Times settings whose wires take turns; rank 0 tells what was found, one JSON line each.

python -m narrowcast.study.execution.worker JOB.json   (started by the lab, by mpirun, or as one of several processes)
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from narrowcast import measure as measuring
from narrowcast.measure import InterfaceCount, count_interface, first_decides, from_barrier, mean, slowest
from narrowcast.predict import Profile, Profiler, dump_cluster, dump_profile, mean_over_ranks, measure_cluster
from narrowcast.simulate import Batches
from narrowcast.study import datasets, jobs, models
from narrowcast.study.cases import PLAIN, Case, Setting
from narrowcast.study.execution import trainers
from narrowcast.study.execution.trainers import Counted, Trainer
from narrowcast.study.jobs import CaseMeasured, RankJob, RankMessage
from narrowcast.study.spec_bits import message_share

MARK = "@narrowcast "
PARENT = "NARROWCAST_STUDY_PARENT"
"""Says which process a local rank belongs to: it ends with that."""
WARM_UP = 3
"""DDP makes its buckets anew after the first step, and signatures are agreed at the first call of each size."""
ALONE = 2
"""Steps without communication in each repeat, so that they see the same machine."""
BARRIERS = 20
LEAST = 2
"""Steps that are timed however slow they are."""
TIMEOUT = timedelta(seconds=120)
Tell = Callable[[RankMessage], None]


def run(job: RankJob, tell: Tell) -> None:
    """Every setting of a job, on all ranks of the process group. Collective."""
    if job.probe_seconds:
        made = measure_cluster(job.probe_wires, job.probe_seconds, job.name)
        tell(jobs.LinkMeasured(dump_cluster(made)))
    for number, setting in enumerate(job.settings):
        if first_decides(job.deadline is not None and time.time() >= job.deadline):
            return
        tell(jobs.SettingBegins(number))
        measure = _time if setting.first.kind == "time" else _bus
        for message in measure(setting, number, job):
            tell(message)


class _Turns:
    """The trainers of a setting, and their turns: so many steps in a row, each from a common start."""

    def __init__(self, setting: Setting, job: RankJob) -> None:
        self.first, self.how, self.interface = setting.first, setting.first.how, job.interface
        self.device = trainers.device_of_rank(job.transport)
        self.examples = datasets.load(self.first.data, self.how.examples, 0)
        world = dist.get_world_size()
        self.batches = Batches(len(self.examples.x_train), world * self.how.batch, world)
        self.trainers = [trainers.make(case, self.examples) for case in setting.cases]
        self.steps_ms: list[list[list[float]]] = [[] for _ in self.trainers]
        self.counted: list[list[Counted]] = [[] for _ in self.trainers]
        self.sent: list[list[InterfaceCount]] = [[] for _ in self.trainers]
        self._at = 0
        self._barrier = self._idle()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's next examples."""
        chosen = self.batches.indices(self._at, dist.get_rank())
        self._at += 1
        return self.examples.x_train[chosen].to(self.device), self.examples.y_train[chosen].to(self.device)

    def _idle(self) -> InterfaceCount:
        """What the interface sends for some barriers: a step begins with one, which is no part of it."""
        dist.barrier()
        before = count_interface(self.interface)
        for _ in range(BARRIERS):
            dist.barrier()
        return count_interface(self.interface) - before

    def _sent_since(self, before: InterfaceCount, steps: int) -> InterfaceCount:
        """What was sent since `before`, without the steps' barriers."""
        sent, share = count_interface(self.interface) - before, (steps + 1) / BARRIERS
        own = [round(share * count) for count in (self._barrier.bytes, self._barrier.packets)]
        return InterfaceCount(sent.bytes - own[0], sent.packets - own[1], sent.messages)

    def some(self, trainer: Trainer, count: int) -> list[float]:
        """This rank's seconds of steps; afterwards all ranks are done."""
        seconds = []
        for _ in range(count):
            batch = self.batch()
            seconds.append(from_barrier(functools.partial(trainer.step, *batch)))
        dist.barrier()
        return seconds

    def turn(self, number: int) -> None:
        """One repeat of one wire; what others left in the caches goes with its first step, which does not count."""
        trainer = self.trainers[number]
        first = slowest(self.some(trainer, 1))[0]
        count = min(self.how.steps, max(LEAST, int(self.how.seconds / max(first, 1e-6))))
        dist.barrier()
        before, counted = count_interface(self.interface), trainer.counted()
        seconds = self.some(trainer, count)
        self.sent[number].append(self._sent_since(before, count))
        self.counted[number].append(trainer.counted() - counted)
        self.steps_ms[number].append([1e3 * s for s in slowest(seconds)])

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()


def _time(setting: Setting, number: int, job: RankJob) -> list[CaseMeasured]:
    """All wires of one setting, interleaved."""
    began = time.perf_counter()
    turns = _Turns(setting, job)
    alone = _Alone(turns) if turns.first.parallel == "data" else None
    for trainer in turns.trainers:
        turns.some(trainer, WARM_UP)
    for _ in range(turns.how.repeats):
        if alone is not None:
            alone.some(ALONE)
        for which in range(len(turns.trainers)):
            turns.turn(which)
    profile = alone.result() if alone is not None else None
    each = (time.perf_counter() - began) / len(turns.trainers)
    values = models.parameters_of(models.build(turns.first.model, turns.examples))
    common = {"parameters": values, "batch": turns.how.batch, "seconds": each}
    results = [{**common, **_facts(turns, which, profile)} for which in range(len(turns.trainers))]
    turns.close()
    text = None if profile is None else dump_profile(profile)
    return [CaseMeasured(number, case.id, facts, text) for case, facts in zip(setting.cases, results, strict=True)]


class _Alone:
    """Steps of the same model without communication, all ranks at once: what is left of a step is communication."""

    def __init__(self, turns: _Turns) -> None:
        module = models.build(turns.first.model, turns.examples).to(turns.device)
        x, y = turns.batch()
        self._name = turns.first.model
        self._profiler = Profiler(module, x, lambda scores: cross_entropy(scores, y))
        self.some(WARM_UP)

    def some(self, count: int) -> None:
        for _ in range(count):
            dist.barrier()
            self._profiler.step()

    def result(self) -> Profile:
        self._profiler.close()
        return mean_over_ranks(self._profiler.result(self._name, WARM_UP))


def _facts(turns: _Turns, number: int, profile: Profile | None) -> dict[str, Any]:
    """The result fields of one wire, the same on all ranks."""
    steps_ms = turns.steps_ms[number]
    counts = [len(repeat) for repeat in steps_ms]
    each = [
        [c.sent / n, c.plain / n, 1e3 * c.encode / n, 1e3 * c.decode / n, s.bytes / n, s.overhead / n]
        for c, s, n in zip(turns.counted[number], turns.sent[number], counts, strict=True)
    ]
    columns = [statistics.median(column) for column in zip(*each, strict=True)]
    claimed, plain, encode, decode, *counted = mean(columns)
    sent, headers = counted if turns.interface is not None else (None, None)
    return {
        "steps_ms": steps_ms,
        "compressed": turns.trainers[number].compressed(),
        "breakdown_ms": _breakdown(statistics.median(itertools.chain(*steps_ms)), encode, decode, profile),
        "bytes": {"claimed": claimed, "counted": sent, "protocol": headers, "plain": plain},
    }


def _breakdown(step: float, encode: float, decode: float, profile: Profile | None) -> dict[str, float] | None:
    """Milliseconds; `wire` is what communication adds beside the codec, hidden parts left out."""
    if profile is None:
        return None
    compute = {key: 1e3 * getattr(profile, key) for key in ("forward", "backward", "update")}
    rest = max(0.0, step - sum(compute.values()) - encode - decode)
    return {**compute, "encode": encode, "decode": decode, "wire": rest}


def _bus(setting: Setting, number: int, job: RankJob) -> list[CaseMeasured]:
    """All sizes and wires, interleaved."""
    began, how = time.perf_counter(), setting.first.how
    channel = trainers.mpi_ranks() if job.transport == "mpi" else None
    device = trainers.device_of_rank(job.transport)
    calls = [_call(case, channel, device) for case in setting.cases]
    for call in calls:
        call()
    seconds: list[list[float]] = [[] for _ in calls]
    spent = [0.0 for _ in calls]
    for _ in range(how.repeats):
        for which, call in enumerate(calls):
            if spent[which] < how.seconds or len(seconds[which]) < LEAST:
                seconds[which] += slowest([from_barrier(call, measuring.DeviceClock(device))])
                spent[which] += seconds[which][-1]
    if channel is not None:
        channel.close()
    each = (time.perf_counter() - began) / len(calls)
    return [
        CaseMeasured(number, case.id, {**_bus_facts(case, times), "seconds": each})
        for case, times in zip(setting.cases, seconds, strict=True)
    ]


def _bus_facts(case: Case, seconds: list[float]) -> dict[str, Any]:
    assert case.bytes is not None
    world = dist.get_world_size()
    gbps = 2 * (world - 1) / world * case.bytes / statistics.median(seconds) / 1e9
    times = [1e3 * s for s in seconds]
    return {"bytes": case.bytes, "ms": times, "bus_gbps": gbps, "compressed": message_share(case.wire)}


def _call(case: Case, channel: Any, device: torch.device) -> Callable[[], None]:
    assert case.bytes is not None
    x = torch.linspace(-1, 1, case.bytes // 4, dtype=torch.float32, device=device)
    if case.wire == PLAIN and channel is None:
        return lambda: _plain_mean(x)
    algorithm = "native" if case.wire == PLAIN else case.algorithm
    hosts = case.layout.nodes if case.algorithm == "hierarchical" else None
    return measuring.WireSum(x, case.wire, op=dist.ReduceOp.AVG, algorithm=algorithm, nodes=hosts, channel=channel)


def _plain_mean(x: torch.Tensor) -> None:
    dist.all_reduce(x)
    x.div_(dist.get_world_size())


def _group(transport: str) -> AbstractContextManager[None]:
    """The process group that the environment describes, of a backend for the transport."""
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        os.environ.setdefault("RANK", os.environ["OMPI_COMM_WORLD_RANK"])
        os.environ.setdefault("LOCAL_RANK", os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    if transport == "mpi":
        from mpi4py import MPI  # noqa: F401  before Gloo begins threads of its own
    return measuring.process_group(transport == "nccl", TIMEOUT)


def _print(message: RankMessage) -> None:
    sys.stdout.write(f"{MARK}{message.to_json()}\n")
    sys.stdout.flush()


def end_with_parent() -> None:
    """A process that another one started for a study ends when that one does, however it does."""
    parent = os.environ.get(PARENT)
    if parent is not None and sys.platform.startswith("linux"):
        from narrowcast.lab import syscalls

        syscalls.die_with_parent()
        # under mpirun the parent is mpirun's; either may have ended before we asked to be killed with it
        ours = os.getppid() if "OMPI_COMM_WORLD_RANK" not in os.environ else int(parent)
        if ours != int(parent) or syscalls.started(int(parent)) is None:
            sys.exit("the study that started this rank is gone")


def main() -> None:
    end_with_parent()
    file = Path(sys.argv[1])
    job = RankJob.from_json(file.read_text())
    try:
        with _group(job.transport):
            # every rank has joined, so every rank has read it
            file.unlink(missing_ok=True)
            # all ranks find the same: rank 0 says it
            run(job, _print if dist.get_rank() == 0 else lambda message: None)
    except Exception as error:
        # one line on every rank: the study shows that of the rank that failed first
        _print(jobs.RankFailed(f"{type(error).__name__}: {error}".replace("\n", " ")))
        raise


if __name__ == "__main__":
    main()
