"""What `--model` names: a built-in description, a profile on disk, or a module to be run here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from narrowcast.predict import model as model_file
from narrowcast.predict import profile as profiler
from narrowcast.predict import toml, zoo
from narrowcast.predict.cluster import Cluster
from narrowcast.predict.model import Description, Profile
from narrowcast.predict.profile import ModelError

DEFAULT_BATCH = 16
"""Samples of a real model, where nobody says how many."""


@dataclass(frozen=True)
class Source:
    """A profile, and what it came from."""

    profile: Profile
    description: Description | None = None
    module: nn.Module | None = None
    batches: tuple[Tensor, Tensor] | None = None
    samples: int = 0


def resolve(
    name: str,
    cluster: Cluster | None = None,
    *,
    batch: int = 0,
    shape: str = "",
    flops: float = 0.0,
    compute_ms: float = 0.0,
    steps: int = profiler.STEPS,
) -> Source:
    """Find a model by whatever a person may have given."""
    check_numbers(batch=batch, flops=flops, compute_ms=compute_ms, steps=steps)
    if name in zoo.MODELS:
        return _described(zoo.MODELS[name](), cluster, batch, flops, compute_ms)
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise ModelError(f"model: no file {name}")
        document = toml.parse(toml.read_text(name), name)
        if "layer" in document.values:
            return _described(model_file.described(document), cluster, batch, flops, compute_ms)
        return Source(model_file.read(document))
    if ":" in name:
        return _run(name, batch or DEFAULT_BATCH, shape, steps)
    raise ModelError(
        f"model: unknown {name!r}; take {', '.join(zoo.MODELS)}, a profile or description (.toml), package.module:name "
        "or file.py:name"
    )


def check_numbers(*, batch: int, flops: float, compute_ms: float, steps: int) -> None:
    """0 stands for the default, but for steps, of which there must be some."""
    for option, value in (("--batch", batch), ("--flops", flops), ("--compute-ms", compute_ms), ("--steps", steps)):
        if not 0 <= value < math.inf or (option == "--steps" and not value):
            raise ModelError(f"model: {option}: must be above 0, got {value:g}")


def _described(made: Description, cluster: Cluster | None, batch: int, flops: float, compute_ms: float) -> Source:
    size = batch or made.batch
    if compute_ms:
        return Source(made.profile_of(compute_ms / 1e3, size), made, samples=made.samples)
    device = cluster.device if cluster else None
    speed = flops or (device.flops if device else 0.0)
    memory = device.memory_gbyte if device else 0.0
    return Source(made.profile(speed, memory, size, spread=0.2 if not flops else 0.1), made, samples=made.samples)


def _run(name: str, batch: int, shape: str, steps: int) -> Source:
    module = profiler.build(name)
    first, second = (profiler.example_batch(module, shape, batch, seed) for seed in (0, 1))
    if torch.cuda.is_available():
        module, first, second = module.cuda(), first.cuda(), second.cuda()
    made = profiler.profile(module, first, name=name, steps=steps)
    return Source(made, module=module, batches=(first, second))
