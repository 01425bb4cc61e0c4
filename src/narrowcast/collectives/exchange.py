"""The messages of one collective call: every receive is posted before anything is sent, every wait happens once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast.collectives.transport import Pending, Transport

INDEX_BITS, CALL_BITS, KIND_BITS = 14, 6, 10
"""A tag says which message of a call it is, which call (the last digits of its number) and which kind of call."""
MAX, MEET = 0x3800, 0x3801


@dataclass
class Incoming:
    """A message that was asked for."""

    wire: Tensor
    pending: Pending | None

    def get(self) -> Tensor:
        """Wait (once) and return the bytes."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        return self.wire


@dataclass
class Exchange:
    """Sends and receives of one call.

    `call` is its number on the channel and `kind` that of its signature, equal on all ranks. Ranks that do known things
    in different orders so wait for messages that never come, which ends in an error: Gloo would abort on a longer one.
    """

    transport: Transport
    call: int
    kind: int = 0
    sends: list[tuple[Pending, Tensor]] = field(default_factory=list)
    sent_bytes: int = 0

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world(self) -> int:
        return self.transport.world

    def _tag(self, index: int) -> int:
        assert index < 1 << INDEX_BITS
        number = (self.kind % (1 << KIND_BITS)) << CALL_BITS | self.call % (1 << CALL_BITS)
        return number << INDEX_BITS | index

    def receive(self, nbytes: int, peer: int, index: int) -> Incoming:
        wire = torch.empty(nbytes, dtype=torch.uint8)
        return Incoming(wire, self.transport.irecv(wire, peer, self._tag(index)) if nbytes else None)

    def send(self, wire: Tensor, peer: int, index: int) -> None:
        if wire.numel():
            self.sends.append((self.transport.isend(wire, peer, self._tag(index)), wire))
            self.sent_bytes += wire.numel()

    def finish(self) -> None:
        """Wait until everything has left; buffers may be reused afterwards."""
        sends, self.sends = self.sends, []
        for pending, _ in sends:
            pending.wait()

    def gather(self, mine: Tensor, index: int) -> list[Tensor]:
        """Everyone's `mine`, by rank: a small tensor of the same type and size everywhere, sent as it is."""
        wire = mine.contiguous().view(-1).view(torch.uint8)
        incoming = {peer: self.receive(wire.numel(), peer, index) for peer in self.others()}
        for peer in self.others():
            self.send(wire, peer, index)
        bytes_ = [wire if rank == self.rank else incoming[rank].get() for rank in range(self.world)]
        self.finish()
        return [theirs.view(mine.dtype).view(mine.shape) for theirs in bytes_]

    def max_(self, values: Tensor) -> None:
        """Replace each value of a small tensor by its maximum over all ranks."""
        values.copy_(torch.stack(self.gather(values.clone(), MAX)).amax(dim=0))

    def meet(self) -> None:
        """Wait until everybody is in this call: the backend's own reductions know no tags, and abort on a mismatch."""
        self.gather(torch.zeros(1, dtype=torch.uint8), MEET)

    def others(self) -> list[int]:
        """The peers, starting after this rank, so that not everybody sends to the same one first."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]
