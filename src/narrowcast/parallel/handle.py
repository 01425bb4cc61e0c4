"""What `attach` returns: the interface of a handle, and what the handles of DDP and FSDP2 share."""

from __future__ import annotations

import abc
import logging
import weakref
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import ErrorReport
from narrowcast.parallel import policy
from narrowcast.parallel.stats import CallEvent, TensorRow, headline, small_values, summary

log = logging.getLogger("narrowcast")

GONE = (
    "handle: its model is gone, and with it what error feedback kept, since a handle does not keep a model alive; keep "
    "the model itself. step, stats(), events() and errors() remain"
)


class Handle(abc.ABC):
    """What `attach` returns, whatever kind of model it was given.

    The model owns what it sends with, and a handle refers to that weakly, so a handle does not keep the model alive.
    Once the model is gone `step`, `stats()`, `events()` and `errors()` remain; all else raises and says so. After
    `detach()` it is the handle that has what the model had.
    """

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """Backward passes that communicated, so far."""

    @property
    @abc.abstractmethod
    def seed(self) -> int:
        """Of the noise: the one that was given, or for a further model in a run one that follows from it.

        A `simulate.World` with the seed of a DDP model draws the same noise.
        """

    @abc.abstractmethod
    def link(self) -> str:
        """Whether few bits pay on this link, in a few words; empty where nobody measured it."""

    def __str__(self) -> str:
        """What is compressed, how much, and whether it pays here: a line."""
        return headline(self.rows(), self.link())

    @abc.abstractmethod
    def stats(self) -> dict[str, float]:
        """Bytes, effective ratio and milliseconds of this rank, summed since attach; with FSDP2 by role, too."""

    @abc.abstractmethod
    def events(self) -> list[CallEvent]:
        """The last calls, for a trace."""

    @abc.abstractmethod
    def rows(self) -> list[TensorRow]:
        """Every tensor, in each of its roles: its wire, or why it stays as it is."""

    @abc.abstractmethod
    def explain(self) -> str:
        """Every tensor in a table, and what else travels."""

    @abc.abstractmethod
    def errors(self) -> dict[str, ErrorReport]:
        """What the codecs lost on each gradient when it was last sampled (`sample_every`)."""

    @abc.abstractmethod
    def history(self) -> list[dict[str, Any]]:
        """What "auto" decided, each from which step on; lines of a file for `nc.replay`. Empty without it."""

    @abc.abstractmethod
    def observe(self, loss: float) -> None:
        """Show "auto" the loss of this rank's step: where it jumps, gradients travel in more bits at once."""

    @abc.abstractmethod
    def check_ranks(self) -> None:
        """Compare a hash of all parameters over the ranks (collective); raise where one differs."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """The residuals of error feedback, as the mean over all ranks (collective): valid for any world size.

        With FSDP2 they are DTensors, sharded as the parameters are.
        """

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over the residuals of a checkpoint, whole tensors or DTensors of any sharding (FSDP2: collective)."""

    @abc.abstractmethod
    def detach(self) -> None:
        """Back to the plain collectives. The model can be attached to again."""


S = TypeVar("S")


class StateReference(Generic[S]):
    """A handle's way to a state that belongs to the model, and after `keep()` to the handle."""

    def __init__(self, state: S) -> None:
        self._of_model, self._own = weakref.ref(state), list[S]()

    def __call__(self) -> S | None:
        """The state; None where the model is gone."""
        return self._of_model()

    def get(self) -> S:
        """The state; raises where the model is gone."""
        state = self._of_model()
        if state is None:
            raise RuntimeError(GONE)
        return state

    def keep(self) -> S | None:
        """For `detach`, after which the model no longer holds it."""
        state = self._of_model()
        self._own = [] if state is None else [state]
        return state


def announced(handle: Handle) -> Handle:
    """Say once, on rank 0, what the handle is."""
    if dist.get_rank() == 0 and log.isEnabledFor(logging.INFO):
        log.info("attach: %s", handle)
    return handle


def _way(row: TensorRow) -> str:
    return "stays as it is" if row.wire == str(policy.AS_IS) else f"travels by {row.wire}"


class Explained(Protocol):
    """A state that can say what travels how."""

    def rows(self) -> list[TensorRow]: ...
    def unmatched(self) -> list[str]: ...
    def close(self) -> None: ...


def check_strict(state: Explained, strict: bool) -> None:
    """Say what the policy misses and whether nothing is compressed; where strict, raise."""
    rows, missed = state.rows(), [policy.no_match(pattern) for pattern in state.unmatched()]
    asked = (policy.ASKED_FOR, policy.POLICY_SAYS_SO)
    left = [row for row in rows if row.why and row.why not in asked]
    if strict and (left or missed):
        state.close()
        raise ValueError(
            f"attach with strict=True: {left[0].name} {_way(left[0])}: it {left[0].why}"
            if left
            else f"attach with strict=True: {missed[0]}"
        )
    if left and not any(row.compressed for row in rows):
        missed.append(summary(rows))
    missed += small_values(rows)
    for text in missed if dist.get_rank() == 0 else ():
        log.warning("attach: %s", text)
