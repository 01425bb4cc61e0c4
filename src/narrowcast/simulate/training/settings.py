"""The arguments of a run: how workers exchange, how long it is, and what makes it another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import Schedule
from narrowcast.simulate.world.world import World

SPEC, ALGORITHM = "e5m2+aps", "auto"
"""Where neither an argument nor a World says otherwise."""
DATA = ("x_train", "y_train", "x_test", "y_test")
Rate = float | Callable[[int], float] | None


def world_of(workers: int | World, spec: object, algorithm: str | None, seed: int) -> tuple[World, object]:
    """The world of a run, and what its gradients travel by. What a World says is not said again."""
    if not isinstance(workers, World):
        return World(workers, algorithm or ALGORITHM, seed=seed), SPEC if spec is None else spec
    if algorithm not in (None, workers.algorithm):
        both = f"workers={workers!r} and algorithm={algorithm!r}"
        raise ValueError(f"train: {both} differ; give the algorithm to the World alone")
    if spec is None:
        return workers, workers.codec
    # as-is is what a World has without a spec
    if str(workers.codec) != "as-is" and not _names(spec, workers.codec):
        raise ValueError(f"train: workers={workers!r} and spec={spec!r} differ; give the spec in one place")
    return workers, spec


def _names(spec: object, codec: Codec) -> bool:
    return isinstance(spec, str | Codec) and codec_named(spec) == codec


def check_data(data: object) -> None:
    missing = [name for name in DATA if not isinstance(getattr(data, name, None), torch.Tensor)]
    if missing:
        problem = f"the data ({type(data).__name__}) has no tensor {missing[0]}"
        raise TypeError(f"train: {problem}; give one of narrowcast.data, or any object with {', '.join(DATA)}")


def total_steps(epochs: float | None, steps: int | None, per_epoch: int) -> int:
    if (epochs is None) == (steps is None):
        raise ValueError("train: give either epochs= or steps=")
    total = steps if steps is not None else round(float(epochs or 0) * per_epoch)
    if total < 1:
        arguments = f"steps={steps}" if steps is not None else f"epochs={epochs} of {per_epoch} steps each"
        raise ValueError(f"train: {arguments} leave nothing to do; a run has one step at least")
    return total


def device_of(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Where to train; the model's own place where nothing is said."""
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"train: the model ({type(model).__name__}) has no parameters; there is nothing to train")
    return first.device if device is None else torch.device(device)


def _plain(value: Any) -> Any:
    """A number of numpy or torch as one of Python: checkpoints and logs hold those alone."""
    return value.item() if hasattr(value, "item") else value


def settings(
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    spec: object,
    lr: Rate,
    lower: Mapping[str, Any] | None,
    **facts: Any,
) -> dict[str, Any]:
    """What makes a run another run, in plain values; checkpoints are compared by it."""
    return {
        "workers": world.n,
        "algorithm": world.algorithm,
        "spec": spell(spec),
        **{name: _plain(value) for name, value in facts.items()},
        "lr": "a function of the step" if callable(lr) else _plain(lr),
        "lower": None if lower is None else _texts(lower),
        **{f"world {key}": value for key, value in _of_world(world).items()},
        "optimizer": _of_optimizer(optimizer),
        "parameters": {name: list(p.shape) for name, p in model.named_parameters()},
    }


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in sorted(values.items())}


def _of_world(world: World) -> dict[str, Any]:
    sums = world.sums
    how = {"accumulate": "low" if world.low else str(sums.format or "fp32"), "kahan": sums.kahan}
    return {"order": world.order, "nodes": world.nodes, "inner": str(world.inner), "seed": world.seed, **how}


def _of_optimizer(optimizer: Optimizer) -> list[dict[str, str]]:
    """Of each group of parameters: what steps it, and how."""
    precision = getattr(optimizer, "precision", {})
    groups = ({key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups)
    return [{"class": type(optimizer).__qualname__, **_texts({**precision, **group})} for group in groups]


def spell(spec: object) -> Any:
    """A policy as text that is the same in another process; of a rule, its name."""
    if isinstance(spec, (str, Codec)):
        return str(spec)
    if isinstance(spec, Schedule):
        return [[step, spell(inner)] for step, inner in spec.steps]
    if isinstance(spec, Mapping):
        return {str(pattern): spell(inner) for pattern, inner in spec.items()}
    return getattr(spec, "__qualname__", type(spec).__qualname__)
