"""One rank of `narrowcast validate --lab`: real DDP steps of models with each wire in turn; rank 0 prints JSON.

python -m narrowcast_research.validation.lab_worker gloo|nccl MODEL,MODEL... ROUNDS WIRE...
fp32 is DDP as it is, without a hook; bf16-hook and powersgd-4 are torch's. After each round there is a line with all
that was measured so far.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from narrowcast.bench import ddp, training
from narrowcast.measure import DeviceClock, rank_device, run_rank, tell_progress, until_all_done
from narrowcast.predict import model as model_file
from narrowcast.predict import profile as profiling
from narrowcast_research.validation.lab_models import MODELS

PLAIN = "fp32"
PROFILED = 2
"""Steps without communication in a round."""


class LabSteps:
    """Wires that join one by one; each round has a step of all that are there, and some without communication."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.task, self.device = name, MODELS[name], device
        module, (batch,) = self.task.model_on(device), self.task.batch_on(dist.get_rank(), device)
        optimizer = self.task.optimizer(module.parameters())
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        self.profiler = profiling.Profiler(module, batch, lambda loss: loss, optimizer, self.task.bf16)
        self.trainers: dict[str, training.WireTrainer] = {}
        self.seconds: dict[str, list[float]] = {}

    def warm_up(self) -> None:
        for _ in range(profiling.WARM_UP):
            self._profile()

    def join(self, wire: str) -> None:
        """Buckets are made anew after the first step, and signatures are agreed at the first call of each size."""
        tell_progress(f"{wire}: {training.WARM_UP} steps that do not count")
        first = next(iter(self.trainers.values()), None)
        named = ddp.PLAIN if wire == PLAIN else wire
        trainer = ddp.make_trainer(self.task, named, self.device, first, bucket_views=False)
        for _ in range(training.WARM_UP):
            trainer.step()
        self.trainers[wire], self.seconds[wire] = trainer, []

    def round(self) -> dict[str, object]:
        """The seconds of the slowest rank."""
        # steps without communication in every round, so that they see the same machine
        for _ in range(PROFILED):
            self._profile()
        for wire, trainer in self.trainers.items():
            self.seconds[wire].append(until_all_done(trainer.step, DeviceClock(self.device)))
        alone = profiling.mean_over_ranks(self.profiler.result(self.name))
        return {"model": self.name, "profile": model_file.dump(alone), "seconds": self.seconds}

    def _profile(self) -> None:
        dist.barrier()
        self.profiler.step()

    def close(self) -> None:
        self.profiler.close()
        for trainer in self.trainers.values():
            trainer.close()


def measure(gpu: bool, names: list[str], rounds: int, wires: list[str]) -> Iterator[dict[str, object]]:
    for name in names:
        yield from _measure_one(name, rank_device(gpu), rounds, wires)
        gc.collect()  # a model's memory is the next one's
        if gpu:
            torch.cuda.empty_cache()


def _measure_one(name: str, device: torch.device, rounds: int, wires: list[str]) -> Iterator[dict[str, object]]:
    steps = LabSteps(name, device)
    steps.warm_up()
    for wire in wires:
        steps.join(wire)
        yield steps.round()
    for _ in range(rounds - 1):
        yield steps.round()
    steps.close()


if __name__ == "__main__":
    on_gpu = sys.argv[1] == "nccl"
    run_rank(lambda: measure(on_gpu, sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4:]), on_gpu)
