"""One rank of `narrowcast validate --lab`: real DDP steps of one model with each wire in turn; rank 0 prints JSON.

python -m narrowcast_research.validation.lab_worker gloo|nccl MODEL ROUNDS WIRE...
fp32 is DDP as it is, without a hook.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from narrowcast.measure import DeviceClock, rank_device, run_rank, until_all_done
from narrowcast.parallel import attach
from narrowcast.predict import model as model_file
from narrowcast.predict import profile as profiling
from narrowcast_research.validation.lab_models import BATCH, MODELS, build

WARM_UP = 3
"""DDP makes its buckets anew after the first step, and signatures are agreed at the first call of each size."""


class Trainer:
    """DDP with one wire."""

    def __init__(self, name: str, wire: str, device: torch.device) -> None:
        module, self.batch = _on(device, name)
        self.model = DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)
        self.clock = DeviceClock(device)
        self.handle = None if wire == "fp32" else attach(self.model, wire)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def step(self) -> float:
        """The slowest rank's seconds."""
        return until_all_done(self._train, self.clock)

    def _train(self) -> None:
        self.optimizer.zero_grad()
        profiling.default_loss(self.model(self.batch)).backward()
        self.optimizer.step()


def _on(device: torch.device, name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model and its batch."""
    module = build(name)
    return module.to(device), profiling.example_batch(module, MODELS[name].shape, BATCH).to(device)


def measure(gpu: bool, name: str, rounds: int, wires: list[str]) -> Iterator[dict[str, object]]:
    device = rank_device(gpu)
    profiler = profiling.Profiler(*_on(device, name))
    trainers = {wire: Trainer(name, wire, device) for wire in wires}
    seconds: dict[str, list[float]] = {wire: [] for wire in wires}
    for number in range(WARM_UP + rounds):
        # steps without communication in every round, so that they see the same machine
        for _ in range(2):
            dist.barrier()
            profiler.step()
        for wire, trainer in trainers.items():
            spent = trainer.step()
            if number >= WARM_UP:
                seconds[wire].append(spent)
    profiler.close()
    alone = model_file.dump(profiling.mean_over_ranks(profiler.result(name)))
    for trainer in trainers.values():
        if trainer.handle is not None:
            trainer.handle.detach()
    yield {"profile": alone, "seconds": seconds}


if __name__ == "__main__":
    on_gpu = sys.argv[1] == "nccl"
    run_rank(lambda: measure(on_gpu, sys.argv[2], int(sys.argv[3]), sys.argv[4:]), on_gpu)
