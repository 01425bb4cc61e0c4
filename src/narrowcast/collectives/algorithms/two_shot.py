"""two_shot: reduce-scatter, then all-gather, each with one encoding. The default."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.collectives.algorithms.context import Call, take
from narrowcast.collectives.runtime.post import Incoming
from narrowcast.collectives.segments import Coder, Range, split
from narrowcast.kernels import Feedback

FIRST, SECOND = 0, 1
MAX_CHUNKS = 8
CHUNK_BYTES = 256 << 10
"""Below this a message costs more by its latency than it gains by overlap."""


class TwoShot:
    """The state of one call."""

    def __init__(self, call: Call, scales: list[Tensor | None] | None) -> None:
        self.call, self.exchange, self.scales = call, call.exchange, scales
        self.coder: Coder = call.coder()
        self.agreed = scales is not None and is_agreed(call)
        shards = split((0, call.x.numel()), self.exchange.world, self.coder.align)
        self.chunks = chunks_of(shards, self.coder)
        self.count = len(self.chunks[0])
        mine, peers = self.chunks[self.exchange.rank], self.exchange.others()
        self.rows = [self.exchange.rows(self.coder.nbytes(part)) for part in mine]
        self.first = {
            (peer, c): self.exchange.receive(row.shape[1], peer, first_index(c), row[peer])
            for c, row in enumerate(self.rows)
            for peer in peers
        }
        self.second: dict[tuple[int, int], Incoming] = {
            (peer, c): self.exchange.receive(self.coder.nbytes(self.chunks[peer][c]), peer, second_index(c))
            for c in range(self.count)
            for peer in peers
        }

    def encode_first(self, c: int) -> None:
        """Encode chunk c of every shard and send it to the shard's owner."""
        for peer in [*self.exchange.others(), self.exchange.rank]:
            part, is_own = self.chunks[peer][c], peer == self.exchange.rank
            wire = self.rows[c][peer] if is_own else self.exchange.wire(self.coder.nbytes(part))
            values, noise = take(self.call.x, part), self.call.noise_in(FIRST)
            self.coder.encode(values, part, wire, noise, self.scales, self._owed(FIRST, part))
            if not is_own:
                self.exchange.send(wire, peer, first_index(c))

    def _owed(self, shot: int, part: Range) -> Feedback | None:
        return None if self.call.residuals is None else self.call.residuals.owed(shot, part)

    def reduce(self, c: int) -> None:
        """Sum chunk c of this rank's shard in rank order, encode the sum, send it to everybody, decode it ourselves."""
        part, finish = self.chunks[self.exchange.rank][c], self.call.reduction
        for peer in self.exchange.others():
            self.first[peer, c].get()
        wire = self.exchange.wire(self.coder.nbytes(part))
        self.coder.reduce(
            self.rows[c],
            part,
            wire,
            self.call.noise_in(SECOND),
            self.scales if self.agreed else None,
            self._owed(SECOND, part),
            finish,
            out=take(self.call.x, part),
        )
        for peer in self.exchange.others():
            self.exchange.send(wire, peer, second_index(c))
        if self.call.residuals is not None and self.call.x.dtype != torch.float32:
            exact = self.exchange.floats(part[1] - part[0])
            self.coder.decode(wire, part, exact)
            self.call.residuals.keep(exact, take(self.call.x, part), SECOND, part)

    def collect(self, c: int) -> None:
        """Decode chunk c of everybody else's shard."""
        for peer in self.exchange.others():
            part = self.chunks[peer][c]
            self.coder.decode(self.second[peer, c].get(), part, take(self.call.x, part))


def first_index(c: int) -> int:
    """The number of chunk c's messages in the first shot: the order of sending is 0, 1, sum of 0, 2, sum of 1, ..."""
    return 2 * c


def second_index(c: int) -> int:
    return 2 * c + 3


def is_agreed(call: Call) -> bool:
    """Whether the scales are the same on every rank, so that the sum may use them too."""
    return call.codec.agrees_on_scales


def chunks_of(shards: list[Range], coder: Coder) -> list[list[Range]]:
    """Every shard cut into the same number of chunks, so that encoding, sending and summing overlap."""
    largest = max(coder.nbytes(shard) for shard in shards)
    count = max(1, min(MAX_CHUNKS, largest // CHUNK_BYTES))
    return [split(shard, count, coder.align) for shard in shards]


def two_shot(call: Call, scales: list[Tensor | None] | None = None) -> None:
    """Sum over all ranks in place.

    1. Cut the tensor into one shard a rank and each shard into chunks, between blocks.
    2. Encode every shard, chunk by chunk, and send it to its owner.
    3. The owner decodes the chunks of all ranks, its own too, and adds them in float32 in rank order 0, 1, ...
    4. It encodes the sum and sends it to everybody; it decodes its own bytes as the others do. With error feedback it
       also owes what a result of 16 bits does not hold of the decoded value.

    Bytes sent a rank: 2 (W-1)/W nbytes(n). Roundings a value: 2. Passes over the data: 2 (encode, decode), and one of
    each over a shard. While chunk c is on the wire, c-1 is summed and c+1 encoded; while the last one is, the channel's
    next call begins.
    """
    state = TwoShot(call, scales)
    for step in range(state.count + 2):
        if step < state.count:
            state.encode_first(step)
        if 0 <= step - 1 < state.count:
            state.reduce(step - 1)
        if step == state.count:
            call.exchange.all_sent()
        if 0 <= step - 2 < state.count:
            state.collect(step - 2)
    call.exchange.finish()
