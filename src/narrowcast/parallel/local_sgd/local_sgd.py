"""Local updates: every worker trains by itself for many steps, then the workers exchange what they have learnt.

With an outer optimizer (Nesterov momentum) on the mean of what the workers moved, this is DiLoCo; with plain SGD at a
learning rate of 1, local SGD; in fragments that travel while steps go on, Streaming DiLoCo; with a few neighbours
instead of all, gossip.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowcast.collectives import Channel, TorchTransport
from narrowcast.measure import DeviceClock
from narrowcast.parallel import policy
from narrowcast.parallel.autopilot import Autopilot, Replay, auto
from narrowcast.parallel.autopilot.local import LocalRoad
from narrowcast.parallel.fsdp.optimizer_check import parameters_of
from narrowcast.parallel.local_sgd import state as local_state
from narrowcast.parallel.local_sgd.fragments import Clock, float_buffers
from narrowcast.parallel.local_sgd.graph import ALL
from narrowcast.parallel.local_sgd.replica import ROLE, Replica, WirePlan, check_complete
from narrowcast.parallel.local_sgd.sending import Flight, Sender
from narrowcast.parallel.local_sgd.settings import LocalUpdates, Outer, nesterov
from narrowcast.parallel.local_sgd.state import State
from narrowcast.parallel.local_sgd.times import ExchangeTimes
from narrowcast.parallel.ranks import agree, digest, propagate_errors, ranks_that_differ
from narrowcast.parallel.seeds import default_group, own_seed
from narrowcast.parallel.stats import CallEvent, Stats, TensorRow, render
from narrowcast.parallel.wrappers import inner_model, inner_optimizer


class LocalSGD:
    """Exchange with the other workers every so many steps, in few bits. Making one is collective.

    Between exchanges a worker's parameters are its own. At an exchange each worker sends how far it moved (the outer
    gradient: where it started less where it is), the mean goes to an outer optimizer, and all start from its result,
    each parameter in its own type. With an optimizer, that one keeps it alive until `close()`.

    optimizer: the inner one; every step that it makes is counted. Without it call `step()` after each. spec: a policy,
    as for `attach`, or "auto", which counts exchanges where a DDP model counts steps. every, fragments, delay, merge,
    mixing, outer: see `LocalUpdates`, which `local` takes in their place. group: the workers;
    where a worker has several ranks, those ranks of all workers that hold the same part of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        spec: object,
        every: int | None = None,
        fragments: int = 1,
        delay: int = 0,
        merge: float | None = None,
        mixing: str | Mapping[int, str] = ALL,
        outer: Outer = nesterov,
        local: LocalUpdates | None = None,
        group: dist.ProcessGroup | None = None,
        min_values: int = policy.MIN_VALUES,
        seed: int = 0,
    ) -> None:
        given = {"fragments": fragments, "delay": delay, "merge": merge, "mixing": mixing, "outer": outer}
        self.updates = _settings(local, every, given)
        spec = auto() if isinstance(spec, str) and spec == "auto" else spec
        wires = WirePlan(spec, min_values, self.updates)
        wires.check()
        self._policy, self._clock = spec, Clock(self.updates)
        self._unhook: Callable[[], None] = lambda: None
        self._own = Replica(inner_model(model), self.updates, wires)
        self._model = self._own.model
        optimizer = None if optimizer is None else inner_optimizer(optimizer)
        _check_optimizer(optimizer, self._own.parameters)
        self._fresh = local_state.own_keys(self._own.outer)
        self._channel = Channel(TorchTransport(group))
        noise = own_seed("LocalSGD", seed, group or default_group())
        self._stats, self._flights = Stats(), list[Flight]()
        self._sender = Sender(self._channel, self._own, seed, noise, self._stats)
        self._times = ExchangeTimes(DeviceClock(next(iter(self._own.anchors.values())).device))
        self._agree_on_the_start()
        self._road = None
        if isinstance(spec, Autopilot):
            infos = [self._info(name) for name in self._own.parameters]
            self._road = LocalRoad(self._channel, spec, infos, min_values)
        self._check_wires()
        # last: what fails above leaves the optimizer alone
        self._unhook = _call_after_steps(optimizer, self.step)

    @property
    def every(self) -> int:
        """Steps from one exchange of a parameter to its next."""
        return self.updates.every

    @property
    def steps(self) -> int:
        """Inner steps so far."""
        return self._clock.steps

    @property
    def exchanges(self) -> int:
        """Those whose result has come, of whatever fragments."""
        return self._clock.exchanges

    def _agree_on_the_start(self) -> None:
        """What the workers moved has a mean only if they moved from the same place."""
        different = ranks_that_differ(self._channel, digest(self._own.anchors.values()))
        if different:
            self.close()
            raise RuntimeError(
                f"LocalSGD: the parameters of workers {different} differ from those of worker 0; make it while all "
                "have the same values (one seed, or a broadcast), and load a worker's own checkpoint afterwards"
            )

    def _check_wires(self) -> None:
        """What the first exchange would stumble over, hundreds of steps later."""
        try:
            with propagate_errors(self._channel):
                agree(self._channel, "LocalSGD", f"{policy.spelled(self._policy)}{self.updates.spelled}")
                if isinstance(self._policy, Replay):
                    self._policy.check_names(self._own.parameters)
                self._own.by_codec(self._own.parameters, self._clock)
        except BaseException:
            self.close()
            raise

    @torch.no_grad()
    def step(self) -> bool:
        """Count an inner step; take what is due, and send what is due. Returns whether an exchange came to its end."""
        self._times.begin()
        self._clock.steps += 1
        before = self.exchanges
        self._land(self._clock.steps)
        for number in self._clock.due():
            self._send([number], self._clock.steps + self.updates.delay)
        self._land(self._clock.steps)
        self._times.end()
        return self.exchanges > before

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange all of the model now, and wait for it (collective); afterwards all workers have the same values.

        What is under way comes first. Where workers average with neighbours, this is the mean of all, as it is.
        """
        self._times.begin()
        self._land(None)
        if self.updates.with_neighbours:
            self._meet()
        else:
            self._send(range(self.updates.fragments), None)
            self._land(None, kept=0.0)
        self._times.end()

    def _send(self, numbers: Sequence[int], due: int | None) -> None:
        """Start an exchange of these fragments. due: the step after which it lands; None: now."""
        with propagate_errors(self._channel), self._after_flights():
            own, clock = self._own, self._clock
            names = own.names_in(numbers)
            self._land_first(names)
            moved = own.moved(names)
            if self._road is not None:
                self._road.begin(self.exchanges, moved)
            wires = own.by_codec(moved, clock)
            round_ = clock.rounds[numbers[0]]
            kind = self.updates.kind_at(round_)
            buffers = {name: buffer.clone() for name, buffer in own.buffers_in(numbers).items()}
            flight = Flight(clock.steps if due is None else due, moved, buffers, kind)
            self._sender.start(flight, clock.begin(numbers), wires, round_)
            self._flights.append(flight)
            self._flights.sort(key=lambda one: one.due)

    def _land_first(self, names: Sequence[str]) -> None:
        """What is still under way of these: their movement would count twice. Where a checkpoint had a longer delay."""
        for due in [one.due for one in self._flights if not one.gradients.keys().isdisjoint(names)]:
            self._land(due)

    @contextmanager
    def _after_flights(self) -> Iterator[None]:
        """An error is told when what is under way is over: the others may still need this rank's part of it."""
        try:
            yield
        except Exception:
            for work in [work for flight in self._flights for work in flight.works]:
                work.join()
            raise

    def _land(self, step: int | None, kept: float | None = None) -> None:
        """Wait for what is due by this step (None: everything), and make parameters of it."""
        while self._flights and (step is None or self._flights[0].due <= step):
            flight = self._flights[0]
            with self._times.waiting():
                flight.wait()
            # whoever fails here comes to no more calls, for which the others would wait
            with propagate_errors(self._channel), self._after_flights():
                self._take(flight, self.updates.own_part if kept is None else kept)

    def _take(self, flight: Flight, kept: float) -> None:
        """Make an outer step of what has come. kept: the part of its own that a worker merges with the result."""
        flight.arrive()
        if self._road is not None:
            self._road.end()
        del self._flights[0]
        self._own.land(flight.gradients, flight.buffers, kept)
        if flight.kind == ALL and self.updates.with_neighbours:
            self._sender.copies.meet({name: self._own.anchors[name] for name in flight.gradients})
        self._clock.exchanges += 1
        self._stats.steps = self.exchanges

    def _meet(self) -> None:
        """All workers at the mean of where they are."""
        with propagate_errors(self._channel):
            check_complete(self._model, self._own.parameters)
            positions = self._own.positions(self._own.moved(self._own.parameters))
            buffers = {name: buffer.float() for name, buffer in float_buffers(self._model).items()}
        self._sender.average([*positions.values(), *buffers.values()])
        self._own.settle(positions, buffers)
        self._sender.copies.meet(self._own.anchors)
        self._clock.begin(range(self.updates.fragments))
        self._clock.exchanges += 1
        self._stats.steps = self.exchanges

    def _info(self, name: str) -> policy.TensorInfo:
        return policy.TensorInfo(name, tuple(self._own.parameters[name].shape), torch.float32, ROLE)

    def history(self) -> list[dict[str, Any]]:
        """What "auto" decided, at which exchange; lines of a file for `nc.replay`. Empty without it."""
        return self._policy.history() if isinstance(self._policy, Autopilot | Replay) else []

    def rows(self) -> list[TensorRow]:
        """Every parameter: its wire, or why it stays as it is."""
        return self._own.rows(self._clock)

    def explain(self) -> str:
        """Every parameter in a table, how often it travels, in which fragment and with whom."""
        count = f"{self.exchanges} exchanges so far"
        notes = [f"every {self.every} steps over {self._channel.world} workers; {count}", *self._notes()]
        notes += self._policy.notes() if isinstance(self._policy, Autopilot | Replay) else []
        buffers = sum(b.numel() * b.element_size() for b in float_buffers(self._model).values())
        if buffers:
            notes.append(f"buffers: {buffers} bytes averaged at each exchange, as they are")
        return render(self.rows(), notes)

    def _notes(self) -> list[str]:
        updates, notes = self.updates, list[str]()
        if updates.fragments > 1 or updates.delay:
            parts = ", ".join(str(fragment.values) for fragment in self._own.fragments)
            notes.append(f"{updates.fragments} fragments of {parts} values, {updates.delay} steps under way")
        if updates.with_neighbours:
            notes.append(
                f"mixing: {updates.mixing}; messages are differences to what both ends know, which is what +ef is for"
            )
        return notes

    def stats(self) -> dict[str, float]:
        """Bytes, effective ratio and milliseconds of this rank, summed over the exchanges (its `steps`).

        wait_ms: steps stood still for results. exchange_ms: all that exchanges took of the steps, waiting included.
        computing_share: the rest of the time since the first step. variance: between the workers, at the last look;
        there where one looks at all, and 0 before, since all begin alike.
        """
        spread = {"variance": self._sender.variance or 0.0} if self.updates.looks_every else {}
        return {**self._stats.as_dict(), **self._times.as_dict(), **spread}

    def events(self) -> list[CallEvent]:
        """The last calls, for a trace."""
        return list(self._stats.events)

    def check_ranks(self) -> None:
        """Compare where the workers started from, and their outer optimizers (collective); raise where one differs.

        Where workers average with neighbours these are each worker's own, and counters are compared alone.
        """
        own, clock = self._own, self._clock
        kept = [v for a in own.anchors.values() for v in own.outer.state.get(a, {}).values() if isinstance(v, Tensor)]
        factors = [vectors for _, vectors in sorted(self._sender.factors.state_dict().items())]
        alike = [torch.tensor([clock.steps, clock.exchanges, clock.begun, *clock.rounds])]
        alike += [] if self.updates.with_neighbours else [*own.anchors.values(), *kept, *factors]
        different = ranks_that_differ(self._channel, digest(alike))
        if different:
            raise RuntimeError(f"check_ranks: the outer state of workers {different} differs from that of worker 0")

    @torch.no_grad()
    def state_dict(self) -> State:
        """Where the workers started, the outer optimizer, counters, mean residuals, and factors (collective).

        Valid for any number of workers. What is under way is waited for, saved, and lands when it is due. The model's
        own state is the caller's: best saved right after an exchange, when it is the same everywhere.
        """
        for flight in self._flights:
            flight.wait()
            flight.arrive()
        own, sender = self._own, self._sender
        factors = sender.factor_places(own.by_codec(own.parameters, self._clock)) | sender.factors.state_dict()
        kept = local_state.Beside(sender.mean_residuals(), factors, self._clock, self._flights)
        state = local_state.to_save(own, kept)
        if self.updates.with_neighbours:
            # each worker has its own: the mean is what all have in common
            sender.mean_of(local_state.tensors_of_workers(state))
        return state

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Go on from a checkpoint, with whatever number of workers; load the model's state as well."""
        for flight in self._flights:
            flight.wait()
        own, sender = self._own, self._sender
        sender.residuals.load(local_state.load(own, self._fresh, state))
        sender.factors.load(state.get(local_state.FACTORS, {}))
        self._clock.load(state["counters"], state.get("rounds", []))
        self._flights = local_state.flights_of(own, state)
        sender.copies.meet(own.anchors if self.updates.with_neighbours else {})
        self._stats.steps = self.exchanges

    def close(self) -> None:
        """Stop counting steps and close the connections; the parameters stay as they are.

        What is under way is dropped: call `exchange()` first where it is to count.
        """
        self._unhook()
        self._flights.clear()
        self._channel.close()


def _settings(local: LocalUpdates | None, every: int | None, given: dict[str, Any]) -> LocalUpdates:
    usual = {"fragments": 1, "delay": 0, "merge": None, "mixing": ALL, "outer": nesterov}
    if local is None:
        if every is None:
            raise ValueError("LocalSGD: every is missing; give the number of steps between exchanges, or local=")
        return LocalUpdates(every, **given)
    doubled = ["every"] * (every is not None) + [key for key, value in given.items() if value != usual[key]]
    if doubled:
        raise ValueError(f"LocalSGD: local= and {doubled[0]}= say the same thing; put {doubled[0]} into local=")
    return local


_COUNTED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The optimizers whose steps somebody counts."""


def _check_optimizer(optimizer: Optimizer | None, parameters: Mapping[str, Tensor]) -> None:
    if optimizer is None:
        return
    if optimizer in _COUNTED:
        raise RuntimeError("LocalSGD: another one counts the steps of this optimizer already; close() that one first")
    ours = {id(p) for p in parameters.values()}
    if not any(id(p) in ours for p in parameters_of(optimizer)):
        raise ValueError(
            "LocalSGD: the optimizer holds none of the model's parameters; make it after the model has its final ones "
            "(after fully_shard and after .to())"
        )


def _call_after_steps(optimizer: Optimizer | None, step: Callable[[], object]) -> Callable[[], None]:
    """Call `step` after each step of the optimizer; returns the way to stop that."""
    if optimizer is None:
        return lambda: None

    def count(*_: Any) -> None:
        step()

    hook = optimizer.register_step_post_hook(count)
    _COUNTED.add(optimizer)

    def stop() -> None:
        hook.remove()
        _COUNTED.discard(optimizer)

    return stop
