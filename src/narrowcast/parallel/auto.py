"""`attach(model, "auto")`: watch a few steps as they are, measure the link, and decide as `narrowcast advise` does."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from narrowcast.codecs import ErrorReport
from narrowcast.collectives import Channel, TorchTransport, all_reduce
from narrowcast.measure import DeviceClock
from narrowcast.parallel import overlap
from narrowcast.parallel.ddp.bucket_calls import Done
from narrowcast.parallel.ddp.handle import DDPHandle, ModelHook, model_of, register
from narrowcast.parallel.ddp.hook import Bucket, DDPState, failed_future, plain_all_reduce
from narrowcast.parallel.handle import Handle
from narrowcast.parallel.policy import AS_IS, CodecChoice
from narrowcast.parallel.ranks import check_same, propagate_errors
from narrowcast.parallel.stats import CallEvent, TensorRow

log = logging.getLogger("narrowcast")

PLAIN = "as-is"
WIRES = ("bf16", "int8/256")
"""What it chooses from: wires that hardly ever cost accuracy. Whoever wants fewer bits asks for them."""
WARM_UP, WATCHED = 2, 3
"""DDP makes its buckets anew after the first step; then so many steps are timed."""
VALUES = 1 << 20
ROUNDS = 4
SLOW_SECONDS = 0.5
"""Where the plain sum of VALUES takes longer, every wire is timed on a quarter of them."""


@dataclass
class BucketTimes:
    """Steps as they are: when each bucket was ready, since the forward pass began, by the clock of the device."""

    group: dist.ProcessGroup
    clock: DeviceClock
    began: Any = None
    buckets: list[tuple[Any, int]] = field(default_factory=list)
    """Marks of the clock, and values."""
    steps: list[tuple[Any, list[tuple[Any, int]]]] = field(default_factory=list)
    """The mark at which each began, and its buckets."""
    step: int = 0

    def begin(self) -> None:
        self.began, self.buckets = self.clock.mark(), []

    def reduce(self, bucket: Bucket) -> Done:
        """Send a bucket the way that DDP itself would."""
        self.buckets.append((self.clock.mark(), bucket.buffer().numel()))
        if bucket.is_last():
            self.steps.append((self.began, self.buckets))
            self.began, self.buckets, self.step = None, [], self.step + 1
        return plain_all_reduce(bucket.buffer(), self.group)

    @property
    def done(self) -> bool:
        return self.step >= WARM_UP + WATCHED

    def times(self) -> tuple[Tensor, Tensor]:
        """Ready times and values of each bucket: the medians of the steps whose buckets were the last ones.

        A rank that has run out of inputs, in `join()`, has steps that no forward pass began: those are no evidence, and
        the slowest rank's times count.
        """
        self.clock.wait()
        last = [values for _, values in self.steps[-1][1]]
        alike = [
            step for step in self.steps[WARM_UP:] if step[0] is not None and [values for _, values in step[1]] == last
        ]
        seconds = [[self.clock.seconds(began, mark) for mark, _ in buckets] for began, buckets in alike]
        ready = torch.tensor(seconds or [[0.0] * len(last)], dtype=torch.float64)
        return ready.median(dim=0).values, torch.tensor(last, dtype=torch.float64)


def agreed(channel: Channel, mine: Tensor) -> Tensor:
    """The slowest rank's value of each, the same on all ranks."""
    return torch.stack(channel.gather(mine)).amax(dim=0)


def seconds_a_value(channel: Channel, group: dist.ProcessGroup, clock: DeviceClock) -> dict[str, Tensor]:
    """Of a plain sum and of each wire: the mean of some rounds, then each round, [D]. Collective.

    The tensors lie on the clock's device, so that the sums take the backend and the links that gradients take.
    """
    values = VALUES
    first = _timed(lambda x: dist.all_reduce(x, group=group), values, 1, clock)
    if float(agreed(channel, first)[0]) > SLOW_SECONDS:
        values //= 4
    calls: dict[str, Callable[[Tensor], object]] = {PLAIN: lambda x: dist.all_reduce(x, group=group)}
    calls |= {wire: functools.partial(_through, wire, channel) for wire in WIRES}
    found = {}
    for wire, call in calls.items():
        rounds = agreed(channel, _timed(call, values, ROUNDS + 1, clock))[1:] / values
        found[wire] = torch.cat([rounds.mean()[None], rounds])
    return found


def _through(wire: str, channel: Channel, x: Tensor) -> None:
    all_reduce(x, wire, dist.ReduceOp.AVG, algorithm="two_shot", channel=channel)


def _timed(call: Callable[[Tensor], object], values: int, rounds: int, clock: DeviceClock) -> Tensor:
    x = torch.linspace(-1, 1, values, dtype=torch.float32, device=clock.device)
    return torch.tensor([clock.timed(lambda: call(x)) for _ in range(rounds)], dtype=torch.float64)


def steps_by_wire(ready: Tensor, values: Tensor, rates: dict[str, Tensor]) -> dict[str, Tensor]:
    """Seconds of a step with each wire in each version, [D]: the timeline on which `predict` works."""
    end = ready[-1].expand(len(rates[PLAIN]))
    return {
        wire: overlap.step(end, end, ready.expand(len(rate), -1), rate[:, None] * values).step
        for wire, rate in rates.items()
    }


Make = Callable[[DistributedDataParallel, str], DDPState]


class _BeforeForward:
    """Notes when each forward pass begins; of no use in a copy of the model."""

    def __init__(self, times: BucketTimes | None = None) -> None:
        self._times = times

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._times is not None and torch.is_grad_enabled():
            self._times.begin()

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()


class AutoState:
    """What a model's hook calls until a wire is chosen: buckets go as they are and are timed, then it decides."""

    def __init__(self, model: DistributedDataParallel, hook: ModelHook, make: Make) -> None:
        self.times = BucketTimes(model.process_group, DeviceClock(next(model.parameters()).device))
        self._model, self._hook, self._make = weakref.ref(model), weakref.ref(hook), make
        self._before_forward = model.register_forward_pre_hook(_BeforeForward(self.times))
        self.decision: overlap.WireDecision | None = None
        """None while watching."""
        self.handle: DDPHandle | None = None
        """That of the wire, where one was chosen."""

    def reduce(self, bucket: Bucket) -> Done:
        """Watch a bucket go, or decide with the first one of a step. Every rank comes here, those that keep others
        company in `join()` too: they have no forward pass.
        """
        if not (self.times.done and bucket.index() == 0):
            return self.times.reduce(bucket)
        hook = self._hook()
        assert hook is not None, "it calls this"
        try:
            self._decide(hook)
        except Exception as error:  # noqa: BLE001  raised here it would leave the DDP model unusable
            return failed_future(bucket, error)
        return hook.reduce(bucket)

    def _decide(self, hook: ModelHook) -> None:
        """Collective: every rank comes here in the same step, and to the same answer."""
        model = model_of(self._model)
        self.stop()
        channel = Channel(TorchTransport(model.process_group))
        with propagate_errors(channel):
            ready, values = self.times.times()
            ready = agreed(channel, ready)
            rates = seconds_a_value(channel, model.process_group, self.times.clock)
            self.decision = overlap.decide(steps_by_wire(ready, values, rates), PLAIN)
        channel.close()
        if self.decision.wire != PLAIN:
            hook.state = state = self._make(model, self.decision.wire)
            self.handle = DDPHandle(model, hook, state)
        if dist.get_rank(model.process_group) == 0:
            log.info("attach auto: %s", self.reason())

    def stop(self) -> None:
        """Watch no longer."""
        self._before_forward.remove()
        hook = self._hook()
        if hook is not None and hook.state is self:
            hook.state = None

    def reason(self) -> str:
        """What was decided and why, in a line."""
        if self.decision is None:
            return f"watching: {self.times.step} of {WARM_UP + WATCHED} steps seen, gradients travel as they are"
        verb = f"use {self.decision.wire}" if self.decision.wire != PLAIN else "gradients stay as they are"
        return f"{verb}: {self.decision.why}"


class AutoHandle(Handle):
    """First watches, then is the handle of the wire that was chosen; without a wire there is nothing to count."""

    def __init__(self, model: DistributedDataParallel, state: AutoState) -> None:
        self._weak_model, self._auto = weakref.ref(model), state

    @property
    def choice(self) -> overlap.WireDecision | None:
        """What was decided; None while watching."""
        return self._auto.decision

    @property
    def step(self) -> int:
        return self._auto.handle.step if self._auto.handle else self._auto.times.step

    @property
    def seed(self) -> int:
        return self._auto.handle.seed if self._auto.handle else 0

    def reason(self) -> str:
        """What was decided and why, in a line."""
        return self._auto.reason()

    def stats(self) -> dict[str, float]:
        return self._auto.handle.stats() if self._auto.handle else {}

    def events(self) -> list[CallEvent]:
        return self._auto.handle.events() if self._auto.handle else []

    def rows(self) -> list[TensorRow]:
        if self._auto.handle:
            return self._auto.handle.rows()
        named, why = model_of(self._weak_model).module.named_parameters(), CodecChoice(AS_IS, self.reason())
        return [TensorRow.of(name, p.numel(), why, p.dtype) for name, p in named if p.requires_grad]

    def explain(self) -> str:
        return "\n".join([f"auto: {self.reason()}", *([self._auto.handle.explain()] if self._auto.handle else [])])

    def errors(self) -> dict[str, ErrorReport]:
        return self._auto.handle.errors() if self._auto.handle else {}

    def check_ranks(self) -> None:
        if self._auto.handle:
            self._auto.handle.check_ranks()
            return
        model = model_of(self._weak_model)
        channel = Channel(TorchTransport(model.process_group))
        try:
            check_same(channel, {"parameters": model.module.parameters()})
        finally:
            channel.close()

    def state_dict(self) -> dict[str, Tensor]:
        return self._auto.handle.state_dict() if self._auto.handle else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state and self._auto.handle is None:
            raise RuntimeError(
                "load_state_dict: auto has chosen no wire, so there is no residual; attach the wire by its name"
            )
        if state and self._auto.handle:
            self._auto.handle.load_state_dict(state)

    def detach(self) -> None:
        self._auto.stop()
        if self._auto.handle:
            self._auto.handle.detach()


def attach_auto(model: DistributedDataParallel, hook: ModelHook, make: Make) -> Handle:
    """Attach without a wire: it is chosen after a few steps. make: the state for a wire, once it is known."""
    register(model, hook)
    hook.state = state = AutoState(model, hook, make)
    return AutoHandle(model, state)
