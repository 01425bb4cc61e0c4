"""tree: recursive halving, then recursive doubling; log2(W) steps each way. Worlds that are powers of two."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.collectives.algorithms.context import Call, take
from narrowcast.collectives.algorithms.two_shot import is_agreed
from narrowcast.collectives.segments import Range, split


def tree(call: Call, scales: list[Tensor | None] | None = None) -> None:
    """Sum over all ranks in place.

    1. Cut the tensor into one shard a rank. With distance d = W/2, W/4, ..., 1: send the half of the remaining shards
       that belongs to the partner `rank ^ d`, encoded; receive our half; add it to our float32 sum. Rank r ends with
       shard r.
    2. Encode the finished shard. With d = 1, 2, ..., W/2: exchange all finished shards with the partner, as bytes.

    Sum order of shard s: pairs at distance W/2 first, then W/4, ... (a sum of two needs no order). Bytes sent a rank:
    2 (W-1)/W nbytes(n). Roundings a value: log2(W) + 1. Passes: 2 encodes, 2 decodes.
    """
    exchange, coder = call.exchange, call.coder()
    world, rank = exchange.world, exchange.rank
    shards = split((0, call.x.numel()), world, coder.align)
    distances = [world >> level for level in range(1, world.bit_length())]
    reduced, gathered = {}, {}
    kept = range(world)
    for level, distance in enumerate(distances):
        kept = _half(kept, rank, distance)
        reduced[distance] = exchange.receive(coder.nbytes(_span(shards, kept)), rank ^ distance, level)
    for level, distance in enumerate(reversed(distances)):
        for shard in _group(rank ^ distance, distance):
            size = coder.nbytes(shards[shard])
            gathered[distance, shard] = exchange.receive(size, rank ^ distance, len(distances) + level)

    total, kept = call.x.float().clone() if call.x.dtype == torch.float32 else call.x.float(), range(world)
    for level, distance in enumerate(distances):
        away = _half(kept, rank ^ distance, distance)
        kept = _half(kept, rank, distance)
        part = _span(shards, away)
        wire = _encoded(call, take(total, part), part, scales if level == 0 or is_agreed(call) else None)
        exchange.send(wire, rank ^ distance, level)
        mine = _span(shards, kept)
        coder.decode(reduced[distance].get(), mine, take(total, mine), accumulate=True)

    mine = shards[rank]
    wires = {
        rank: _encoded(call, call.reduction.finish(take(total, mine)), mine, scales if is_agreed(call) else None, 1)
    }
    for level, distance in enumerate(reversed(distances)):
        for shard in _group(rank, distance):
            exchange.send(wires[shard], rank ^ distance, len(distances) + level)
        for shard in _group(rank ^ distance, distance):
            wires[shard] = gathered[distance, shard].get()
    for shard, wire in wires.items():
        coder.decode(wire, shards[shard], take(call.x, shards[shard]))
    exchange.finish()


def check_world(world: int) -> None:
    if world & (world - 1):
        raise ValueError(f"all_reduce: algorithm 'tree' needs a power-of-two world, got {world} ranks; take 'two_shot'")


def _half(kept: range, rank: int, distance: int) -> range:
    """The half of `kept` that holds the shard of `rank`."""
    first = rank // distance * distance
    return range(max(first, kept.start), min(first + distance, kept.stop))


def _group(rank: int, distance: int) -> range:
    """The shards that `rank` has when partners at `distance` exchange what is finished."""
    first = rank // distance * distance
    return range(first, first + distance)


def _span(shards: list[Range], kept: range) -> Range:
    return shards[kept.start][0], shards[kept.stop - 1][1]


def _encoded(call: Call, values: Tensor, part: Range, scales: list[Tensor | None] | None, phase: int = 0) -> Tensor:
    coder = call.coder()
    wire = call.exchange.wire(coder.nbytes(part))
    coder.encode(values, part, wire, call.noise_in(phase), scales)
    return wire
