"""Workers that train by themselves and exchange now and then, all in one process: bit for bit what `LocalSGD` does.

Each worker is the `Replica` that a rank has. What differs is how messages get from one to another: here they are
computed for all workers at once, when they are sent, and land when they are due.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowcast.codecs import Codec, KeptFactors, Matrix
from narrowcast.collectives import as_seen, noise_of
from narrowcast.parallel import Autopilot, LocalUpdates, Replay, TensorRow, local_sgd, policy, seeds
from narrowcast.simulate.stack import in_rank_order
from narrowcast.simulate.world import World

AS_IS = policy.AS_IS
Values = dict[str, Tensor]
Step = tuple[int, int]


@dataclass
class Underway:
    """An exchange that lands later: what each worker's parameters and running statistics get."""

    due: int
    kind: str
    gradients: list[Values]
    buffers: list[Values]


class LocalWorld:
    """The workers, and their exchanges."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        updates: LocalUpdates,
        spec: object,
        min_values: int,
        seed: int,
        make: Callable[[nn.Module], Optimizer],
    ) -> None:
        """seed: as for `LocalSGD`. make: the inner optimizer of a worker's model."""
        wires = local_sgd.WirePlan(spec, min_values, updates)
        if isinstance(spec, Autopilot):
            raise ValueError('train: local= and spec="auto": nobody can time exchanges here; name a wire')
        wires.check()
        self.world, self.updates, self._seed = world, updates, seed
        self.clock, self._underway = local_sgd.Clock(updates), list[Underway]()
        self.replicas = [local_sgd.Replica(copy.deepcopy(model), updates, wires) for _ in range(world.n)]
        if isinstance(spec, Replay):
            spec.check_names(self._first.parameters)
        self.optimizers = [make(replica.model) for replica in self.replicas]
        self.copies, self.variance, self.looks = local_sgd.Copies(), 0.0, 0
        world.factors = KeptFactors(seed)
        if updates.with_neighbours:
            self.copies.meet(self._first.anchors)
        else:  # all have the same, which is kept once
            for replica in self.replicas[1:]:
                replica.anchors, replica.outer = self._first.anchors, self._first.outer

    @property
    def _first(self) -> local_sgd.Replica:
        return self.replicas[0]

    @property
    def models(self) -> list[nn.Module]:
        """Each worker's own."""
        return [replica.model for replica in self.replicas]

    def rows(self) -> list[TensorRow]:
        """Every parameter: its wire, or why it stays as it is."""
        return self._first.rows(self.clock)

    @torch.no_grad()
    def step(self) -> bool:
        """All workers have made a step. Returns whether an exchange came to its end."""
        self.clock.steps += 1
        before = self.clock.exchanges
        self._land()
        for number in self.clock.due():
            self._send(number)
        self._land()
        return self.clock.exchanges > before

    def _send(self, fragment: int) -> None:
        first = self._first
        moved = [replica.moved(replica.names_in([fragment])) for replica in self.replicas]
        wires, round_ = first.by_codec(moved[0], self.clock), self.clock.rounds[fragment]
        buffers = [{n: b.clone() for n, b in r.buffers_in([fragment]).items()} for r in self.replicas]
        kind = self.updates.kind_at(round_)
        number = self.clock.begin([fragment])
        if self.updates.looks_every and number % self.updates.looks_every == 0:
            self._look()
        flight = Underway(self.clock.steps + self.updates.delay, kind, moved, buffers)
        if kind == local_sgd.ALL:
            for call, (codec, names) in enumerate(wires.items()):
                self._mean(flight.gradients, codec, names, (number, call))
            self._mean_buffers(flight.buffers, number)
        else:
            seats = [local_sgd.seat(kind, round_, worker, self.world.n, self._seed) for worker in range(self.world.n)]
            for call, (codec, names) in enumerate(wires.items()):
                self._mix(flight.gradients, codec, names, (number, call), seats)
            if buffers[0]:
                self._mix_buffers(flight.buffers, (number, len(wires)), seats)
            self.copies.keep_to(kind, [*moved[0]])
        self._underway.append(flight)

    def _mean(self, moved: list[Values], codec: Codec, names: tuple[str, ...], step: Step) -> None:
        shapes = [moved[0][name].shape for name in names]
        rows = torch.stack([torch.cat([own[name].reshape(-1) for name in names]) for own in moved])
        lengths = [shape.numel() for shape in shapes]
        how: dict[str, Any] = {"spec": codec, "segments": lengths, "names": names, "step": step}
        if codec.rank:
            how["matrices"] = [Matrix.of(shape) for shape in shapes]
        result = self.world.all_reduce(rows, "avg", **how)[0].split(lengths)
        for own in moved:
            own |= {name: part.view(shape) for name, part, shape in zip(names, result, shapes, strict=True)}

    def _mean_buffers(self, buffers: list[Values], number: int) -> None:
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers[0].values()):
            names = [name for name, buffer in buffers[0].items() if buffer.dtype == dtype]
            rows = [[own[name] for name in names] for own in buffers]
            means = self.world.all_reduce(rows, "avg", spec=AS_IS, step=(number, 0))[0]
            for own in buffers:
                own |= dict(zip(names, means, strict=True))

    def _mix(
        self,
        moved: list[Values],
        codec: Codec,
        names: tuple[str, ...],
        step: Step,
        seats: Sequence[local_sgd.Neighbourhood],
    ) -> None:
        lengths, noise = [moved[0][name].numel() for name in names], noise_of("LocalSGD", codec, self.world.seed, step)
        known: dict[int, Tensor] = {}
        consensus = local_sgd.consensus_of(self.updates.consensus, codec)
        for worker, (replica, own, at) in enumerate(zip(self.replicas, moved, seats, strict=True)):
            if not at.targets:
                continue
            positions = replica.positions({name: own[name] for name in names}).values()
            x = torch.cat([position.reshape(-1) for position in positions])
            place = at.link, worker
            message = as_seen(local_sgd.to_send(x, codec, self.copies, place, names), codec, lengths, noise, worker)
            known[worker] = local_sgd.seen(message, codec, self.copies, place, names)
        for worker, (own, at) in enumerate(zip(moved, seats, strict=True)):
            if not at.sources:
                continue
            theirs = [known[peer] for peer in at.sources]
            way = local_sgd.pull(known[worker], theirs, at, consensus)
            for name, part in zip(names, way.split(lengths), strict=True):
                own[name] = own[name] - part.view(own[name].shape)

    def _mix_buffers(self, buffers: list[Values], step: Step, seats: Sequence[local_sgd.Neighbourhood]) -> None:
        flat = [torch.cat([b.float().reshape(-1) for b in own.values()]) for own in buffers]
        consensus = local_sgd.consensus_of(self.updates.consensus, AS_IS)
        for x, own, at in zip(flat, buffers, seats, strict=True):
            mixed = x + local_sgd.pull(x, [flat[peer] for peer in at.sources], at, consensus)
            parts = mixed.split([b.numel() for b in own.values()])
            for (name, b), part in zip(list(own.items()), parts, strict=True):
                own[name] = part.view(b.shape).to(b.dtype)

    def _look(self) -> None:
        self.looks += 1
        samples = [replica.sample() for replica in self.replicas]
        self.variance = local_sgd.variance([torch.cat(own) for own in samples], [part.numel() for part in samples[0]])

    def _land(self) -> None:
        while self._underway and self._underway[0].due <= self.clock.steps:
            flight, kept = self._underway.pop(0), self.updates.own_part
            for number, replica in enumerate(self.replicas):
                gradients, buffers = flight.gradients[number], flight.buffers[number]
                if replica is self._first or self.updates.with_neighbours:
                    replica.land(gradients, buffers, kept)
                else:
                    replica.merge(gradients, buffers, kept)
            if flight.kind == local_sgd.ALL and self.updates.with_neighbours:
                self.copies.meet({name: self._first.anchors[name] for name in flight.gradients[0]})
            self.clock.exchanges += 1

    @torch.no_grad()
    def mean_into(self, model: nn.Module) -> None:
        """The mean of all workers' models, which is what a training is judged by; counters are worker 0's."""
        states = [own.state_dict() for own in self.models]
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(in_rank_order([state[name].float() for state in states]) / len(states))
            else:
                value.copy_(states[0][name])

    def state(self) -> dict[str, Any]:
        """Everything as it is, for this number of workers."""
        outers = self.replicas if self.updates.with_neighbours else [self._first]
        flights = [[f.due, f.kind, f.gradients, f.buffers] for f in self._underway]
        return {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "anchors": [replica.anchors for replica in outers],
            "outer": [replica.outer.state_dict() for replica in outers],
            "clock": [self.clock.steps, self.clock.begun, self.clock.exchanges, self.clock.rounds],
            "under way": flights,
            "copies": self.copies.state(),
            "variance": [self.variance, self.looks],
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for model, theirs in zip(self.models, state["models"], strict=True):
            model.load_state_dict(theirs)
        for optimizer, theirs in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(theirs)
        for replica, anchors, outer in zip(self.replicas, state["anchors"], state["outer"], strict=False):
            for name, anchor in replica.anchors.items():
                anchor.copy_(anchors[name])
            replica.outer.load_state_dict(outer)
        self.clock.steps, self.clock.begun, self.clock.exchanges, self.clock.rounds = state["clock"]
        self._underway = [Underway(*flight) for flight in state["under way"]]
        self.copies.load(state["copies"])
        self.variance, self.looks = state["variance"]


def world_seed(seed: int, workers: int) -> int:
    """The noise of the first `LocalSGD` that is made on all ranks."""
    return seeds.first_seed("LocalSGD", seed, workers)
