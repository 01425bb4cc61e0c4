"""A feature is a short training; it runs plain and through wires, and the updates of the parameters are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import narrowcast as nc

Updates = dict[str, Tensor]
WIRES = {"as-is": 1e-3, "int8/256": 0.12, "int4/128+ef": 0.4}
"""How far the updates may be from plain ones: the largest that were seen are 0.07 and 0.30, with Adam's small steps.
As they are: sums of 16 bits are added in float32 here, and in 16 bits by Gloo."""
STEPS = 3


class Attach:
    """`nc.attach` with one wire, or nothing at all for the plain run."""

    def __init__(self, group: dist.ProcessGroup, wire: str | None) -> None:
        self.group, self.wire = group, wire
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.handles: list[nc.Handle] = []

    def __call__(self, model: nn.Module, **options: Any) -> Any:
        if self.wire is not None:
            self.handles.append(nc.attach(model, self.wire, **{"min_values": 1, **options}))
            return self.handles[-1]
        return None

    def noise(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.rank + step)

    def close(self) -> None:
        for handle in self.handles:
            handle.detach()


Feature = Callable[[Attach], Updates]


def whole(p: Tensor) -> Tensor:
    full = p.full_tensor() if hasattr(p, "full_tensor") else p
    return full.detach().clone()


def values(module: nn.Module) -> Updates:
    return {name: whole(p) for name, p in module.named_parameters()}


def moved(module: nn.Module, before: Updates) -> Updates:
    return {name: value - before[name] for name, value in values(module).items()}


def run(group: dist.ProcessGroup, feature: Feature, wire: str | None) -> tuple[Updates, list[float]]:
    attach = Attach(group, wire)
    try:
        updates = feature(attach)
        return updates, [handle.stats()["steps"] for handle in attach.handles]
    finally:
        attach.close()


def distance(ours: Updates, theirs: Updates) -> float:
    """Of all updates together, relative to the plain ones."""
    apart = sum(float((ours[name] - value).abs().double().square().sum()) for name, value in theirs.items())
    return (apart / sum(float(value.abs().double().square().sum()) for value in theirs.values())) ** 0.5


def together(**models: tuple[nn.Module, Updates]) -> Updates:
    """The updates of several models."""
    parts = ((who, moved(model, before)) for who, (model, before) in models.items())
    return {f"{who}.{name}": value for who, part in parts for name, value in part.items()}


def alternating(*optimizers: torch.optim.Optimizer) -> Iterator[int]:
    """Steps of several optimizers."""
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        yield step
        for optimizer in optimizers:
            optimizer.step()
