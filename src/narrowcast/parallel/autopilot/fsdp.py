"""The autopilot of an FSDP2 model: the reduce-scatters of its units take FSDP's own road, or wires."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from narrowcast.kernels import FLOATS
from narrowcast.measure import DeviceClock
from narrowcast.parallel.autopilot.history import Replay
from narrowcast.parallel.autopilot.pilot import Autopilot
from narrowcast.parallel.autopilot.times import (
    HALF,
    PLAIN,
    WIRES,
    Fit,
    Layout,
    StepTimes,
    agreed,
    plain_sum,
    time_sums,
    wire_sum,
    without_calls,
)
from narrowcast.parallel.policy import TensorInfo

if TYPE_CHECKING:
    from narrowcast.parallel.fsdp.layout import Unit
    from narrowcast.parallel.fsdp.shards import FSDPState


class FSDPRoad:
    """Measures with the ranks of an FSDP2 model. A reduce-scatter is the first half of a sum, and is timed as that."""

    is_real, halves = True, False

    def __init__(self, state: FSDPState, group: dist.ProcessGroup, device: torch.device) -> None:
        self._state, self._group = weakref.ref(state), group
        self.times = StepTimes(DeviceClock(device))
        self.shares, self.skips = device.type == "cpu", state.row_residuals._scaling is not None
        self.together = True
        """The wires of a unit are one call."""
        self._blocks = device.type == "cpu"
        """The host waits for each call: nothing hides it."""

    def numbers(self) -> tuple[float, float, float]:
        return self.times.numbers()

    def fits(self, wires: Sequence[str], values: int) -> dict[str, Fit]:
        channel = self._owner().channel
        roads: dict[str, Any] = {PLAIN: partial(plain_sum, group=self._group)}
        roads |= {wire: partial(wire_sum, wire=wire, channel=channel) for wire in wires}
        whole = time_sums(self.times.clock, channel, roads, self._dtype(), values)
        return {name: Fit(fit.latency / 2, fit.per_value / 2) for name, fit in whole.items()}

    def layout(self, stalls: bool) -> Layout:
        ready, took, marks = self.times.last()
        if self._blocks and ready:
            ready = [ready[-1] - sum(took[:-1])] * len(ready)
        elif stalls:
            ready = without_calls(ready, took)
        slowest = agreed(self._owner().channel, torch.tensor(ready, dtype=torch.float64))
        return Layout(tuple(slowest.tolist()), tuple(marks.names), tuple(marks.values))

    def settle(self) -> None:
        """End the last step, where nobody did yet."""
        self._owner().settle()

    def _dtype(self) -> torch.dtype:
        kinds = [unit.reduce_dtype for unit in self._owner().units if unit.reduce_dtype in FLOATS]
        return kinds[0] if kinds else torch.float32

    def _owner(self) -> FSDPState:
        state = self._state()
        if state is None:
            raise RuntimeError("internal: a road without its state")
        return state


class UnitPilot:
    """What an FSDP state asks: on which road a step goes; and where its units are timed."""

    def __init__(self, state: FSDPState, policy: Autopilot | Replay, group: dist.ProcessGroup) -> None:
        self._policy = policy
        self.road = FSDPRoad(state, group, torch.device(state.units[0].mesh.mesh.device_type))
        if state.replicas is not None:
            raise ValueError('attach: "auto" takes one group of ranks, and HSDP has two; give specs, or shard in 1-D')
        if isinstance(policy, Replay):
            policy.check_names([tensor.name for unit in state.units for tensor in unit.tensors])
            if policy.has_road(HALF):
                raise ValueError(
                    "attach: the history has the backend's sum in 16 bits, which FSDP2 has not; replay DDP's"
                )
        if isinstance(policy, Autopilot):
            infos = [
                TensorInfo(t.name, t.shape, unit.reduce_dtype)
                for unit in state.units
                for t in unit.tensors
                if t.trainable and unit.reduce_dtype in FLOATS and torch.Size(t.shape).numel() >= state.min_values
            ]
            policy.start(self.road, infos)

    def before_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self.road.settle()
            self.road.times.begin()

    def is_plain(self, step: int) -> bool:
        """Whether FSDP's own reduce-scatter takes it."""
        return self._policy.at(step).road != WIRES

    def looks(self, step: int) -> bool:
        if isinstance(self._policy, Autopilot):
            scaling = self.road._owner().row_residuals._scaling
            self._policy.unit = scaling.scale if scaling is not None else 1.0
        return self._policy.due(step)

    def unit(self, unit: Unit, names: tuple[str, ...], values: int) -> Callable[[], None]:
        """A unit's gradients are ready; what is returned says that they are done."""
        if self.looks(self.road._owner().step):
            self.road.times.looks()
        return self.road.times.ready(names, values)


def unit_pilot(state: FSDPState, policy: object, group: dist.ProcessGroup) -> UnitPilot | None:
    """Where the policy decides on whole steps."""
    return UnitPilot(state, policy, group) if isinstance(policy, Autopilot | Replay) else None
