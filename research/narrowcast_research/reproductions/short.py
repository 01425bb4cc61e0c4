"""Short trainings of a perceptron, for effects that need no large network: what several reproductions share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.data import Dataset
from narrowcast.simulate import Batches, LossScale, Run, World, train
from narrowcast.study import linear_layers, seeded
from narrowcast_research.reproductions.base import Options, Result, Work
from narrowcast_research.reproductions.pictures import pictures

HIDDEN_QUICK, HIDDEN = 48, 256
SCALED = {"accuracy, %": "accuracy", "scale at the end": "scale:g", "steps left out": "skipped:g"}
"""RowFigures of a training under a loss scale."""


def perceptron(data: Dataset, options: Options, seed: int) -> nn.Module:
    """Two hidden layers, small for digits of 8 x 8 and larger for 28 x 28."""
    inputs = math.prod(data.x_train.shape[1:])
    hidden = HIDDEN_QUICK if options.quick else HIDDEN
    return seeded(lambda: linear_layers((inputs, hidden, hidden, data.classes)), seed)


def sgd(parameters: list[nn.Parameter], rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


class Bits:
    """Adds up how many bits a value took on the wire, step by step, and which wires were used."""

    def __init__(self) -> None:
        self.total, self.steps = 0.0, 0
        self.wires: list[str] = []

    def __call__(self, run: Run) -> None:
        rows = run.exchange.rows(run.step)
        values = sum(row.numel for row in rows)
        self.total += sum(row.numel * row.bits_per_value for row in rows) / values
        self.steps += 1
        wire = max(rows, key=lambda row: row.numel).wire
        if not self.wires or self.wires[-1] != wire:
            self.wires.append(wire)

    @property
    def mean(self) -> float:
        return self.total / max(self.steps, 1)


def exchange_run(
    spec: Callable[[nn.Module, int], object],
    seed: int,
    options: Options,
    work: Work,
    *,
    epochs: int,
    batch: int = 128,
    workers: int = 4,
    data: str = "mnist",
    channels: int | None = None,
    make: Callable[[Dataset, Options, int], nn.Module] | None = None,
    rate: float = 0.1,
    world: World | None = None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    **more: Any,
) -> Result | None:
    """Train a perceptron, or what `make` makes, with the policy for gradients of `spec(model, steps in an epoch)`."""
    found = pictures(data, options, channels=channels)
    model = (make or perceptron)(found, options, seed)
    if found.x_train.is_cuda:  # convolutions on tensor cores want channels last
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bits = Bits()
    run = train(
        model,
        found,
        workers=world or World(workers, "two_shot", seed=seed),
        spec=spec(model, len(found.x_train) // batch),
        epochs=epochs,
        batch=batch,
        optimizer=optimizer or partial(sgd, rate=rate),
        seed=seed,
        device=options.device,
        min_values=0,
        test_every=10**9,
        checkpoint=work.checkpoint,
        time_limit=work.clock.left,
        before_step=bits,
        **more,
    )
    if not run.finished:
        return None
    return {"accuracy": 100 * (run.accuracy or 0.0), "bits": bits.mean, "wires": bits.wires[:8]}


def train_scaled(
    model: nn.Module,
    data: Dataset,
    scaler: LossScale,
    steps: int,
    seed: int,
    *,
    rate: float = 0.05,
    share: float = 1.0,
    change: Callable[[int, Tensor], None] | None = None,
) -> int:
    """Train on one worker under a loss scale; how many steps were left out.

    share: the loss is one of so many that add up, and is divided by it. change: what becomes of a batch before it is
    seen.
    """
    optimizer, batches, skipped = (
        sgd(list(model.parameters()), rate * share),
        Batches(len(data.x_train), 64, 1, seed),
        0,
    )
    for step in range(steps):
        chosen = batches.indices(step, 0).to(data.x_train.device)
        x = data.x_train[chosen]
        if change is not None:
            change(step, x)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), data.y_train[chosen]) / share).backward()
        scaler.step(optimizer)
        skipped += scaler.skipped
        scaler.update()
    return skipped


@torch.no_grad()
def accuracy_of(model: nn.Module, data: Dataset) -> float:
    """On the test pictures, in percent."""
    parts = zip(data.x_test.split(1000), data.y_test.split(1000), strict=True)
    return 100 * sum(int((model(x).argmax(1) == y).sum()) for x, y in parts) / len(data.y_test)
