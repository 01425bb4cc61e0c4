"""What a rank sends at an exchange, and what of it is under way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec, KeptFactors, Matrix
from narrowcast.collectives import (
    Channel,
    LowRankCall,
    LowRankReduce,
    NeighbourMessage,
    Reduction,
    Residuals,
    Times,
    Work,
    all_reduce,
    noise_of,
    start_low_rank,
    start_message,
)
from narrowcast.parallel import policy
from narrowcast.parallel.local_sgd.copies import Copies, consensus_of, pull, seen, to_send
from narrowcast.parallel.local_sgd.graph import ALL, Neighbourhood, seat
from narrowcast.parallel.local_sgd.replica import Replica, Values, variance
from narrowcast.parallel.residuals import ModelResiduals
from narrowcast.parallel.stats import Stats, all_reduce_bytes, compressed_values

CALL, MIX, BUFFERS = "all_reduce of outer gradients", "messages to neighbours", "all_reduce of buffers"


@dataclass
class Flight:
    """An exchange under way: parameters, and what they get when it is due."""

    due: int
    """The step after which it lands."""
    gradients: Values
    """Each worker's own outer gradients first, and what the outer optimizer gets in the end."""
    buffers: Values
    kind: str = ALL
    """With whom."""
    works: list[Work] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    """What makes gradients of messages."""

    def wait(self) -> None:
        """Until all messages are there; raises what went wrong."""
        for work in self.works:
            work.wait()

    def arrive(self) -> None:
        """Make gradients of the messages, once."""
        for act in self.after:
            act()
        self.works, self.after = [], []


class Sender:
    """The rank's way to the other workers: residuals, factors and copies, and its part of each exchange."""

    def __init__(self, channel: Channel, replica: Replica, seed: int, own_seed: int, stats: Stats) -> None:
        """seed: as it was given, so that a checkpoint goes on in another object. own_seed: of this object's noise."""
        self._channel, self._replica, self._stats = channel, replica, stats
        self._pairs_seed, self._seed = seed, own_seed
        self.residuals, self.factors = ModelResiduals(channel.world), KeptFactors(seed)
        self.copies = Copies()
        self.variance: float | None = None
        if replica.updates.with_neighbours:
            self.copies.meet(replica.anchors)

    def seat(self, kind: str, round_: int) -> Neighbourhood:
        """This rank's place in a round."""
        return seat(kind, round_, self._channel.rank, self._channel.world, self._pairs_seed)

    def start(self, flight: Flight, number: int, wires: Mapping[Codec, tuple[str, ...]], round_: int) -> None:
        """Send what a flight's parameters moved. number: of the exchange."""
        looks, kind = self._replica.updates.looks_every, flight.kind
        if looks and number % looks == 0:
            self._look(flight)
        for call, (codec, names) in enumerate(wires.items()):
            if kind == ALL:
                flight.works.append(self._mean(flight.gradients, codec, names, (number, call)))
            else:
                self._mix(flight, codec, names, (number, call), self.seat(kind, round_))
        if kind == ALL:
            flight.works += self._mean_buffers(flight.buffers, number)
        elif flight.buffers:
            self._mix_buffers(flight, (number, len(wires)), self.seat(kind, round_))
        if kind != ALL:
            self.copies.keep_to(kind, [*flight.gradients])

    def _mean(self, moved: Values, codec: Codec, names: tuple[str, ...], step: tuple[int, int]) -> Work:
        if codec.rank:
            moved |= {name: moved[name].contiguous() for name in names}
        tensors = [moved[name] for name in names]
        residuals = self.residuals.residuals(names, tensors) if codec.feedback else None
        if codec.rank:
            return self._mean_of_matrices(codec, names, tensors, residuals, step)
        return self._all_reduce(CALL, tensors, codec, step, residuals=residuals)

    def _mean_of_matrices(
        self,
        codec: Codec,
        names: tuple[str, ...],
        tensors: list[Tensor],
        residuals: Residuals | None,
        step: tuple[int, int],
    ) -> Work:
        """All matrices of a wire travel together, as their factors."""
        matrices, mean = tuple(Matrix.of(tensor.shape) for tensor in tensors), Reduction(divide=self._channel.world)
        kind = LowRankReduce(codec, matrices, self._channel.world, mean, seed=self._seed)
        xs = [tensor.view(-1) for tensor in tensors]
        call = LowRankCall(kind, xs, step, names, self.factors, residuals)
        count = self._counter(CALL, tensors, codec, call.times)
        work = start_low_rank(self._channel, [call])
        work.then(count)
        return work

    def _mean_buffers(self, buffers: Values, number: int) -> list[Work]:
        """Running statistics are averaged as they are."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers.values():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        return [self._all_reduce(BUFFERS, same, policy.AS_IS, (number, 0)) for same in by_type.values()]

    def _all_reduce(
        self, name: str, tensors: Sequence[Tensor], codec: Codec, step: tuple[int, int], **more: Any
    ) -> Work:
        times = Times()
        count = self._counter(name, tensors, codec, times)
        more |= {"step": step, "seed": self._seed, "times": times, "channel": self._channel}
        work = all_reduce(tensors, codec, dist.ReduceOp.AVG, async_op=True, **more)
        assert work is not None
        work.then(count)
        return work

    def _mix(
        self, flight: Flight, codec: Codec, names: tuple[str, ...], step: tuple[int, int], at: Neighbourhood
    ) -> None:
        """Tell the neighbours where this worker is, and go towards what is known of them."""
        moved = {name: flight.gradients[name] for name in names}
        positions = [position.reshape(-1) for position in self._replica.positions(moved).values()]
        rank, copies = self._channel.rank, self.copies
        x = to_send(torch.cat(positions), codec, copies, (at.link, rank), names)
        lengths = [position.numel() for position in positions]
        message = self._send(flight, x, codec, lengths, step, at)

        def take() -> None:
            if not at.sources:
                return
            own = seen(message.own, codec, copies, (at.link, rank), names)
            theirs = [
                seen(x, codec, copies, (at.link, peer), names)
                for peer, x in zip(at.sources, message.theirs, strict=True)
            ]
            way = pull(own, theirs, at, consensus_of(self._replica.updates.consensus, codec))
            for name, part in zip(names, way.split(lengths), strict=True):
                flight.gradients[name] = moved[name] - part.view(moved[name].shape)

        flight.after.append(take)

    def _mix_buffers(self, flight: Flight, step: tuple[int, int], at: Neighbourhood) -> None:
        """Running statistics travel as they are."""
        before = dict(flight.buffers)
        x, lengths = torch.cat([b.float().reshape(-1) for b in before.values()]), [b.numel() for b in before.values()]
        message = self._send(flight, x, policy.AS_IS, lengths, step, at)

        def take() -> None:
            way = consensus_of(self._replica.updates.consensus, policy.AS_IS)
            mixed = x + pull(x, message.theirs, at, way)
            for (name, buffer), part in zip(before.items(), mixed.split(lengths), strict=True):
                flight.buffers[name] = part.view(buffer.shape).to(buffer.dtype)

        flight.after.append(take)

    def _send(
        self, flight: Flight, x: Tensor, codec: Codec, lengths: Sequence[int], step: tuple[int, int], at: Neighbourhood
    ) -> NeighbourMessage:
        message, times = NeighbourMessage.of(x, codec, lengths, at.targets, at.sources), Times()
        values = x.numel() * len(at.targets)
        compressed = compressed_values(codec, x.dtype, values, self._channel.world)
        count = self._stats.counter(MIX, values, x.element_size() * values, times, compressed=compressed)
        work = start_message(self._channel, message, noise_of("LocalSGD", codec, self._seed, step), times)
        work.then(count)
        flight.works.append(work)
        return message

    def average(self, positions: list[Tensor]) -> None:
        """Of all workers, as they are (collective)."""
        self._all_reduce("all_reduce of positions", positions, policy.AS_IS, (0, 0)).wait()

    def _look(self, flight: Flight) -> None:
        """How far the workers are apart, by a sample; known when the flight lands."""
        sample = self._replica.sample()
        mine, lengths = torch.cat(sample), [part.numel() for part in sample]
        found: list[Tensor] = []
        signature = {"call": "variance", "numel": mine.numel(), "dtype": str(mine.dtype)}
        run = lambda exchange: found.extend(exchange.gather(mine, 0))  # noqa: E731
        flight.works.append(self._channel.submit(signature, run, [mine], waits=False))

        def take() -> None:
            self.variance = variance(found, lengths)

        flight.after.append(take)

    def _counter(self, name: str, tensors: Sequence[Tensor], codec: Codec, times: Times) -> Callable[[Work], None]:
        values, world = sum(tensor.numel() for tensor in tensors), self._channel.world
        plain = all_reduce_bytes(values, tensors[0].element_size(), world)
        compressed = compressed_values(codec, tensors[0].dtype, values, world)
        return self._stats.counter(name, values, plain, times, compressed=compressed)

    def mean_residuals(self) -> Values:
        """Of each parameter, over all workers (collective)."""
        residuals, anchors = self.residuals.by_parameter(), self._replica.anchors
        mean = {
            name: residuals.get(name, torch.zeros(a.numel(), dtype=torch.float32)).to(a.device, copy=True)
            for name, a in anchors.items()
        }
        self.mean_of(list(mean.values()))
        return mean

    def mean_of(self, tensors: list[Tensor]) -> None:
        """In place, over all workers (collective)."""
        channel = self._channel.called("state_dict")
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            all_reduce(same, "fp32", dist.ReduceOp.AVG, channel=channel)

    def factor_places(self, wires: Mapping[Codec, Collection[str]]) -> Values:
        """Of all matrices that would travel by low rank now."""
        places: Values = {}
        for codec, names in wires.items():
            for name in names if codec.rank else ():
                matrix = Matrix.of(self._replica.parameters[name].shape)
                places |= KeptFactors.places(name, matrix, codec, self._replica.anchors[name].device)
        return places
