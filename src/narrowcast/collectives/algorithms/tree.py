"""tree: recursive halving, then recursive doubling; log2(W) steps each way. Worlds that are powers of two."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.collectives.algorithms.context import Call
from narrowcast.collectives.algorithms.cost import Cost, Placement
from narrowcast.collectives.algorithms.record import Algorithm, Order, Setting, check_power_of_two, register
from narrowcast.collectives.algorithms.workers import FIRST, SECOND, Workers
from narrowcast.collectives.segments import Range, take
from narrowcast.kernels import plus


def run(call: Call) -> None:
    """Sum over all ranks in place.

    1. Cut the tensor into one shard a rank. With distance d = W/2, W/4, ..., 1: send the half of the remaining shards
       that belongs to the partner `rank ^ d`, encoded; receive our half; add it to our float32 sum. Rank r ends with
       shard r.
    2. Encode the finished shard. With d = 1, 2, ..., W/2: exchange all finished shards with the partner, as bytes.

    Sum order of shard s: pairs at distance W/2 first, then W/4, ... (a sum of two needs no order). Bytes sent a rank:
    2 (W-1)/W nbytes(n). Roundings a value: log2(W) + 1. Passes: 2 encodes, 2 decodes.
    """
    exchange, coder, rank = call.exchange, call.coder, call.exchange.rank
    shards, distances = coder.shards(exchange.world), distances_of(exchange.world)
    halves = {d: exchange.receive(coder.nbytes(span(shards, rank, d)), rank ^ d, i) for i, d in enumerate(distances)}
    finished = {
        shard: exchange.receive(coder.nbytes(shards[shard]), rank ^ d, len(distances) + i)
        for i, d in enumerate(reversed(distances))
        for shard in group(rank ^ d, d)
    }

    total = call.x.float().clone()
    for i, d in enumerate(distances):
        away, kept = span(shards, rank ^ d, d), span(shards, rank, d)
        exchange.send(call.encode(take(total, away), away, FIRST, call.sum_scales if i else call.scales), rank ^ d, i)
        coder.decode(halves[d].get(), kept, take(total, kept), accumulate=True)

    own = shards[rank]
    wires = {rank: call.encode(call.reduction.finish(take(total, own)), own, SECOND, call.sum_scales)}
    for i, d in enumerate(reversed(distances)):
        for shard in group(rank, d):
            exchange.send(wires[shard], rank ^ d, len(distances) + i)
        wires |= {shard: finished[shard].get() for shard in group(rank ^ d, d)}
    for shard, wire in wires.items():
        coder.decode(wire, shards[shard], take(call.x, shards[shard]))
    exchange.finish()


def distances_of(world: int) -> list[int]:
    """W/2, W/4, ..., 1."""
    return [world >> level for level in range(1, world.bit_length())]


def group(rank: int, size: int) -> range:
    """The ranks, and their shards, that are with `rank` where groups of `size` neighbours stay together."""
    return range(rank // size * size, rank // size * size + size)


def span(shards: list[Range], rank: int, size: int) -> Range:
    """The shards of a group, which lie side by side."""
    members = group(rank, size)
    return shards[members[0]][0], shards[members[-1]][1]


def simulate(workers: Workers) -> None:
    """Each place keeps the half of what it has that holds its own shard."""
    shards, whole = workers.coder.shards(workers.world), workers.whole
    held = [(workers.sums.rounded(workers.x_Wn[worker].float(), whole), whole) for worker in workers.seats]
    for d in distances_of(workers.world):
        held = [_halved(workers, held, place, d, shards) for place in range(workers.world)]
    total = torch.cat([workers.reduction.finish(values) for values, _ in held])
    workers.publish(total, workers.joined(workers.owned_shards()))


def _halved(
    workers: Workers, held: list[tuple[Tensor, Range]], place: int, d: int, shards: list[Range]
) -> tuple[Tensor, Range]:
    """What a place keeps of its sums, with the partner's added."""
    low, high = kept = span(shards, place, d)
    partner = workers.seats[place ^ d]
    own, (own_start, _) = held[place]
    theirs, (start, _) = held[place ^ d]
    scales = workers.scales[partner] if d == workers.world // 2 else workers.sum_scales(partner)
    arrived = workers.new(kept)
    workers.passage(theirs[low - start : high - start], (partner, kept), FIRST, scales, arrived)
    return workers.sums.rounded(plus(own[low - own_start : high - own_start], arrived), kept), kept


def sent_bytes(setting: Setting) -> list[int]:
    """A worker sends the half that the partner keeps, as one message, and each finished shard as one of its own."""
    coder, shards = setting.coder, setting.coder.shards(setting.world)
    sizes, distances = [coder.nbytes(shard) for shard in shards], distances_of(setting.world)
    return [
        sum(coder.nbytes(span(shards, rank ^ d, d)) + sum(sizes[k] for k in group(rank, d)) for d in distances)
        for rank in range(setting.world)
    ]


def cost(ranks: Placement) -> Cost:
    sent = [2 * each for each in ranks.direct_bytes]
    stage = ranks.over_all_levels("two_shot", sent, 2.0 * ranks.halvings)
    return Cost((stage,), encodes=1.0, decodes=2.0, roundings=ranks.halvings + 1)


register(
    Algorithm(
        "tree",
        "recursive halving, then recursive doubling",
        bytes_sent="2 (W-1)/W nbytes(n)",
        roundings="log2 W + 1",
        phases="0, then 1",
        order=Order.PAIRS,
        run=run,
        simulate=simulate,
        sent_bytes=sent_bytes,
        cost=cost,
        host_waits=False,
        check_world=lambda world, nodes: check_power_of_two("tree", world),
    )
)
