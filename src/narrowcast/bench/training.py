"""Steps of one task with several wires, in turn: what the benches of DDP and FSDP2 share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowcast.bench.ranks import Row
from narrowcast.bench.tasks import Task
from narrowcast.measure import DeviceClock, Timing, interleaved, link_bytes, tell_progress, until_all_done
from narrowcast.parallel import Handle

WARM_UP = 3
"""Buckets are rebuilt after the first step; PowerSGD starts compressing after its second."""
STEPS = 7


class WireTrainer:
    """A model with one wire. In steps before `go` its weights stay, so that wires can be compared."""

    def __init__(
        self, task: Task, model: nn.Module, handle: Handle | None, device: torch.device, autocast: bool
    ) -> None:
        self.model, self.handle, self.device = model, handle, device
        self.batch = task.batch_on(dist.get_rank(), device)
        self.optimizer = task.optimizer(model.parameters())
        self.loss = torch.zeros(())
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=autocast)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._set_rates([0.0] * len(self._rates))

    def _set_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def go(self) -> None:
        """From now on weights move."""
        self._set_rates(self._rates)

    def step(self, communicate: bool = True) -> None:
        with nullcontext() if communicate else self.model.no_sync():  # type: ignore[operator]
            self.optimizer.zero_grad()
            with self._autocast:
                loss = self.model(*self.batch)
            loss.backward()
            self.optimizer.step()
        self.loss = loss.detach()

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def close(self) -> None:
        if self.handle is not None:
            self.handle.detach()


def warm_up(wire: str, trainer: WireTrainer) -> float:
    """The first steps of a wire; what this host's links carried in the last one, in bytes. Collective."""
    tell_progress(f"{wire}: {WARM_UP} steps that do not count")
    for _ in range(WARM_UP - 1):
        trainer.step()
    DeviceClock(trainer.device).wait()
    dist.barrier()
    before = link_bytes()
    trainer.step()
    DeviceClock(trainer.device).wait()
    dist.barrier()
    return float(link_bytes() - before)


def in_turn(candidates: Mapping[str, Callable[[], object]], steps: int, device: torch.device) -> dict[str, Timing]:
    """Steps of all candidates, one after another in each round, until the slowest rank is done. Collective."""
    clock = DeviceClock(device)

    def tell(seconds: Mapping[str, Sequence[float]]) -> None:
        so_far = ", ".join(f"{name} {1e3 * median(times):.1f}" for name, times in seconds.items())
        tell_progress(f"round {len(next(iter(seconds.values())))} of {steps}, median ms: {so_far}")

    def timed(call: Callable[[], object], calls: int) -> float:
        return until_all_done(call, clock, calls)

    return interleaved(candidates, steps, first_calls=0, timed=timed, after_round=tell)


def times_of(timing: Timing) -> Row:
    return {"step": timing.median, "fastest": min(timing.seconds), "slowest": max(timing.seconds)}
