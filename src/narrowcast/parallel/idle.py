"""A model on one process: `attach` gives a handle that has nothing to do, so that a script needs no `if`."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from narrowcast.codecs import ErrorReport, KeptFactors
from narrowcast.parallel import policy
from narrowcast.parallel.ddp import buckets
from narrowcast.parallel.handle import GONE, Handle
from narrowcast.parallel.residuals import check_factors, check_saved
from narrowcast.parallel.stats import CallEvent, Stats, TensorRow, render

log = logging.getLogger("narrowcast")

WHY = "one process: nothing travels, and nothing is rounded"


def processes(group: dist.ProcessGroup | None) -> int:
    """How many train together: those of the group, or before there is one those that the launcher has started."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group)
    return int(os.environ.get("WORLD_SIZE", "1"))


class IdleHandle(Handle):
    """The handle of a model that nobody shares: it keeps what a checkpoint brings, and gives it back."""

    def __init__(self, model: nn.Module, gradients: object, min_values: int, seed: int) -> None:
        self._model, self._policy = weakref.ref(model), gradients
        self._min_values, self._seed = min_values, seed
        self._kept: dict[str, Tensor] = {}

    @property
    def step(self) -> int:
        return 0

    @property
    def seed(self) -> int:
        return self._seed

    def _parameters(self) -> dict[str, nn.Parameter]:
        model = self._model()
        if model is None:
            raise RuntimeError(GONE)
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    def link(self) -> str:
        return WHY

    def stats(self) -> dict[str, float]:
        return Stats().as_dict()

    def events(self) -> list[CallEvent]:
        return []

    def rows(self) -> list[TensorRow]:
        rows = []
        for name, p in self._parameters().items():
            info = buckets.info_of(name, p)
            rows.append(TensorRow.of(name, p.numel(), self._choice(info), p.dtype, shape=info.sent_shape))
        return rows

    def _choice(self, info: policy.TensorInfo) -> policy.CodecChoice:
        if getattr(self._policy, "alone", False):  # "auto" measures a link
            return policy.CodecChoice(policy.AS_IS, policy.POLICY_SAYS_SO)
        return policy.choose(self._policy, info, 0, self._min_values)

    def unmatched(self) -> list[str]:
        """The patterns of the policy that match no parameter."""
        return policy.unmatched(self._policy, self._parameters())

    def explain(self) -> str:
        return render(self.rows(), [*map(policy.no_match, self.unmatched()), WHY])

    def errors(self) -> dict[str, ErrorReport]:
        return {}

    def history(self) -> list[dict[str, Any]]:
        return []

    def observe(self, loss: float) -> None:
        """Nobody decides here."""

    def check_ranks(self) -> None:
        """There is nobody to compare with."""

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._kept)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        known = self._parameters()
        residuals, factors = KeptFactors.split(state)
        check_saved(residuals, {name: p.shape for name, p in known.items()})
        check_factors(factors, {name: buckets.matrix_of(p) for name, p in known.items() if p.dim() > 1 and p.numel()})
        self._kept = {name: value.detach().clone() for name, value in state.items()}

    def detach(self) -> None:
        """Nothing was attached."""


def attach_idle(
    model: nn.Module, gradients: object, strict: bool, *, parameters: object, min_values: int, seed: int
) -> Handle:
    """`attach` for a plain model of one process. What is wrong with the policies is said here already."""
    policy.check(gradients)
    if parameters is not None:
        policy.check(parameters, policy.PARAMETER)
    handle = IdleHandle(model, gradients, min_values, seed)
    missed = [policy.no_match(pattern) for pattern in handle.unmatched()]
    if strict and missed:
        raise ValueError(f"attach with strict=True: {missed[0]}")
    for text in (*missed, f"{WHY}; the model is a plain {type(model).__name__}"):
        log.warning("attach: %s", text)
    return handle
