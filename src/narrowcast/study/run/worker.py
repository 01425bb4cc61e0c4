"""One rank of a study. Times settings whose wires take turns; rank 0 tells what was found, one JSON line each.

python -m narrowcast.study.run.worker JOB.json     (started by the lab, by mpirun, or as one of several local processes)
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from narrowcast.collectives import Residuals, api
from narrowcast.predict import cluster as cluster_file
from narrowcast.predict import model as model_file
from narrowcast.predict.probe import probe
from narrowcast.predict.profile import Profiler, mean_over_ranks
from narrowcast.simulate.training.batches import Batches
from narrowcast.study import datasets, models
from narrowcast.study.analysis import compressed
from narrowcast.study.cases import PLAIN
from narrowcast.study.run import trainers
from narrowcast.study.run.traffic import Sent, sent
from narrowcast.study.run.trainers import Counted, Trainer

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
Tell = Callable[[dict[str, Any]], None]


# ---- a launch --------------------------------------------------------------------------------------------------------


def run(job: dict[str, Any], tell: Tell) -> None:
    """Every setting of a job, on all ranks of the process group. Collective."""
    if job["probe_seconds"]:
        made = probe(job["probe_wires"], job["probe_seconds"], job["name"])
        tell({"cluster": cluster_file.dump(made)})
    for number, setting in enumerate(job["settings"]):
        if _late(job["deadline"]):
            return
        tell({"begin": number})
        measure = _time if setting["kind"] == "time" else _bus
        for found in measure(setting, job["transport"], job["interface"]):
            tell({"setting": number, **found})


def _late(deadline: float | None) -> bool:
    """Whether the budget is used up, by rank 0's clock."""
    mine = torch.tensor([deadline is not None and time.time() >= deadline], dtype=torch.uint8)
    dist.broadcast(mine, 0)
    return bool(mine.item())


# ---- steps -----------------------------------------------------------------------------------------------------------


class _Turns:
    """The trainers of a setting, and their turns: so many steps in a row, each from a common start."""

    def __init__(self, setting: dict[str, Any], transport: str, interface: str | None) -> None:
        self.setting, self.interface = setting, interface
        self.device = trainers.device_of_rank(transport)
        self.examples = datasets.load(setting["data"], setting["examples"], 0)
        world = dist.get_world_size()
        self.batches = Batches(len(self.examples.x_train), world * setting["batch"], world)
        ways = [(case["wire"], case["algorithm"]) for case in setting["cases"]]
        self.trainers = [trainers.make(setting, self.examples, *way, transport) for way in ways]
        self.steps_ms: list[list[list[float]]] = [[] for _ in self.trainers]
        self.counted: list[list[Counted]] = [[] for _ in self.trainers]
        self.sent: list[list[Sent]] = [[] for _ in self.trainers]
        self._at = 0
        self._barrier = self._idle()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's next examples."""
        chosen = self.batches.indices(self._at, dist.get_rank())
        self._at += 1
        return self.examples.x_train[chosen].to(self.device), self.examples.y_train[chosen].to(self.device)

    def _idle(self) -> Sent:
        """What the interface sends for some barriers: a step begins with one, which is no part of it."""
        dist.barrier()
        before = sent(self.interface)
        for _ in range(BARRIERS):
            dist.barrier()
        return sent(self.interface) - before

    def _between(self, before: Sent, steps: int) -> Sent:
        """What was sent since `before`, without the steps' barriers."""
        found, share = sent(self.interface) - before, (steps + 1) / BARRIERS
        own = [round(share * count) for count in (self._barrier.bytes, self._barrier.packets)]
        return Sent(found.bytes - own[0], found.packets - own[1], found.messages)

    def some(self, trainer: Trainer, count: int) -> list[float]:
        """This rank's seconds of steps; afterwards all ranks are done."""
        seconds = []
        for _ in range(count):
            x, y = self.batch()
            dist.barrier()
            start = time.perf_counter()
            trainer.step(x, y)
            seconds.append(time.perf_counter() - start)
        dist.barrier()
        return seconds

    def turn(self, number: int) -> None:
        """One repeat of one wire; what others left in the caches goes with its first step, which does not count."""
        trainer = self.trainers[number]
        first = _slowest(self.some(trainer, 1))[0]
        count = min(self.setting["steps"], max(LEAST, int(self.setting["seconds"] / max(first, 1e-6))))
        dist.barrier()
        before, counted = sent(self.interface), trainer.counted()
        seconds = self.some(trainer, count)
        self.sent[number].append(self._between(before, count))
        self.counted[number].append(trainer.counted() - counted)
        self.steps_ms[number].append([1e3 * s for s in _slowest(seconds)])

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()


def _time(setting: dict[str, Any], transport: str, interface: str | None) -> list[dict[str, Any]]:
    """All wires of one setting, interleaved."""
    began = time.perf_counter()
    turns = _Turns(setting, transport, interface)
    alone = _Alone(turns) if setting["parallel"] == "data" else None
    for trainer in turns.trainers:
        turns.some(trainer, WARM_UP)
    for _ in range(setting["repeats"]):
        if alone is not None:
            alone.some(ALONE)
        for number in range(len(turns.trainers)):
            turns.turn(number)
    profile = alone.result() if alone is not None else None
    each = (time.perf_counter() - began) / len(turns.trainers)
    values = models.parameters_of(models.build(setting["model"], turns.examples))
    common = {"parameters": values, "batch": setting["batch"], "seconds": each}
    found = [{**common, **_facts(turns, number, profile)} for number in range(len(turns.trainers))]
    turns.close()
    text = None if profile is None else model_file.dump(profile)
    names = [case["case"] for case in setting["cases"]]
    return [{"result": facts, "case": name, "profile": text} for facts, name in zip(found, names, strict=True)]


class _Alone:
    """Steps of the same model without communication, all ranks at once: what is left of a step is communication."""

    def __init__(self, turns: _Turns) -> None:
        module = models.build(turns.setting["model"], turns.examples).to(turns.device)
        x, y = turns.batch()
        self._name = turns.setting["model"]
        self._profiler = Profiler(module, x, lambda scores: cross_entropy(scores, y))
        self.some(WARM_UP)

    def some(self, count: int) -> None:
        for _ in range(count):
            dist.barrier()
            self._profiler.step()

    def result(self) -> model_file.Profile:
        self._profiler.close()
        return mean_over_ranks(self._profiler.result(self._name, WARM_UP))


def _facts(turns: _Turns, number: int, profile: model_file.Profile | None) -> dict[str, Any]:
    """The result fields of one wire, the same on all ranks."""
    steps_ms = turns.steps_ms[number]
    counts = [len(repeat) for repeat in steps_ms]
    each = [
        [c.sent / n, c.plain / n, 1e3 * c.encode / n, 1e3 * c.decode / n, s.bytes / n, s.overhead / n]
        for c, s, n in zip(turns.counted[number], turns.sent[number], counts, strict=True)
    ]
    mean = _mean([statistics.median(column) for column in zip(*each, strict=True)])
    claimed, plain, encode, decode, counted, headers = mean
    whole = turns.interface is not None
    return {
        "steps_ms": steps_ms,
        "compressed": turns.trainers[number].compressed(),
        "breakdown_ms": _breakdown(statistics.median(itertools.chain(*steps_ms)), encode, decode, profile),
        "bytes": {
            "claimed": claimed,
            "counted": counted if whole else None,
            "protocol": headers if whole else None,
            "plain": plain,
        },
    }


def _breakdown(
    step: float, encode: float, decode: float, profile: model_file.Profile | None
) -> dict[str, float] | None:
    """Milliseconds; `wire` is what communication adds beside the codec, hidden parts left out."""
    if profile is None:
        return None
    compute = {key: 1e3 * getattr(profile, key) for key in ("forward", "backward", "update")}
    rest = max(0.0, step - sum(compute.values()) - encode - decode)
    return {**compute, "encode": encode, "decode": decode, "wire": rest}


# ---- collectives alone -----------------------------------------------------------------------------------------------


def _bus(setting: dict[str, Any], transport: str, interface: str | None) -> list[dict[str, Any]]:
    """All sizes and wires, interleaved."""
    began = time.perf_counter()
    channel = trainers.mpi_ranks() if transport == "mpi" else None
    device = trainers.device_of_rank(transport)
    calls = [_call(case, channel, setting["nodes"], device) for case in setting["cases"]]
    for call in calls:
        call()
    seconds: list[list[float]] = [[] for _ in calls]
    spent = [0.0 for _ in calls]
    for _ in range(setting["repeats"]):
        for number, call in enumerate(calls):
            if spent[number] < setting["seconds"] or len(seconds[number]) < LEAST:
                dist.barrier()
                start = time.perf_counter()
                call()
                slowest = _slowest([time.perf_counter() - start])[0]
                seconds[number].append(slowest)
                spent[number] += slowest
    if channel is not None:
        channel.close()
    each = (time.perf_counter() - began) / len(calls)
    return [
        {"case": case["case"], "result": {**_bus_facts(case["bytes"], found), **_bus_share(case), "seconds": each}}
        for case, found in zip(setting["cases"], seconds, strict=True)
    ]


def _bus_facts(size: int, seconds: list[float]) -> dict[str, Any]:
    world = dist.get_world_size()
    gbps = 2 * (world - 1) / world * size / statistics.median(seconds) / 1e9
    return {"bytes": size, "ms": [1e3 * s for s in seconds], "bus_gbps": gbps}


def _bus_share(case: dict[str, Any]) -> dict[str, Any]:
    return {"compressed": compressed.of_message(case["wire"])}


def _call(
    case: dict[str, Any], channel: Any, nodes: Sequence[Sequence[int]] | None, device: torch.device
) -> Callable[[], None]:
    x = torch.linspace(-1, 1, case["bytes"] // 4, device=device)
    wire, algorithm = case["wire"], case["algorithm"]
    if wire == PLAIN and channel is None:
        return lambda: _plain_sum(x)
    residuals = Residuals.zeros(x.numel()) if wire.endswith("+ef") or "+ef+" in wire else None
    options = {"algorithm": "native" if wire == PLAIN else algorithm, "residuals": residuals, "channel": channel}

    def call() -> None:
        chosen = nodes if algorithm == "hierarchical" else None
        api.all_reduce(x, wire, dist.ReduceOp.AVG, step=0, nodes=chosen, **options)

    return call


def _plain_sum(x: torch.Tensor) -> None:
    dist.all_reduce(x)
    x.div_(dist.get_world_size())
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


# ---- over the ranks --------------------------------------------------------------------------------------------------


def _slowest(seconds: Sequence[float]) -> list[float]:
    mine = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return [float(s) for s in mine]


def _mean(values: Sequence[float]) -> list[float]:
    mine = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mine)
    return [float(v) / dist.get_world_size() for v in mine]


# ---- as a process ----------------------------------------------------------------------------------------------------


def begin(transports: Sequence[str]) -> None:
    """Join the process group that the environment describes."""
    torch.set_num_threads(1)
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        os.environ.setdefault("RANK", os.environ["OMPI_COMM_WORLD_RANK"])
        os.environ.setdefault("LOCAL_RANK", os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    if "mpi" in transports:
        from mpi4py import MPI  # noqa: F401  before Gloo begins threads of its own
    if "nccl" in transports:
        torch.cuda.set_device(trainers.device_of_rank("nccl"))
    dist.init_process_group("cpu:gloo,cuda:nccl" if "nccl" in transports else "gloo", timeout=TIMEOUT)


def _tell(message: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
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
    job = json.loads(file.read_text())
    try:
        begin([job["transport"]])
        if job.get("remove"):  # every rank has joined, so every rank has read it
            file.unlink(missing_ok=True)
        run(job, _tell)
    except Exception as error:
        # one line on every rank: the study shows that of the rank that failed first
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
        sys.stdout.write(f"{MARK}{json.dumps({'error': text})}\n")
        sys.stdout.flush()
        raise
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
