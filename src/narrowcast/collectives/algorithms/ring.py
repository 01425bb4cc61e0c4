"""ring: partial sums travel around a ring and are cast at every hop, as low-precision rings do and APS studies."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.collectives.algorithms.context import Call, take
from narrowcast.collectives.segments import Range, split


def ring(call: Call, scales: list[Tensor | None] | None = None) -> None:
    """Sum over all ranks in place.

    1. Cut the tensor into one shard a rank. Shard s starts at rank s + 1, which encodes its own values and sends them.
    2. At each of the W-1 hops a rank decodes the partial sum, adds it to its own values (`accumulator="float32"`: as
       they are; "low": encoded and decoded first) in float32, and encodes the result: order s+1, s+2, ..., s (mod W).
    3. Rank s holds the finished shard, encodes it, and the bytes go around unchanged; everybody decodes the same bytes.

    Bytes sent a rank: 2 (W-1)/W nbytes(n). Roundings a value: W at most. Passes: 1 encode, 2 decodes.
    """
    exchange, coder = call.exchange, call.coder()
    world, rank = exchange.world, exchange.rank
    shards = split((0, call.x.numel()), world, coder.align)
    left, right = (rank - 1) % world, (rank + 1) % world

    # at hop h this rank receives the partial sum of shard rank - h - 1 and sends that of shard rank - h
    arriving = [shards[(rank - hop - 2) % world] for hop in range(world - 1)]
    reduced = [exchange.receive(coder.nbytes(part), left, hop) for hop, part in enumerate(arriving)]
    passing = [shards[(rank - hop - 1) % world] for hop in range(world - 1)]
    finished = [exchange.receive(coder.nbytes(part), left, world + hop) for hop, part in enumerate(passing)]

    hop_scales = scales if is_shared(call) else None
    first = shards[(rank - 1) % world]
    exchange.send(_encoded(call, take(call.x, first), first, scales), right, 0)
    for hop, part in enumerate(arriving):
        total = _own(call, part, scales)
        coder.decode(reduced[hop].get(), part, total, accumulate=True)
        last = hop == world - 2
        wire = _encoded(call, call.reduction.finish(total) if last else total, part, hop_scales)
        exchange.send(wire, right, world if last else hop + 1)
        if last:
            coder.decode(wire, part, take(call.x, part))
    for hop, part in enumerate(passing):
        wire = finished[hop].get()
        if hop < world - 2:
            exchange.send(wire, right, world + hop + 1)
        coder.decode(wire, part, take(call.x, part))
    exchange.finish()


def is_shared(call: Call) -> bool:
    """Whether the scales hold for partial sums too: those that all ranks agreed on do."""
    return call.codec.agrees_on_scales


def _encoded(call: Call, values: Tensor, part: Range, scales: list[Tensor | None] | None, phase: int = 0) -> Tensor:
    coder = call.coder()
    wire = call.exchange.wire(coder.nbytes(part))
    coder.encode(values, part, wire, call.noise_in(phase), scales)
    return wire


def _own(call: Call, part: Range, scales: list[Tensor | None] | None) -> Tensor:
    """This rank's own values of a shard, in float32, cast first where the accumulator has low precision."""
    own = take(call.x, part).float()
    if call.accumulator == "float32":
        return own.clone()
    total = torch.empty_like(own)
    # noise of its own: the sum is rounded with the other one
    call.coder().decode(_encoded(call, own, part, scales, 1), part, total)
    return total
