"""The handle of an FSDP2 model: the members of DDP's, for what is sharded."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from narrowcast.codecs import ErrorReport
from narrowcast.parallel.fingerprint import differing
from narrowcast.parallel.fsdp import shards, torch_parts
from narrowcast.parallel.handle import Handle, check_strict
from narrowcast.parallel.stats import Row, Stats, render
from narrowcast.parallel.timeline import Event

GONE = "handle: its model is gone, and with it what error feedback kept; stats(), events() and errors() remain"


class ShardedHandle(Handle):
    """What `attach` returns for a model that `fully_shard` was called on. It holds the model only once detached."""

    def __init__(self, state: shards.FSDPState) -> None:
        self._state_of_model, self._stats = weakref.ref(state), state.stats
        self._detached: shards.FSDPState | None = None

    @property
    def _sharded(self) -> shards.FSDPState:
        state = self._state_of_model()
        if state is None:
            raise RuntimeError(GONE)
        return state

    def _settled(self) -> dict[str, Stats]:
        state = self._state_of_model()
        if state is not None:
            state.settle()
        return self._stats

    @property
    def step(self) -> int:
        """Backward passes that communicated."""
        return self._settled()["gradient"].steps

    @property
    def seed(self) -> int:
        """Of the noise."""
        return self._sharded.seed

    def stats(self) -> dict[str, float]:
        """Bytes, effective ratio and milliseconds of this rank, in all and by role, summed since attach."""
        parts = self._settled()
        found = Stats.total(parts.values()).as_dict()
        for role, part in parts.items():
            found |= {f"{role}_{key}": getattr(part, key) for key in ("calls", "sent_bytes", "plain_bytes")}
        return found

    def events(self) -> list[Event]:
        """The last calls, for a trace."""
        return sorted(Stats.total(self._stats.values()).events, key=lambda event: event.start)

    def rows(self) -> list[Row]:
        """Every tensor in every role: its wire, or why it stays as it is."""
        return self._sharded.rows()

    def explain(self) -> str:
        """Every tensor in a table, and what travels beside them."""
        return render(self.rows(), self._sharded.remarks())

    def errors(self) -> dict[str, ErrorReport]:
        """What the codecs lost on each gradient when it was last sampled (`sample_every`)."""
        return dict(self._stats["gradient"].sampled)

    def check_ranks(self) -> None:
        """Gather all parameters and compare a hash of them over the ranks and replicas; raise where one differs."""
        mine = shards.digest_of(self._sharded)
        for channel, what in ((self._sharded.channel, "ranks"), (self._sharded.replicas, "replicas")):
            different = differing(channel, mine) if channel is not None else []
            if different:
                raise RuntimeError(f"check_ranks: the parameters of {what} {different} differ from those of 0")

    def state_dict(self) -> dict[str, Tensor]:
        """What error feedback owes, as the mean over all ranks, in DTensors sharded as the parameters (collective)."""
        return self._sharded.owed()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what a checkpoint owes (collective): DTensors of any sharding, or whole tensors."""
        self._sharded.load(state)

    def detach(self) -> None:
        """Back to FSDP's own collectives. The state that the model had is now the handle's, and with it the model."""
        self._detached = self._state_of_model()
        if self._detached is not None:
            self._detached.close()


def attach_sharded(
    model: nn.Module, gradients: object, strict: bool, refused: dict[str, Any], **options: Any
) -> Handle:
    """`attach` for FSDP2. refused: arguments that mean nothing here, where they were given."""
    for name, (value, instead) in refused.items():
        raise ValueError(f"attach: {name}={value!r} is for DDP; with FSDP2 {instead}")
    if isinstance(gradients, str) and gradients == "auto":
        raise ValueError("attach: gradients='auto' is for DDP; with FSDP2 give a spec, as 'int8/256'")
    torch_parts.check(model)
    shards.check_free(model)
    state = shards.FSDPState(model, gradients, **options)
    check_strict(state, strict)
    state.install()
    return ShardedHandle(state)


def given(**arguments: tuple[object, object, str]) -> dict[str, tuple[object, str]]:
    """Of `name=(value, default, instead)`, those that differ from their default."""
    return {name: (value, instead) for name, (value, default, instead) in arguments.items() if value is not default}


__all__: Sequence[str] = ("ShardedHandle", "attach_sharded", "given")
