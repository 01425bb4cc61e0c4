"""What became of the optimizers' steps under a loss scaler: error feedback undoes the passes of those it skipped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

Parameters = Callable[[], Mapping[str, Tensor]]


class Scaling:
    """A GradScaler, watched: which parameters' optimizers applied or skipped a step since the last backward pass.

    The scale says nothing: it is lowered by hand, too, it may be at its floor, and it is one for all optimizers. The
    scaler keeps what it found by optimizer, until `update()` replaces the record and adds all up in the first tensor.
    So we hold on to the record, and a hook of torch says which optimizers really stepped.
    """

    def __init__(self, scaler: torch.amp.GradScaler, parameters: Parameters) -> None:
        if not hasattr(scaler, "_per_optimizer_states"):
            raise TypeError(
                f"attach: scaler= is a {type(scaler).__name__}, which does not say whose step it skipped; give a "
                "torch.amp.GradScaler"
            )
        self._scaler, self._parameters = scaler, parameters
        self._stepped: dict[int, Tensor | None] = {}
        """The optimizers that ran their step; of those that look for Inf themselves, what the scaler handed them."""
        self._known: dict[int, weakref.ref[Any]] = {}
        self._settled: set[int] = set()
        """The optimizers of the record whose step was settled before the last backward pass."""
        self.begin()
        # one hook for all, which stays: to remove one while torch goes through them is an error in somebody's step
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_post_hook(_note_step_everywhere))
        _SCALINGS.add(self)

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._known[id(optimizer)] = weakref.ref(optimizer)
        self._stepped.setdefault(id(optimizer), getattr(optimizer, "found_inf", None))

    def begin(self) -> None:
        """A backward pass begins: what happens from now on concerns its gradients."""
        self.scale = float(self._scaler.get_scale())
        self._record: Mapping[int, Any] = self._scaler._per_optimizer_states
        self._settled = {number for number, state in self._record.items() if state["found_inf_per_device"]}
        self._stepped.clear()

    def outcomes(self) -> dict[str, bool]:
        """Of the parameters whose optimizer came to its step since the pass began: whether the step was applied."""
        applied = {number: inf is None or not float(inf) for number, inf in self._stepped.items()}
        for number, state in self._record.items():
            infs = list(state["found_inf_per_device"].values())
            if infs and number not in self._settled and number not in applied:
                applied[number] = not any(float(inf) for inf in infs)
        by_id = {id(p): well for number, well in applied.items() for p in self._parameters_of(number)}
        return {name: by_id[id(p)] for name, p in self._parameters().items() if id(p) in by_id}

    def _parameters_of(self, number: int) -> list[Tensor]:
        """The parameters of an optimizer, by its id."""
        optimizer = self._known[number]() if number in self._known else None
        if optimizer is None:
            # A search, once for an optimizer whose first step was skipped: the scaler keeps nothing but its id, torch
            # has no list of optimizers and calls no hook for a step that is not made. To learn of it earlier we would
            # have to replace methods of the user's scaler, or Optimizer.__init__.
            optimizer = next((o for o in gc.get_objects() if id(o) == number and hasattr(o, "param_groups")), None)
            if optimizer is None:
                return []
            self._known[number] = weakref.ref(optimizer)
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_SCALINGS: weakref.WeakSet[Scaling] = weakref.WeakSet()
_HOOKS: list[Any] = []


def _note_step_everywhere(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for scaling in list(_SCALINGS):
        scaling._note_step(optimizer)


def watch_scaler(scaler: torch.amp.GradScaler | None, parameters: Parameters) -> Scaling | None:
    """None where there is no scaler, or one that is switched off: then the scale is 1 and no step is skipped."""
    return None if scaler is None or not scaler.is_enabled() else Scaling(scaler, parameters)
