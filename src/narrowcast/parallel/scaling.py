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

    The scale tells nothing: it is lowered by hand, too, it may be at its floor, and it is one for all optimizers. The
    scaler keeps what it found by optimizer, until `update()` replaces the record and adds all up in the first tensor.
    So we hold on to the record, and hear from torch which optimizers really stepped.
    """

    def __init__(self, scaler: torch.amp.GradScaler, parameters: Parameters) -> None:
        if not hasattr(scaler, "_per_optimizer_states"):
            raise TypeError(
                f"attach: scaler= is a {type(scaler).__name__}, which does not tell whose step it skipped; give a "
                "torch.amp.GradScaler"
            )
        self._scaler, self._parameters = scaler, parameters
        self._stepped: dict[int, Tensor | None] = {}
        """The optimizers that ran their step, and the Inf that those were told of which look for it themselves."""
        self._known: dict[int, weakref.ref[Any]] = {}
        self._told: set[int] = set()
        """The optimizers of the record whose step was settled before the last backward pass."""
        self.begin()
        # one hook for all, which stays: to remove one while torch goes through them is an error in somebody's step
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_post_hook(_hear_all))
        _LISTENING.add(self)

    def _hear(self, optimizer: torch.optim.Optimizer) -> None:
        self._known[id(optimizer)] = weakref.ref(optimizer)
        self._stepped.setdefault(id(optimizer), getattr(optimizer, "found_inf", None))

    def begin(self) -> None:
        """A backward pass begins: what happens from now on concerns its gradients."""
        self.scale = float(self._scaler.get_scale())
        self._record: Mapping[int, Any] = self._scaler._per_optimizer_states
        self._told = {number for number, state in self._record.items() if state["found_inf_per_device"]}
        self._stepped.clear()

    def outcomes(self) -> dict[str, bool]:
        """Of the parameters whose optimizer came to its step since the pass began: whether the step was applied."""
        applied = {number: inf is None or not float(inf) for number, inf in self._stepped.items()}
        for number, state in self._record.items():
            infs = list(state["found_inf_per_device"].values())
            if infs and number not in self._told and number not in applied:
                applied[number] = not any(float(inf) for inf in infs)
        by_id = {id(p): well for number, well in applied.items() for p in self._held(number)}
        return {name: by_id[id(p)] for name, p in self._parameters().items() if id(p) in by_id}

    def _held(self, number: int) -> list[Tensor]:
        """The parameters of an optimizer."""
        optimizer = self._known[number]() if number in self._known else None
        if optimizer is None:
            # the scaler keeps nothing but its id, and one that was never allowed to step was never heard of
            optimizer = next((o for o in gc.get_objects() if id(o) == number and hasattr(o, "param_groups")), None)
            if optimizer is None:
                return []
            self._known[number] = weakref.ref(optimizer)
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_LISTENING: weakref.WeakSet[Scaling] = weakref.WeakSet()
_HOOKS: list[Any] = []


def _hear_all(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for one in list(_LISTENING):
        one._hear(optimizer)


def scaling(scaler: torch.amp.GradScaler | None, parameters: Parameters) -> Scaling | None:
    """None where there is no scaler, or one that is switched off: then the scale is 1 and no step is skipped."""
    return None if scaler is None or not scaler.is_enabled() else Scaling(scaler, parameters)
