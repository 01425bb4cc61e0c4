"""An optimizer that was made before `fully_shard` steps on tensors that the model no longer has: say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def watch(model: nn.Module, parameters: Sequence[Tensor]) -> Callable[[], None]:
    """Look at every optimizer that steps until one has the model's parameters; returns the way to stop."""

    def shapes_of(tensors: Iterable[Tensor]) -> Counter[tuple[int, ...]]:
        return Counter(tuple(p.shape) for p in tensors)

    def look(optimizer: Optimizer, *_: Any) -> None:
        theirs = parameters_of(optimizer)
        # asked for anew: a model may have been filled from the meta device since
        ours = {id(p) for p in model.parameters()}
        if any(id(p) in ours for p in theirs):
            handle.remove()
        elif all(p.grad is None for p in theirs) and shapes_of(theirs) in (
            shapes_of(parameters),
            shapes_of(p for p in parameters if p.requires_grad),
        ):
            raise RuntimeError(
                "attach: this optimizer holds the parameters that the model had before fully_shard, so its steps "
                "change nothing; make the optimizer after fully_shard"
            )

    handle = register_optimizer_step_pre_hook(look)
    return handle.remove
