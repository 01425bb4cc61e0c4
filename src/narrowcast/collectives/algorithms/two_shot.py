"""two_shot: reduce-scatter, then all-gather, each with one encoding. The default."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.collectives.algorithms.context import Call
from narrowcast.collectives.algorithms.cost import Cost, Placement, both
from narrowcast.collectives.algorithms.record import Algorithm, Order, Setting, register
from narrowcast.collectives.algorithms.workers import FIRST, SECOND, Workers
from narrowcast.collectives.runtime.shots import Gather, Scatter, run_rounds
from narrowcast.collectives.segments import Coder, Range, split, take

MAX_CHUNKS = 8
CHUNK_BYTES = 256 << 10
"""Below this a message costs more by its latency than it gains by overlap."""
DEVICE_RATE = 1e12
"""Bytes of values a second that one pass of a codec takes on a device, roughly."""
LAUNCH_SECONDS = 25e-6
"""Of the host for one launch of a kernel."""
ROUND_SECONDS = 150e-6
"""What a further round costs a device's backend while others are under way, roughly."""
ROUND_BYTES = 16 << 20
"""Of wires: beyond it NCCL's own calls lose a tenth and more on sockets."""
PEER_BYTES = 1 << 20
"""To one rank in a round: with less, NCCL's own calls on sockets take up to twice as long."""
Parts = list[Range]
"""What one rank sums in a round: a chunk of its shard, or several."""


def run(call: Call) -> None:
    """Sum over all ranks in place.

    1. Cut the tensor into one shard a rank and each shard into chunks, between blocks.
    2. Encode every shard, chunk by chunk, and send it to its owner.
    3. The owner decodes the chunks of all ranks, its own too, and adds them in float32 in rank order 0, 1, ...
    4. It encodes the sum and sends it to everybody; it decodes its own bytes as the others do. With error feedback its
       residual also takes what a result of 16 bits does not hold of the decoded value.

    Bytes sent a rank: 2 (W-1)/W nbytes(n). Roundings a value: 2. Passes over the data: 2 (encode, decode), and one of
    each over a shard. While chunk c is on the wire, c-1 is summed and c+1 encoded; while the last one is, the channel's
    next call begins.
    """
    run_rounds(call.exchange, [[one] for one in shots(call)])


def shots(call: Call) -> list[TwoShots]:
    """Its rounds."""
    coder, key = call.coder, ("two_shot", call.exchange.world, call.exchange.by_rows, MAX_CHUNKS, CHUNK_BYTES)
    cuts = coder.kept.get(key)
    if cuts is None:
        cuts = coder.kept[key] = [_Cut.of(coder, parts) for parts in rounds_of(call)]
    return [TwoShots(call, cut) for cut in cuts]


class _Cut(NamedTuple):
    """Where a round is cut."""

    parts: Sequence[Parts]
    sizes: tuple[int, ...]
    """Bytes for each rank."""
    shards: tuple[Range, ...]
    """The parts of all: one a rank, but for codecs that are encoded by segments."""

    @classmethod
    def of(cls, coder: Coder, parts: Sequence[Parts]) -> _Cut:
        sizes = tuple(sum(map(coder.nbytes, of_rank)) for of_rank in parts)
        return cls(parts, sizes, tuple(part for of_rank in parts for part in of_rank))


class TwoShots:
    """One round of a call: the parts that each rank sums."""

    def __init__(self, call: Call, cut: _Cut) -> None:
        self._call, (self._parts, sizes, self._shards) = call, cut
        self.first = self.second = sizes

    def encode(self, wires: Scatter) -> None:
        call, noise = self._call, self._call.noise_in(FIRST)
        if wires.rows is not None and not call.coder.whole_segments:
            whole = None if call.residuals is None else call.residuals.of(FIRST, (0, call.x.numel()))
            call.coder.encode_parts(call.x, self._shards, wires.rows, noise, call.scales, whole)
            wires.send_all()
            return
        for rank in [*call.exchange.others(), call.exchange.rank]:
            for part, wire in call.coder.places(self._parts[rank], wires.leaving(rank)):
                call.coder.encode(take(call.x, part), part, wire, noise, call.scales, call.feedback(FIRST, part))
            wires.send(rank)

    def reduce(self, arrived: Tensor | None, wires: Gather) -> None:
        if arrived is None:
            raise RuntimeError("internal: nothing arrived")
        call, noise, mine = self._call, self._call.noise_in(SECOND), self._parts[self._call.exchange.rank]
        own = list(call.coder.places(mine, wires.own))
        for (part, rows), (_, wire) in zip(call.coder.places(mine, arrived), own, strict=True):
            out, feedback = take(call.x, part), call.feedback(SECOND, part)
            call.coder.reduce(rows, part, wire, noise, call.sum_scales, feedback, call.reduction, out)
        wires.send()
        if call.residuals is not None and call.x.dtype != torch.float32:
            for part, wire in own:
                exact = call.exchange.floats(part[1] - part[0])
                call.coder.decode(wire, part, exact)
                call.residuals.keep(exact, take(call.x, part), SECOND, part)

    def collect(self, wires: Gather) -> None:
        call, rows = self._call, wires.rows()
        if rows is not None and not call.coder.whole_segments:
            # our own shard, too: it is there, and one launch takes all
            call.coder.decode_parts(rows, self._shards, call.x)
            return
        for peer in call.exchange.others():
            for part, wire in call.coder.places(self._parts[peer], wires.arrived(peer)):
                call.coder.decode(wire, part, take(call.x, part))


def chunks_of(coder: Coder, world: int) -> list[list[Range]]:
    """Every shard cut into the same number of chunks, so that encoding, sending and summing overlap."""
    shards = coder.shards(world)
    count = max(1, min(MAX_CHUNKS, max(map(coder.nbytes, shards)) // CHUNK_BYTES))
    return [split(shard, count, coder.align) for shard in shards]


def rounds_of(call: Call) -> list[list[Parts]]:
    """The rounds of a call: for each rank, what it sums in it.

    Messages of the host are a round for each chunk. A device's backend does one thing after another, and there are as
    few as pay: see `device_rounds`. Chunks that are encoded by themselves stay so, whatever the round.
    """
    coder, world = call.coder, call.exchange.world
    chunks = chunks_of(coder, world)
    if not call.exchange.by_rows:
        return [[[chunk] for chunk in of_round] for of_round in zip(*chunks, strict=True)]
    if coder.whole_segments:
        return [chunks]
    values, wire = coder.numel * coder.dtype.itemsize, coder.nbytes((0, coder.numel))
    count = device_rounds(values, wire, world)
    cut = [split(shard, count, coder.align) for shard in coder.shards(world)]
    return [[[part] for part in of_round] for of_round in zip(*cut, strict=True)]


def device_rounds(values: int, wire: int, world: int) -> int:
    """Into how many rounds a device's backend takes a tensor of so many bytes and so many on the wire.

    With k of them a k-th of the codec's time lies open, not all of it, and k - 1 rounds more are paid for: the sum is
    least at k = sqrt(codec time / time of a round). What goes to one rank in a round is not cut too small. All follows
    from sizes: ranks must agree on it, whatever kernels each has.
    """
    passes = 3  # encode, sum, decode
    codec = passes * (values / DEVICE_RATE + LAUNCH_SECONDS)
    count = max(-(-wire // ROUND_BYTES), round(math.sqrt(codec / ROUND_SECONDS)))
    return max(1, min(MAX_CHUNKS, count, wire // (world * PEER_BYTES)))


def simulate(workers: Workers) -> None:
    """Chunks change no bits where blocks are encoded, so that the whole is encoded in one go there."""
    owned = workers.owned_shards()
    if workers.residuals is not None:
        workers.residuals.hand_over(owned)
    if workers.coder.whole_segments:
        chunks = chunks_of(workers.coder, workers.world)
        first = [chunk for shard in chunks for chunk in shard]
        owned = [(worker, chunk) for (worker, _), shard in zip(owned, chunks, strict=True) for chunk in shard]
    else:
        first = [workers.whole]
    if workers.adds_messages:
        for owner in workers.joined(owned):
            workers.reduce_messages(owner)
        return
    workers.publish(workers.reduction.finish(workers.sum_of_own(first)), workers.joined(owned))


def sent_bytes(setting: Setting) -> list[int]:
    """A worker sends every shard but its own once, and its own finished one to everybody."""
    chunks = chunks_of(setting.coder, setting.world)
    sizes = [sum(setting.coder.nbytes(chunk) for chunk in shard) for shard in chunks]
    return [sum(sizes) + (setting.world - 2) * own for own in sizes]


def cost(ranks: Placement) -> Cost:
    """Everybody's part to everybody, and the sums back: one call of a device's backend each, or messages."""
    stage = both(ranks.direct("two_shot"), ranks.gather(1 / ranks.world))
    return Cost((stage,), encodes=1 + 1 / ranks.world, decodes=2.0, roundings=2, chunked=True)


register(
    Algorithm(
        "two_shot",
        "reduce-scatter, then all-gather, each with one encoding",
        bytes_sent="2 (W-1)/W nbytes(n)",
        roundings="2",
        phases="0, then 1",
        order=Order.RANKS,
        run=run,
        simulate=simulate,
        sent_bytes=sent_bytes,
        cost=cost,
        host_waits=False,
        shots=shots,
        residual_shots=2,
    )
)
