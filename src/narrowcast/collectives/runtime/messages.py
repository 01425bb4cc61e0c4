"""The messages of one collective call: every receive is posted before anything is sent, every wait happens once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.collectives.runtime.post import Incoming, post_of
from narrowcast.collectives.runtime.streams import HOST, Lane
from narrowcast.collectives.transports.torch import Subset, Transport
from narrowcast.kernels import aligned_rows

INDEX_BITS, CALL_BITS, KIND_BITS = 14, 6, 10
"""A tag says which message of a call it is, which call (the last digits of its number) and which kind of call."""
MAX, MEET = 0x3800, 0x3801


def _nothing() -> None:
    pass


@dataclass
class Exchange:
    """Sends and receives of one call.

    `call` is its number on the channel and `kind` that of its signature, equal on all ranks. Ranks that do known things
    in different orders so wait for messages that never come, which ends in an error: Gloo would abort on a longer one.
    """

    transport: Transport
    call: int
    kind: int = 0
    lane: Lane = HOST
    sent_bytes: int = 0
    pass_on: Callable[[], None] = _nothing
    """What `all_sent` calls: the next call may begin."""

    def __post_init__(self) -> None:
        self._post = post_of(self.lane, self.transport)
        self._all_is_sent = False

    def on(self, lane: Lane) -> Exchange:
        """The same call, its wires on a lane."""
        return Exchange(self.transport, self.call, self.kind, lane, pass_on=self.pass_on)

    def among(self, ranks: Sequence[int]) -> Exchange:
        """The same call between some ranks."""
        return Exchange(Subset(self.transport, ranks), self.call, self.kind, self.lane)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world(self) -> int:
        return self.transport.world

    def _tag(self, index: int) -> int:
        if index >= 1 << INDEX_BITS:
            limit = f"a call numbers at most {1 << INDEX_BITS:,} messages"
            raise ValueError(f"collectives: {limit}, and {self.world} ranks want more; take two_shot, or fewer chunks")
        number = (self.kind % (1 << KIND_BITS)) << CALL_BITS | self.call % (1 << CALL_BITS)
        return number << INDEX_BITS | index

    def wire(self, nbytes: int) -> Tensor:
        """Memory for a message."""
        return self.lane.wire(nbytes)

    def floats(self, numel: int) -> Tensor:
        """Memory for a sum."""
        return torch.empty(numel, device=self.lane.device)

    def rows(self, nbytes: int) -> Tensor:
        """Memory for a message of each rank, one a row, to be summed."""
        return aligned_rows(self.world, nbytes, self.lane.device)

    def receive(self, nbytes: int, peer: int, index: int, into: Tensor | None = None) -> Incoming:
        """Ask for a message. Numbers grow in the order in which a call sends; see `post.Rounds` for why."""
        wire = self.wire(nbytes) if into is None else into
        return self._post.receive(wire, peer, self._tag(index)) if nbytes else Incoming(wire, None)

    def send(self, wire: Tensor, peer: int, index: int) -> None:
        if self._all_is_sent:
            raise RuntimeError("internal: a call sends after its last message, when the next may be sending already")
        if wire.numel():
            self._post.send(wire, peer, self._tag(index))
            self.sent_bytes += wire.numel()

    def all_sent(self) -> None:
        """To be called when nothing is left to be sent."""
        self._post.depart()
        self._all_is_sent = True
        self.pass_on()

    def finish(self) -> None:
        """Wait until everything has left; buffers may be reused afterwards."""
        self._post.finish()

    def gather(self, mine: Tensor, index: int) -> list[Tensor]:
        """Everyone's `mine`, by rank: a small tensor of the same type and size everywhere, sent as it is."""
        wire = mine.contiguous().view(-1).view(torch.uint8)
        # by itself: what else this call has asked for comes later
        aside = self.on(self.lane if mine.device == self.lane.device else HOST)
        incoming = {peer: aside.receive(wire.numel(), peer, index) for peer in self.others()}
        for peer in self.others():
            aside.send(wire, peer, index)
        bytes_ = [wire if rank == self.rank else incoming[rank].get() for rank in range(self.world)]
        aside.finish()
        self.sent_bytes += aside.sent_bytes
        return [theirs.view(mine.dtype).view(mine.shape) for theirs in bytes_]

    def max_(self, values: Tensor) -> None:
        """Replace each value of a small tensor by its maximum over all ranks."""
        values.copy_(torch.stack(self.gather(values.clone(), MAX)).amax(dim=0))

    def meet(self) -> None:
        """Wait until everybody is in this call: the backend's own reductions know no tags, and abort on a mismatch."""
        self.gather(torch.zeros(1, dtype=torch.uint8), MEET)

    def all_sum_(self, values: Tensor) -> None:
        """Let the backend add, in its own order."""
        self.lane.let(self.transport.sum_, values)

    def all_max_(self, values: Tensor) -> None:
        """Let the backend find the maximum of each int32."""
        self.lane.let(self.transport.max_, values)

    def others(self) -> list[int]:
        """The peers, starting after this rank, so that not everybody sends to the same one first."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]
