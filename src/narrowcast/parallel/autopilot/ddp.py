"""The autopilot of a DDP model: its buckets take the road that was decided, and are timed on it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Times
from narrowcast.kernels import FLOATS
from narrowcast.measure import DeviceClock
from narrowcast.parallel.autopilot.history import Decided, Replay
from narrowcast.parallel.autopilot.pilot import Autopilot
from narrowcast.parallel.autopilot.times import (
    HALF,
    PLAIN,
    WIRES,
    Fit,
    Layout,
    StepTimes,
    agreed,
    half_sum,
    plain_sum,
    time_sums,
    wire_sum,
    without_calls,
)
from narrowcast.parallel.ddp import buckets
from narrowcast.parallel.ddp.backend import Finish, backend_sum, finish_bucket
from narrowcast.parallel.ddp.bucket_calls import CALL, Done, Grouped
from narrowcast.parallel.ddp.hook import Bucket, DDPState
from narrowcast.parallel.levels import inside_of
from narrowcast.parallel.policy import CodecChoice
from narrowcast.parallel.stats import TensorRow


@torch.compiler.disable
def _begin(times: StepTimes) -> None:
    """A compiler that looked inside would warn of the clock."""
    times.begin()


class _BeforeForward:
    """Notes when each forward pass begins; of no use in a copy of the model."""

    def __init__(self, times: StepTimes | None = None) -> None:
        self._times = times

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._times is not None and torch.is_grad_enabled():
            _begin(self._times)

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()


class DDPRoad:
    """Measures with the ranks of a DDP model."""

    is_real = True

    def __init__(self, state: PilotedState, clock: DeviceClock, dtype: torch.dtype) -> None:
        # weakly: the state has the pilot, and the pilot this
        self._state, self.times, self._dtype = weakref.ref(state), StepTimes(clock), dtype
        self.together = state.channel.transport.carries(clock.device)
        self.shares, self.skips = not clock.cuda, state.residuals._scaling is not None
        self.halves = dtype.itemsize > 2 and state.levels.nodes is None

    def _owner(self) -> PilotedState:
        state = self._state()
        if state is None:
            raise RuntimeError("internal: a road without its state")
        return state

    def numbers(self) -> tuple[float, float, float]:
        return self.times.numbers()

    def fits(self, wires: Sequence[str], values: int) -> dict[str, Fit]:
        state = self._owner()
        roads: dict[str, Any] = {PLAIN: partial(plain_sum, group=state.group)}
        if self.halves:
            roads[HALF] = partial(half_sum, group=state.group)
        roads |= {wire: partial(wire_sum, wire=wire, channel=state.channel, **state.how(wire)) for wire in wires}
        return time_sums(self.times.clock, state.channel, roads, self._dtype, values)

    def layout(self, stalls: bool) -> Layout:
        ready, took, marks = self.times.last()
        ready = without_calls(ready, took) if stalls else ready
        slowest = agreed(self._owner().channel, torch.tensor(ready, dtype=torch.float64))
        return Layout(tuple(slowest.tolist()), tuple(marks.names), tuple(marks.values))


class PilotedState(DDPState):
    """A state whose policy also says on which road a step travels: the backend's own sum, or wires."""

    probes = False
    policy: Autopilot | Replay

    def __init__(self, model: DistributedDataParallel, gradients: Autopilot | Replay, **options: Any) -> None:
        self._decision, self._is_begun, self._scaler = Decided(0), False, options.get("scaler")
        super().__init__(model, gradients, **options)
        device = next(iter(self.parameters.values())).device
        self._road = DDPRoad(self, DeviceClock(device), self._most_values())
        self._before_forward = model.register_forward_pre_hook(_BeforeForward(self._road.times))
        if isinstance(gradients, Autopilot):
            gradients.leave_out([codec for codec in gradients.known.codecs if not self._is_possible(codec)])
            some = [self._info(name) for name, p in self.parameters.items() if self._may_change(p)]
            gradients.start(self._road, some)
        if self.channel.world == 1 or not any(p.dtype in FLOATS for p in self.parameters.values()):
            self._watch = None

    def _most_values(self) -> torch.dtype:
        """The type of which there is most among those that wires carry: sums are timed in it."""
        counts = dict.fromkeys([torch.float32, *FLOATS], 0)
        for parameter in self.parameters.values():
            if parameter.dtype in counts:
                counts[parameter.dtype] += parameter.numel()
        return max(counts, key=counts.__getitem__)

    def how(self, wire: str) -> dict[str, Any]:
        """The options of a sum that takes the way of gradients."""
        inner = inside_of(codec_named(wire), self.levels.inner)
        return {"algorithm": self.algorithm, "nodes": self.levels.nodes, "inner": inner}

    def _check_algorithm(self) -> None:
        if isinstance(self.policy, Autopilot):
            self.policy.claim()  # no sooner: an attach that failed leaves it free, and a rank that fails here is heard
        super()._check_algorithm()
        if isinstance(self.policy, Replay):
            self.policy.check_names(self.reduced)
            for name, wire in self.policy.all_wires():
                codec, _ = codec_named(wire).for_shape(self._info(name).sent_shape)
                self._check_possible(name, codec)

    def _is_possible(self, codec: Codec) -> bool:
        """Whether the algorithm that was asked for takes it."""
        try:
            self._kind(codec, [torch.empty(64, 64)], torch.float32)
        except ValueError:
            return False
        return True

    def _may_change(self, parameter: Tensor) -> bool:
        name = self.names[id(parameter)]
        return parameter.dtype in FLOATS and name not in self._sparse and parameter.numel() >= self.min_values

    def choice(self, name: str, parameter: Tensor) -> CodecChoice:
        """Found once for each decision."""
        choice = self._choices.get(name)
        if choice is None:
            choice = self._choices[name] = self._choose(name, parameter)
        return choice

    def rows(self) -> list[TensorRow]:
        self._follow()
        return super().rows()

    def _follow(self) -> None:
        """Forget the choices of the last decision."""
        decision = self.policy.at(self.step)
        if decision is not self._decision:
            self._decision, self._choices = decision, {}

    def warnings(self) -> list[str]:
        return [*self.policy.notes(), *super().warnings()]

    def _begin_step(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            super()._begin_step()
            self._follow()

    def _start(self, bucket: Bucket, done: Callable[[], None] = lambda: None) -> Done:
        parameters, buffer = bucket.parameters(), bucket.buffer()
        done = self._road.times.ready(tuple(self.names[id(p)] for p in parameters), buffer.numel())
        if bucket.is_last():
            self._road.times.end()
        if bucket.index() == 0:
            self._is_begun = False  # whatever it is: a pass that broke off had this step's number
            self._begin_step()
        if self._watch is not None and self.policy.due(self.step) and not bucket.is_last():
            self._road.times.looks()
        is_dense = not buffer.is_sparse and buffer.dtype in FLOATS and not any(p.is_complex() for p in parameters)
        if self._decision.road == WIRES or not is_dense:
            return super()._start(bucket, done)
        if self._unused is not None:
            self._unused.see(parameters)
        if self._watch is not None and self.policy.due(self.step):
            self.show(self._group_gradients(parameters, bucket.gradients(), buffer.dtype), self.step, "local")
        finish = partial(finish_bucket, self._share.rescale, done)
        if self._decision.road == HALF and buffer.dtype.itemsize > 2:
            return self._start_half(buffer, finish)
        return self._start_plain(buffer, finish)

    def _start_half(self, buffer: Tensor, finish: Finish) -> Done:
        """As torch's own hook for bfloat16 does it."""
        world = self.channel.world
        size = 2 * (world - 1) * buffer.numel() * 2 // world
        self.stats.count(CALL, buffer.numel(), size, 2 * size, Times(), 0.0, compressed=buffer.numel())
        return backend_sum(buffer.bfloat16().div_(world), self.group, lambda mean: finish(buffer.copy_(mean)))

    def show(self, groups: Grouped, step: int, at: str) -> None:
        """As they lie in memory, which is how they are sent; and only where somebody looks."""
        if self._watch is None or at != "local" or not self.policy.due(step) or not isinstance(self.policy, Autopilot):
            return
        began, self.policy.unit = time.perf_counter(), self._scaler.get_scale() if self._scaler is not None else 1.0
        for group, gradients in groups:
            for name, gradient in zip(group.names, gradients, strict=True):
                shape = buckets.matrix_of(self.reduced[name]) if gradient.dim() > 1 and gradient.numel() else None
                flat = buckets.in_memory(gradient)
                self._watch.look(self._info(name), flat if shape is None else flat.view(shape), step, at)
        self.policy.spent["look"] += time.perf_counter() - began

    def close(self) -> None:
        if hasattr(self, "_before_forward"):
            self._before_forward.remove()
        super().close()
