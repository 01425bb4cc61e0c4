"""`attach(model, "auto")`: watch a few steps as they are, measure the link, and decide as `narrowcast advise` does."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from narrowcast.codecs import ErrorReport
from narrowcast.collectives.api import all_reduce
from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.transports.torch import TorchTransport
from narrowcast.measure import DeviceClock
from narrowcast.parallel import overlap
from narrowcast.parallel.ddp.hook import Bucket, DDPState, Done, failed, plain
from narrowcast.parallel.handle import Handle, _Hook, register
from narrowcast.parallel.policy import AS_IS, Choice
from narrowcast.parallel.propagate_errors import telling
from narrowcast.parallel.stats import Row
from narrowcast.parallel.timeline import Event

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
class Watch:
    """Steps as they are: when each bucket was ready, since the forward pass began, by the clock of the device."""

    group: dist.ProcessGroup
    clock: DeviceClock
    began: Any = None
    buckets: list[tuple[Any, int]] = field(default_factory=list)
    """Marks of the clock, and values."""
    steps: list[tuple[Any, list[tuple[Any, int]]]] = field(default_factory=list)
    """The mark at which each began, and its buckets."""
    step: int = 0
    seed: int = 0
    """Nothing is rounded while it watches."""
    channel: Channel | None = None
    """Made for the moment in which one is needed."""

    def begin(self) -> None:
        self.began, self.buckets = self.clock.mark(), []

    def reduce(self, bucket: Bucket) -> Done:
        """Send a bucket the way that DDP itself would."""
        self.buckets.append((self.clock.mark(), bucket.buffer().numel()))
        if bucket.is_last():
            self.steps.append((self.began, self.buckets))
            self.began, self.buckets, self.step = None, [], self.step + 1
        return plain(bucket.buffer(), self.group)

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
    x = torch.linspace(-1, 1, values, device=clock.device)
    return torch.tensor([clock.timed(lambda: call(x)) for _ in range(rounds)], dtype=torch.float64)


def steps_by_wire(ready: Tensor, values: Tensor, rates: dict[str, Tensor]) -> dict[str, Tensor]:
    """Seconds of a step with each wire in each version, [D]: the timeline on which `predict` works."""
    end = ready[-1].expand(len(rates[PLAIN]))
    return {
        wire: overlap.step(end, end, ready.expand(len(rate), -1), rate[:, None] * values).step
        for wire, rate in rates.items()
    }


Make = Callable[[DistributedDataParallel, str], DDPState]


class _Begins:
    """Told before each forward pass; of no use in a copy of the model."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._watch is not None and torch.is_grad_enabled():
            self._watch.begin()

    def __reduce__(self) -> tuple[type[_Begins], tuple[()]]:
        return _Begins, ()


class AutoHandle(Handle):
    """A handle that first watches, then is that of the wire that was chosen, or of none."""

    def __init__(self, model: DistributedDataParallel, hook: _Hook, make: Make) -> None:
        self._watch = Watch(model.process_group, DeviceClock(next(model.parameters()).device))
        super().__init__(model, hook, self._watch)  # type: ignore[arg-type]
        self._make = make
        self.choice: overlap.Choice | None = None
        """What was decided; None while watching."""
        self._begins = model.register_forward_pre_hook(_Begins(self._watch))
        hook.state = self

    def reduce(self, bucket: Bucket) -> Done:
        """Watch a bucket go, or decide with the first one of a step. Every rank comes here, those that keep others
        company in `join()` too: they have no forward pass.
        """
        if not (self._watch.done and bucket.index() == 0):
            return self._watch.reduce(bucket)
        try:
            self._decide()
        except Exception as error:  # noqa: BLE001  raised here it would leave the DDP model unusable
            return failed(bucket, error)
        return self._hook.reduce(bucket)

    def _decide(self) -> None:
        """Collective: every rank comes here in the same step, and to the same answer."""
        self._begins.remove()
        self._hook.state = None
        channel = Channel(TorchTransport(self._model.process_group))
        with telling(channel):
            ready, values = self._watch.times()
            ready = agreed(channel, ready)
            rates = seconds_a_value(channel, self._model.process_group, self._watch.clock)
            steps = steps_by_wire(ready, values, rates)
            self.choice = overlap.decide(steps, PLAIN)
        channel.close()
        if self.choice.wire != PLAIN:
            self._state = self._hook.state = self._make(self._model, self.choice.wire)
        if dist.get_rank(self._model.process_group) == 0:
            log.info("attach auto: %s", self.reason())

    def reason(self) -> str:
        """What was decided and why, in a line."""
        if self.choice is None:
            return f"watching: {self._watch.step} of {WARM_UP + WATCHED} steps seen, gradients travel as they are"
        verb = f"use {self.choice.wire}" if self.choice.wire != PLAIN else "gradients stay as they are"
        return f"{verb}: {self.choice.why}"

    @property
    def _attached(self) -> bool:
        return not isinstance(self._state, Watch)

    def stats(self) -> dict[str, float]:
        return super().stats() if self._attached else {}

    def rows(self) -> list[Row]:
        if self._attached:
            return super().rows()
        named = self._model.module.named_parameters()
        return [Row.of(n, p.numel(), Choice(AS_IS, self.reason()), p.dtype) for n, p in named if p.requires_grad]

    def explain(self) -> str:
        return "\n".join([f"auto: {self.reason()}", *([super().explain()] if self._attached else [])])

    def events(self) -> list[Event]:
        return super().events() if self._attached else []

    def errors(self) -> dict[str, ErrorReport]:
        return super().errors() if self._attached else {}

    def check_ranks(self) -> None:
        if self._attached:
            super().check_ranks()
            return
        self._watch.channel = Channel(TorchTransport(self._model.process_group))
        try:
            super().check_ranks()
        finally:
            self._watch.channel.close()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state and not self._attached:
            raise RuntimeError(
                "load_state_dict: auto has chosen no wire, so nothing is owed; attach the wire by its name"
            )
        if state:
            super().load_state_dict(state)

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() if self._attached else {}

    def detach(self) -> None:
        self._begins.remove()
        if self._attached:
            super().detach()
        elif self._hook.state is self:
            self._hook.state = None


def watch(model: DistributedDataParallel, hook: _Hook, make: Make) -> Handle:
    """Attach without a wire: it is chosen after a few steps. make: the state for a wire, once it is known."""
    register(model, hook)
    return AutoHandle(model, hook, make)
