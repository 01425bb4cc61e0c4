"""An optimizer that was made before `fully_shard` steps on tensors that the model no longer has: say so."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_watched: weakref.WeakKeyDictionary[nn.Module, Sequence[Tensor]] = weakref.WeakKeyDictionary()
"""The models whose optimizer has not come by yet, and their parameters."""
_hooks: list[RemovableHandle] = []
"""One hook for all models, which stays: torch walks over its hooks while they run, and none may go meanwhile."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def watch(model: nn.Module, parameters: Sequence[Tensor]) -> Callable[[], None]:
    """Look at every optimizer that steps until one has the model's parameters; returns the way to stop."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_look))
    _watched[model] = parameters
    weak = weakref.ref(model)

    def stop() -> None:
        watched = weak()
        if watched is not None:
            _watched.pop(watched, None)

    return stop


def _look(optimizer: Optimizer, *_: Any) -> None:
    theirs = parameters_of(optimizer)
    for model, parameters in list(_watched.items()):
        # asked for anew: a model may have been filled from the meta device since
        ours = {id(p) for p in model.parameters()}
        if any(id(p) in ours for p in theirs):
            _watched.pop(model, None)
        elif all(p.grad is None for p in theirs) and _twins(theirs, parameters):
            raise RuntimeError(
                "attach: this optimizer holds the parameters that the model had before fully_shard, so its steps "
                "change nothing; make the optimizer after fully_shard"
            )


def _twins(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> bool:
    """Whether these have the shapes of a model's parameters, or of those that are trained, and are not sharded as they.

    Those of another model of the same shapes are.
    """
    if {_mesh_of(p) for p in theirs} & {_mesh_of(p) for p in ours}:
        return False
    return _shapes_of(theirs) in (_shapes_of(ours), _shapes_of(p for p in ours if p.requires_grad))


def _mesh_of(tensor: Tensor) -> object:
    """Of a DTensor, whose class is not imported for this."""
    return getattr(tensor, "device_mesh", None)


def _shapes_of(tensors: Iterable[Tensor]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(p.shape) for p in tensors)
