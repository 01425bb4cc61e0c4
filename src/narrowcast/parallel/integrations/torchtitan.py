"""torchtitan: a model spec whose parts are attached to, by torchtitan's own extension point. Needs its package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from narrowcast.parallel import policy
from narrowcast.parallel.attachment import attach
from narrowcast.parallel.handle import Handle


class Attaching:
    """What torchtitan calls when the model is sharded and its optimizers are built."""

    def __init__(self, before: Callable[..., None] | None, gradients: object, options: dict[str, Any]) -> None:
        self._before, self._gradients, self._options = before, gradients, options
        self.handles: list[Handle] = []
        """Of each part of the model: one, or with pipeline parallelism one for each stage of this rank."""

    def __call__(self, optimizers: Any, model_parts: Sequence[nn.Module], *more: Any) -> None:
        if self._before is not None:
            self._before(optimizers, model_parts, *more)
        self.handles += [attach(part, self._gradients, **self._options) for part in model_parts]


def with_wires(model_spec: Any, gradients: object, **options: Any) -> Any:
    """The model spec of a `Trainer.Config`, with `nc.attach` on what torchtitan makes of it. options: as for `attach`.

    `model_spec.post_optimizer_build_fn.handles` has the handles once the trainer is built.
    """
    policy.check(gradients)
    attaching = Attaching(model_spec.post_optimizer_build_fn, gradients, options)
    return dataclasses.replace(model_spec, post_optimizer_build_fn=attaching)
