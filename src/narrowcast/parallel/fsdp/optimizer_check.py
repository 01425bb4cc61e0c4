"""Optimizers that cannot work: made before `fully_shard`, so that they step on tensors that the model no longer has; or
LBFGS, which takes the difference of rounded gradients for curvature.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

log = logging.getLogger("narrowcast")

Rounds = Callable[[], bool]
_watched: weakref.WeakKeyDictionary[nn.Module, tuple[Sequence[Tensor], Rounds]] = weakref.WeakKeyDictionary()
"""The models whose optimizer has not come by yet, their parameters if they are sharded, and whether gradients round."""
_hooks: list[RemovableHandle] = []
"""One hook for all models, which stays: torch walks over its hooks while they run, and none may go meanwhile."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def watch(model: nn.Module, parameters: Sequence[Tensor], rounds: Rounds = lambda: False) -> Callable[[], None]:
    """Look at every optimizer that steps until one has the model's parameters; returns the way to stop.

    parameters: those that `fully_shard` made, if it did. rounds: whether to warn of LBFGS, since codecs that round may
    be in use; of sharded parameters it takes none that are uneven, so nobody comes with it there.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_look))
    _watched[model] = parameters, rounds
    weak = weakref.ref(model)

    def stop() -> None:
        watched = weak()
        if watched is not None:
            _watched.pop(watched, None)

    return stop


def _look(optimizer: Optimizer, *_: Any) -> None:
    theirs = parameters_of(optimizer)
    for model, (parameters, rounds) in list(_watched.items()):
        # asked for anew: a model may have been filled from the meta device since
        ours = {id(p) for p in model.parameters()}
        if any(id(p) in ours for p in theirs):
            _watched.pop(model, None)
            if isinstance(optimizer, LBFGS) and rounds():
                log.warning(
                    "attach: LBFGS takes differences of gradients for curvature, and those of rounded gradients are "
                    "mostly rounding: with int8/256 a test ended 89 %% off; attach as-is, or take another optimizer"
                )
        elif parameters and all(p.grad is None for p in theirs) and _twins(theirs, parameters):
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
