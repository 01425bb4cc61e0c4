"""ring: partial sums travel around a ring and are cast at every hop, as low-precision rings do and APS studies."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.collectives.algorithms.context import Call
from narrowcast.collectives.algorithms.cost import Cost, Placement
from narrowcast.collectives.algorithms.record import Algorithm, Order, Setting, register
from narrowcast.collectives.algorithms.sums import RingSum
from narrowcast.collectives.algorithms.workers import Part, Workers
from narrowcast.collectives.segments import Range, take

SUM, OWN = 0, 1
"""Phases of the noise: where an own value is cast before it is added, the sum draws other numbers."""


def run(call: Call) -> None:
    """Sum over all ranks in place.

    1. Cut the tensor into one shard a rank. Shard s starts at rank s + 1, which encodes its own values and sends them.
    2. At each of the W-1 hops a rank decodes the partial sum, adds it to its own values (`accumulator="float32"`: as
       they are; "low": encoded and decoded first) in float32, and encodes the result: order s+1, s+2, ..., s (mod W).
    3. Rank s holds the finished shard, encodes it, and the bytes go around unchanged; everybody decodes the same bytes.

    Bytes sent a rank: 2 (W-1)/W nbytes(n). Roundings a value: W at most. Passes: 1 encode, 2 decodes.
    """
    exchange, coder = call.exchange, call.coder
    world, rank = exchange.world, exchange.rank
    shards = coder.shards(world)
    left, right = (rank - 1) % world, (rank + 1) % world

    # at hop h this rank receives the partial sum of shard rank - h - 1 and sends that of shard rank - h
    arriving = [shards[(rank - hop - 2) % world] for hop in range(world - 1)]
    reduced = [exchange.receive(coder.nbytes(part), left, hop) for hop, part in enumerate(arriving)]
    passing = [shards[(rank - hop - 1) % world] for hop in range(world - 1)]
    finished = [exchange.receive(coder.nbytes(part), left, world + hop) for hop, part in enumerate(passing)]

    start = shards[(rank - 1) % world]
    exchange.send(call.encode(take(call.x, start), start, SUM, call.scales), right, 0)
    for hop, part in enumerate(arriving):
        total, last = _own_values(call, part), hop == world - 2
        coder.decode(reduced[hop].get(), part, total, accumulate=True)
        wire = call.encode(call.reduction.finish(total) if last else total, part, SUM, call.sum_scales)
        exchange.send(wire, right, world if last else hop + 1)
        if last:
            coder.decode(wire, part, take(call.x, part))
    for hop, part in enumerate(passing):
        wire = finished[hop].get()
        if hop < world - 2:
            exchange.send(wire, right, world + hop + 1)
        coder.decode(wire, part, take(call.x, part))
    exchange.finish()


def _own_values(call: Call, part: Range) -> Tensor:
    """This rank's own values of a shard, in float32, cast first where the accumulator has low precision."""
    own = take(call.x, part).float()
    if call.accumulator == "float32":
        return own.clone()
    total = torch.empty_like(own)
    call.coder.decode(call.encode(own, part, OWN, call.scales), part, total)
    return total


def simulate(workers: Workers) -> None:
    """At each hop the sums of all shards move on by one place."""
    unit_n = workers.agreed_unit()
    if unit_n is not None:
        # in units of the scales, which are powers of two, all segments are one: a hundred tensors take few calls
        scaled = workers.in_units_of(unit_n)
        if _far_from_limits(workers, scaled, unit_n):
            _simulate(scaled)
            # what is not finite spoils its own segment, and no other
            if bool(scaled.out.isfinite().all()):
                torch.mul(scaled.out, unit_n, out=workers.out)
                return
    _simulate(workers)


def _far_from_limits(workers: Workers, scaled: Workers, unit_n: Tensor) -> bool:
    """Whether values keep all their digits in units, and no sum of them comes near float32's largest number."""
    x_Wn = workers.x_Wn
    return torch.equal(scaled.x_Wn * unit_n, x_Wn) and bool((x_Wn.abs() <= 2.0**126 / workers.world).all())


def _simulate(workers: Workers) -> None:
    world, shards = workers.world, workers.coder.shards(workers.world)
    sums, total = RingSum(workers.sums, workers.whole), None
    for hop in range(world):
        holders = [(workers.seats[(shard + 1 + hop) % world], part) for shard, part in enumerate(shards)]
        total = sums.add(_held_values(workers, holders, cast=workers.low and hop > 0), total)
        if hop == world - 1:
            _send_on(workers, workers.reduction.finish(total), holders, workers.out, is_sum=True)
            return
        _send_on(workers, total, holders, total, is_sum=hop > 0)
        sums.learn(total)


def _held_values(workers: Workers, holders: list[Part], cast: bool) -> Tensor:
    """Of each shard the values of the worker where its sum now is."""
    own = workers.new(workers.whole)
    for worker, part in holders:
        take(own, part).copy_(take(workers.x_Wn[worker], part))
    if cast:
        for worker, part in workers.joined(holders):
            values = take(own, part)
            workers.passage(values, (worker, part), OWN, workers.scales[worker], values)
    return own


def _send_on(workers: Workers, sums: Tensor, holders: list[Part], out: Tensor, is_sum: bool) -> None:
    for worker, part in workers.joined(holders):
        scales = workers.sum_scales(worker) if is_sum else workers.scales[worker]
        workers.passage(take(sums, part), (worker, part), SUM, scales, take(out, part))


def sent_bytes(setting: Setting) -> list[int]:
    """A worker passes every shard on twice, but for the one that it finishes and the one that ends with it."""
    world, sizes = setting.world, [setting.coder.nbytes(shard) for shard in setting.coder.shards(setting.world)]
    return [2 * sum(sizes) - sizes[rank] - sizes[(rank + 1) % world] for rank in range(world)]


def cost(ranks: Placement) -> Cost:
    return Cost((ranks.ring("two_shot"),), encodes=1.0, decodes=2.0, roundings=ranks.world)


register(
    Algorithm(
        "ring",
        "partial sums travel around a ring, cast at every hop",
        bytes_sent="2 (W-1)/W nbytes(n)",
        roundings="W, with either accumulator",
        phases="0; own values 1",
        order=Order.RING,
        run=run,
        simulate=simulate,
        sent_bytes=sent_bytes,
        cost=cost,
        host_waits=False,
        takes_accumulator=True,
    )
)
