"""`attach` for FSDP2: the handle of a model that `fully_shard` was called on."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from narrowcast.codecs import ErrorReport
from narrowcast.parallel.autopilot import Autopilot, Replay
from narrowcast.parallel.fsdp import torch_parts
from narrowcast.parallel.fsdp.shards import FSDPState, check_free, gathered_digest
from narrowcast.parallel.handle import Handle, StateReference, announced, check_strict
from narrowcast.parallel.ranks import FACTORS, check_same
from narrowcast.parallel.stats import CallEvent, Stats, TensorRow, lossy, render


class FSDPHandle(Handle):
    """The handle of an FSDP2 model. It gathers all parameters to compare them."""

    def __init__(self, state: FSDPState) -> None:
        self._reference, self._stats = StateReference(state), state.stats
        of = state.policies["gradient"]
        self._pilot = of if isinstance(of, Autopilot | Replay) else None

    @property
    def _state(self) -> FSDPState:
        return self._reference.get()

    def _ended_passes(self) -> dict[str, Stats]:
        """The counters, with the last backward pass among the steps if it is over."""
        state = self._reference()
        if state is not None:
            state.settle()
        return self._stats

    @property
    def step(self) -> int:
        return self._ended_passes()["gradient"].steps

    @property
    def seed(self) -> int:
        return self._state.seed

    def link(self) -> str:
        state = self._state
        return state.probe.verdict(lossy(state.rows())) if state.probe else ""

    def stats(self) -> dict[str, float]:
        parts = self._ended_passes()
        totals = Stats.total(parts.values()).as_dict()
        for role, part in parts.items():
            totals |= {f"{role}_{key}": getattr(part, key) for key in ("calls", "sent_bytes", "plain_bytes")}
        return totals | (self._pilot.counters() if self._pilot is not None else {})

    def events(self) -> list[CallEvent]:
        return sorted(Stats.total(self._stats.values()).events, key=lambda event: event.start)

    def rows(self) -> list[TensorRow]:
        return self._state.rows()

    def explain(self) -> str:
        return render(self.rows(), self._state.warnings())

    def errors(self) -> dict[str, ErrorReport]:
        return dict(self._stats["gradient"].sampled)

    def history(self) -> list[dict[str, Any]]:
        return self._pilot.history() if self._pilot is not None else []

    def observe(self, loss: float) -> None:
        if self._pilot is not None:
            self._pilot.observe(loss)

    def check_ranks(self) -> None:
        state = self._state
        kept = {"parameters": [gathered_digest(state)], FACTORS: state.factors.contents}
        for channel, who in ((state.channel, "ranks"), (state.replicas, "replicas")):
            if channel is not None:
                check_same(channel, kept, who)

    def state_dict(self) -> dict[str, Tensor]:
        return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._state.load_state_dict(state)

    def detach(self) -> None:
        state = self._reference.keep()
        if state is not None:
            state.close()


def attach_fsdp(model: nn.Module, gradients: object, strict: bool, **options: Any) -> Handle:
    """`attach` for FSDP2. options: those of `FSDPState`."""
    torch_parts.check(model)
    check_free(model)
    state = FSDPState(model, gradients, **options)
    check_strict(state, strict)
    state.install()
    return announced(FSDPHandle(state))
