"""DDP training steps on rate-limited links: plain, torch's own hooks, and `attach`, all in the same run.

A rank, as the lab (or torchrun) starts it: python -m narrowcast.bench.ddp STEPS WIRE...
A wire is a codec spec, "plain" (DDP without a hook), "fp16-hook" or "powersgd-RANK" (torch's own hooks).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import Linear, Module, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from narrowcast.lab import Lab
from narrowcast.measure import run_rank, until_all_done
from narrowcast.parallel import Handle, attach

WIRES = ("plain", "fp16-hook", "powersgd-4", "bf16", "int8/256", "e5m2+aps", "int4/128", "int4/128+ef")
STEPS = 5
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(8 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30), "MALLOC_ARENA_MAX": "1"}
"""glibc otherwise gives the memory of large gradients back at every step, and getting it anew takes a fifth of the
compute time. For all wires alike, the plain one included."""
WIDTHS = (784, 4096, 4096, 1024, 10)
BATCH = 16
WARM_UP = 3
"""Buckets are rebuilt after the first step; PowerSGD starts compressing after its second."""


def run(hosts: int, rate: str | None, wires: Sequence[str] = WIRES, steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """A row for each wire: step time, the part of it that communication adds, and the error of the mean gradient."""
    with Lab(hosts, rate) as lab:
        command = [sys.executable, "-m", __name__, str(steps), *wires]
        done = lab.run(command, env=KEEP_MEMORY, capture=True, timeout=1800).check()
    yield from done.json_lines()


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


class TimedTraining:
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

        def train() -> None:
            with nullcontext() if communicate else self.model.no_sync():
                self.optimizer.zero_grad()
                cross_entropy(self.model(x), y).backward()
                self.optimizer.step()

        return until_all_done(train)

    def gradients(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


def gradient_error(wire: str) -> float:
    """Relative L2 difference between the wire's mean gradient and the plain one, in the last warm-up step."""
    means = []
    for candidate in ("plain", wire):
        trainer = TimedTraining(candidate)
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(WARM_UP + 1):
            trainer.step()
        means.append(trainer.gradients())
        if trainer.handle is not None:
            trainer.handle.detach()
    return float((means[1] - means[0]).norm() / means[0].norm())


def measure(wire: str, steps: int) -> dict[str, Any]:
    error = 0.0 if wire == "plain" else gradient_error(wire)
    trainer = TimedTraining(wire)
    for _ in range(WARM_UP):
        trainer.step()
    seconds = [trainer.step() for _ in range(steps)]
    stats = trainer.handle.stats() if trainer.handle is not None else None
    compute = [trainer.step(communicate=False) for _ in range(steps)]
    if trainer.handle is not None:
        trainer.handle.detach()
    step, alone = statistics.median(seconds), statistics.median(compute)
    return {"wire": wire, "step": step, "compute": alone, "exposed": step - alone, "error": error, "stats": stats}


if __name__ == "__main__":
    run_rank(lambda: (measure(wire, int(sys.argv[1])) for wire in sys.argv[2:]))
