"""`DDP(mixed_precision=...)`: its own hook stays, and calls ours for the all-reduce.

DDP takes one hook, and mixed precision registers one by itself: it sums a bucket through the reducer, divides by the
world's size, then casts parameters and gradients back up. The hook reaches reducer and group through a weak reference
to the model, which its state holds. We put a detour there: the sum is our mean, and the world's size is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

Hook = Callable[[Any], torch.futures.Future[Tensor]]


class _Detour:
    """The model as mixed precision's hook sees it: `reducer` and `process_group` are this object itself."""

    def __init__(self, model: DistributedDataParallel, hook: Hook) -> None:
        self._model, self._hook = model, hook

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    @property
    def reducer(self) -> _Detour:
        return self

    @property
    def process_group(self) -> _Detour:
        return self

    def _run_allreduce_hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        return self._hook(bucket)

    def size(self) -> int:
        """Ours is the mean already."""
        return 1


def state_of(model: DistributedDataParallel) -> Any | None:
    """The state of the hook that mixed precision registered, where that is the model's only one. A copy of a model
    has the state of the original, and no hook.
    """
    if model.mixed_precision is None or len(model._comm_hooks) != 1:
        return None
    _, state = model._comm_hooks[0]
    return state if hasattr(state, "ddp_weakref") and state.ddp_weakref() is model else None


def take_detour(state: Any, hook: Hook) -> None:
    """From now on mixed precision's hook asks ours for the mean."""
    weak = state.ddp_weakref

    def detour() -> _Detour:
        return _Detour(weak(), hook)

    state.ddp_weakref = detour
