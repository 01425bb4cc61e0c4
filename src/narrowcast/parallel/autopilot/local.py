"""The autopilot of LocalSGD: an exchange is a step by itself, which nothing hides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from narrowcast.collectives import Channel, all_reduce
from narrowcast.measure import DeviceClock
from narrowcast.parallel.autopilot.pilot import Autopilot
from narrowcast.parallel.autopilot.times import PLAIN, Fit, Layout, StepTimes, time_sums, wire_sum
from narrowcast.parallel.policy import AS_IS, TensorInfo, Watch


class LocalRoad:
    """Measures with the workers. What travels as it is takes the channel, too."""

    is_real, halves, together, shares, skips = True, False, False, True, False

    def __init__(self, channel: Channel, pilot: Autopilot, tensors: Sequence[TensorInfo], min_values: int) -> None:
        self._channel, self._pilot = channel, pilot
        self._all, self._watch = {info.name: info for info in tensors}, Watch(pilot, min_values)
        self.times: StepTimes | None = None
        pilot.claim()
        pilot.start(self, [info for info in tensors if info.numel >= min_values])

    def numbers(self) -> tuple[float, float, float]:
        return self.times.numbers() if self.times is not None else (0.0, 0.0, 0.0)

    def fits(self, wires: Sequence[str], values: int) -> dict[str, Fit]:
        assert self.times is not None
        roads = {wire: partial(wire_sum, wire=wire, channel=self._channel) for wire in wires}
        found = time_sums(self.times.clock, self._channel, roads, torch.float32, values)
        return {PLAIN: found[AS_IS.spec], **found}

    def layout(self, stalls: bool = False) -> Layout:
        return Layout((0.0,), (tuple(self._all),), (sum(info.numel for info in self._all.values()),))

    def begin(self, exchange: int, moved: Mapping[str, Tensor]) -> None:
        """An exchange: decide with what the last ones showed, look at this one. Collective."""
        if self.times is None:
            self.times = StepTimes(DeviceClock(next(iter(moved.values())).device))
            self.shares = self._pilot.known.shares = not self.times.clock.cuda
        self._watch.decide(exchange - 1, self._add, self._channel.world)
        for name, tensor in moved.items() if self._pilot.due(exchange) else ():
            self._watch.look(self._all[name], tensor, exchange, "local")
        self.times.begin()
        self._done = self.times.ready(tuple(moved), sum(tensor.numel() for tensor in moved.values()))

    def end(self) -> None:
        """All of it has arrived."""
        assert self.times is not None
        self._done()
        self.times.end()

    def _add(self, numbers: Tensor) -> Tensor:
        all_reduce(numbers, "as-is", algorithm="one_shot", channel=self._channel)
        return numbers
