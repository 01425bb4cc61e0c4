"""One rank of `narrowcast bench ddp`: step times of an MLP under DDP with different hooks; rank 0 prints JSON lines.

Started by the lab (or torchrun): python -m narrowcast.bench.ddp_worker STEPS WIRE...
A wire is a codec spec, "plain" (DDP without a hook), "fp16-hook" or "powersgd-RANK" (torch's own hooks).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import Linear, Module, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from narrowcast.parallel import Handle, attach

WIDTHS = (784, 4096, 4096, 1024, 10)
BATCH = 16
WARM_UP = 3
"""Buckets are rebuilt after the first step; PowerSGD starts compressing after its second."""


def mlp() -> Sequential:
    """24 million parameters, the same on every rank."""
    torch.manual_seed(0)
    layers: list[Module] = []
    for wide, narrow in pairwise(WIDTHS):
        layers += [Linear(wide, narrow), ReLU()]
    return Sequential(*layers[:-1])


def attach_wire(model: DistributedDataParallel, wire: str) -> Handle | None:
    if wire == "fp16-hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif wire.startswith("powersgd-"):
        rank = int(wire.removeprefix("powersgd-"))
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif wire != "plain":
        return attach(model, wire)
    return None


class Trainer:
    """A model, its data, and steps that are timed until the slowest rank is done."""

    def __init__(self, wire: str) -> None:
        # torch's PowerSGD hook waits inside a callback: with two buckets under way both of Gloo's threads wait for ever
        self.model = DistributedDataParallel(
            mlp(), bucket_cap_mb=1024 if wire.startswith("powersgd") else None, gradient_as_bucket_view=True
        )
        self.handle = attach_wire(self.model, wire)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def step(self, communicate: bool = True) -> float:
        x = torch.randn(BATCH, WIDTHS[0], generator=self.generator)
        y = torch.randint(0, WIDTHS[-1], (BATCH,), generator=self.generator)
        dist.barrier()
        start = time.perf_counter()
        with nullcontext() if communicate else self.model.no_sync():
            self.optimizer.zero_grad()
            cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        dist.barrier()
        return time.perf_counter() - start

    def gradients(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


def gradient_error(wire: str) -> float:
    """Relative L2 difference between the wire's mean gradient and the plain one, in the last warm-up step."""
    means = []
    for candidate in ("plain", wire):
        trainer = Trainer(candidate)
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(WARM_UP + 1):
            trainer.step()
        means.append(trainer.gradients())
        if trainer.handle is not None:
            trainer.handle.detach()
    return float((means[1] - means[0]).norm() / means[0].norm())


def measure(wire: str, steps: int) -> dict[str, Any]:
    error = 0.0 if wire == "plain" else gradient_error(wire)
    trainer = Trainer(wire)
    for _ in range(WARM_UP):
        trainer.step()
    seconds = [trainer.step() for _ in range(steps)]
    stats = trainer.handle.stats() if trainer.handle is not None else None
    compute = [trainer.step(communicate=False) for _ in range(steps)]
    if trainer.handle is not None:
        trainer.handle.detach()
    step, alone = statistics.median(seconds), statistics.median(compute)
    return {"wire": wire, "step": step, "compute": alone, "exposed": step - alone, "error": error, "stats": stats}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps, wires = int(sys.argv[1]), sys.argv[2:]
    for wire in wires:
        facts = measure(wire, steps)
        if dist.get_rank() == 0:
            print(json.dumps(facts), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
