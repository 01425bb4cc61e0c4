"""two_shot: reduce-scatter, then all-gather, each with one encoding. The default."""

from __future__ import annotations

import torch

from narrowcast.collectives.algorithms.context import Call
from narrowcast.collectives.algorithms.cost import Cost, Placement, Stage, direct_steps
from narrowcast.collectives.algorithms.record import Algorithm, Order, Setting, register
from narrowcast.collectives.algorithms.workers import FIRST, SECOND, Workers
from narrowcast.collectives.segments import Coder, Range, split, take

MAX_CHUNKS = 8
CHUNK_BYTES = 256 << 10
"""Below this a message costs more by its latency than it gains by overlap."""


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
    exchange, coder, peers = call.exchange, call.coder, call.exchange.others()
    chunks = chunks_of(coder, exchange.world)
    mine = chunks[exchange.rank]
    rows = [exchange.rows(coder.nbytes(part)) for part in mine]
    first = [
        [exchange.receive(row.shape[1], peer, first_index(c), row[peer]) for peer in peers]
        for c, row in enumerate(rows)
    ]
    second = [
        {peer: exchange.receive(coder.nbytes(chunks[peer][c]), peer, second_index(c)) for peer in peers}
        for c in range(len(mine))
    ]

    def encode_own(c: int) -> None:
        for peer in [*peers, exchange.rank]:
            part, wire = chunks[peer][c], rows[c][peer] if peer == exchange.rank else None
            wire = call.encode(take(call.x, part), part, FIRST, call.scales, call.feedback(FIRST, part), wire)
            if peer != exchange.rank:
                exchange.send(wire, peer, first_index(c))

    def reduce(c: int) -> None:
        part, finish = mine[c], call.reduction
        for incoming in first[c]:
            incoming.get()
        wire, out, feedback = exchange.wire(coder.nbytes(part)), take(call.x, part), call.feedback(SECOND, part)
        noise, scales = call.noise_in(SECOND), call.sum_scales
        coder.reduce(rows[c], part, wire, noise, scales, feedback, finish, out)
        for peer in peers:
            exchange.send(wire, peer, second_index(c))
        if call.residuals is not None and out.dtype != torch.float32:
            exact = exchange.floats(out.numel())
            coder.decode(wire, part, exact)
            call.residuals.keep(exact, out, SECOND, part)

    def collect(c: int) -> None:
        for peer, incoming in second[c].items():
            coder.decode(incoming.get(), chunks[peer][c], take(call.x, chunks[peer][c]))

    for step in range(len(mine) + 2):
        if step < len(mine):
            encode_own(step)
        if 0 <= step - 1 < len(mine):
            reduce(step - 1)
        if step == len(mine):
            exchange.all_sent()
        if step >= 2:
            collect(step - 2)
    exchange.finish()


def first_index(c: int) -> int:
    """The number of chunk c's messages in the first shot: the order of sending is 0, 1, sum of 0, 2, sum of 1, ..."""
    return 2 * c


def second_index(c: int) -> int:
    return 2 * c + 3


def chunks_of(coder: Coder, world: int) -> list[list[Range]]:
    """Every shard cut into the same number of chunks, so that encoding, sending and summing overlap."""
    shards = coder.shards(world)
    count = max(1, min(MAX_CHUNKS, max(map(coder.nbytes, shards)) // CHUNK_BYTES))
    return [split(shard, count, coder.align) for shard in shards]


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
    sent = 2 * ranks.peers / ranks.world
    stage = Stage(ranks.level, "two_shot", sent, 2.0 * direct_steps(ranks.world), own=ranks.ring_bytes)
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
        residual_shots=2,
    )
)
