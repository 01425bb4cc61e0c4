"""Which examples each worker sees at each step, and its random numbers: functions of the seed, so a run can go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from narrowcast.kernels import derive

USES = ("noise", "order", "augment")
Augment = Callable[[Tensor, torch.Generator], Tensor]


@lru_cache(maxsize=2)
def _shuffle(examples: int, seed: int, epoch: int, device: torch.device | None) -> Tensor:
    """Drawn on the CPU, so that all devices see the same order; copied once an epoch."""
    generator = torch.Generator().manual_seed(seed_of(seed, epoch, 0, "order"))
    return torch.randperm(examples, generator=generator).to(device)


def seed_of(seed: int, step: int, worker: int, use: str = "noise") -> int:
    """A seed for torch's generators that no other step, worker or use has."""
    return derive(seed, step, worker, USES.index(use))


@dataclass(frozen=True)
class Batches:
    """Every epoch the examples in a new order, cut into batches, each cut into one micro-batch a worker.

    Examples that do not fill a batch are left out of that epoch. A real run that takes its examples from here sees what
    the simulated one sees.
    """

    examples: int
    batch: int
    workers: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch % self.workers or self.batch < self.workers:
            raise ValueError(f"batch={self.batch} does not divide among {self.workers} workers; take a multiple")
        if self.examples < self.batch:
            raise ValueError(f"batch={self.batch} is more than the {self.examples} training examples; take less")

    @property
    def steps_per_epoch(self) -> int:
        return self.examples // self.batch

    def indices(self, step: int, worker: int, device: torch.device | None = None) -> Tensor:
        """The examples of one worker at one step."""
        epoch, at = divmod(step, self.steps_per_epoch)
        size = self.batch // self.workers
        first = at * self.batch + worker * size
        return _shuffle(self.examples, self.seed, epoch, device)[first : first + size]


class Data(Protocol):
    """`narrowcast.data` gives such objects; any other with these four tensors will do."""

    @property
    def x_train(self) -> Tensor: ...
    @property
    def y_train(self) -> Tensor: ...
    @property
    def x_test(self) -> Tensor: ...
    @property
    def y_test(self) -> Tensor: ...


class MicroBatches:
    """The data on the device, and the micro-batch of each worker."""

    def __init__(self, data: Data, device: torch.device, batches: Batches, augment: Augment | None) -> None:
        if not data.x_train.is_floating_point():
            raise TypeError(f"train: x_train is {data.x_train.dtype}; give floats, for example data.normalised()")
        self.x, self.y = data.x_train.to(device), data.y_train.to(device)
        self.x_test, self.y_test = data.x_test.to(device), data.y_test.to(device)
        self.batches, self._augment, self._device = batches, augment, device

    def of(self, step: int, worker: int) -> tuple[Tensor, Tensor]:
        indices = self.batches.indices(step, worker, self._device)
        x, y = self.x[indices], self.y[indices]
        if self._augment is not None:
            generator = torch.Generator(self._device).manual_seed(seed_of(self.batches.seed, step, worker, "augment"))
            x = self._augment(x, generator)
        return x, y
