"""What stands around a model or an optimizer: torch.compile, Lightning Fabric and Accelerate wrap both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

AROUND_MODELS = ("_forward_module", "_orig_mod")
"""Of Fabric's module, and of torch.compile's; Accelerate's regional compilation names its original so, too."""
AROUND_OPTIMIZERS = ("optimizer", "_optimizer")
"""Of Accelerate's, and of Lightning's and Fabric's."""


def _layers(outer: Any, names: tuple[str, ...], kind: type) -> Iterator[Any]:
    """An object and what it wraps, from the outside in. Only what it has itself: many hand on what they wrap has."""
    inner = outer
    while inner is not None:
        yield inner
        own = {**vars(inner), **vars(inner).get("_modules", {})}
        inner = next((own[name] for name in names if isinstance(own.get(name), kind)), None)


def inner_model(model: nn.Module) -> nn.Module:
    """The model that was wrapped, which is what DDP or `fully_shard` made."""
    *_, inner = _layers(model, AROUND_MODELS, nn.Module)
    return inner


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that makes the steps, and has the hooks."""
    *_, inner = _layers(optimizer, AROUND_OPTIMIZERS, Optimizer)
    return inner
