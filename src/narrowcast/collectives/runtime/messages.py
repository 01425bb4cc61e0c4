"""The messages of one collective call: every receive is posted before anything is sent, every wait happens once.

An algorithm speaks to an `Exchange`, which numbers the messages and counts their bytes. Below it a message takes one of
three paths, by where its wire lies and what the transport carries: see `streams.Way`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from narrowcast.collectives.runtime.streams import HOST, DeviceStream, Way
from narrowcast.collectives.transports.base import Parcel, Pending, Subset, Transport

INDEX_BITS, CALL_BITS, KIND_BITS = 14, 6, 10
"""A tag says which message of a call it is, which call (the last digits of its number) and which kind of call."""
MAX, MEET = 0x3800, 0x3801


@dataclass
class Incoming:
    """A message that was asked for."""

    wire: Tensor
    wait: Callable[[], object] | None

    def get(self) -> Tensor:
        """Wait (once) and return the bytes. On a device: the current stream waits."""
        if self.wait is not None:
            self.wait()
            self.wait = None
        return self.wire


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
    stream: DeviceStream = HOST
    sent_bytes: int = 0
    pass_on: Callable[[], None] = _nothing
    """What `all_sent` calls: the next call may begin."""

    def __post_init__(self) -> None:
        self.rank, self.world = self.transport.rank, self.transport.world
        self.by_rows = self.stream.way is Way.ROUNDS
        """Whether a device's backend carries the wires: it takes rows of equal length, and a call of its own for each
        thing that it does.
        """
        self._made: MessagePath | None = None
        self._all_is_sent = False

    @property
    def _path(self) -> MessagePath:
        """Made for the first message: calls by rows have none."""
        if self._made is None:
            self._made = _PATHS[self.stream.way](self.stream, self.transport)
        return self._made

    def on(self, stream: DeviceStream) -> Exchange:
        """The same call, its wires on another device."""
        return Exchange(self.transport, self.call, self.kind, stream, pass_on=self.pass_on)

    def before_the_last(self) -> Exchange:
        """The same call, for messages after which it sends more: no other call begins."""
        return Exchange(self.transport, self.call, self.kind, self.stream)

    def among(self, ranks: Sequence[int]) -> Exchange:
        """The same call between some ranks."""
        return Exchange(Subset(self.transport, ranks), self.call, self.kind, self.stream)

    def _tag(self, index: int) -> int:
        if index >= 1 << INDEX_BITS:
            limit = f"a call numbers at most {1 << INDEX_BITS:,} messages"
            raise ValueError(f"collectives: {limit}, and {self.world} ranks want more; take two_shot, or fewer chunks")
        number = (self.kind % (1 << KIND_BITS)) << CALL_BITS | self.call % (1 << CALL_BITS)
        return number << INDEX_BITS | index

    def wire(self, nbytes: int) -> Tensor:
        """Memory for a message."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.stream.device)

    def floats(self, numel: int) -> Tensor:
        """Memory for a sum."""
        return torch.empty(numel, dtype=torch.float32, device=self.stream.device)

    def receive(self, nbytes: int, peer: int, index: int, into: Tensor | None = None) -> Incoming:
        """Ask for a message. Numbers grow in the order in which a call sends; see `RoundsPath` for why."""
        wire = self.wire(nbytes) if into is None else into
        return Incoming(wire, self._path.receive(wire, peer, self._tag(index)) if nbytes else None)

    def send(self, wire: Tensor, peer: int, index: int) -> None:
        if self._all_is_sent:
            raise RuntimeError("internal: a call sends after its last message, when the next may be sending already")
        if wire.numel():
            self._path.send(wire, peer, self._tag(index))
            self.sent_bytes += wire.numel()

    def all_sent(self) -> None:
        """To be called when nothing is left to be sent."""
        if self._made is not None:
            self._made.depart()
        self._all_is_sent = True
        self.pass_on()

    def finish(self) -> None:
        """Wait until everything has left; buffers may be reused afterwards."""
        if self._made is not None:
            self._made.finish()

    def gather(self, mine: Tensor, index: int) -> list[Tensor]:
        """Everyone's `mine`, by rank: a small tensor of the same type and size everywhere, sent as it is."""
        wire = mine.contiguous().view(-1).view(torch.uint8)
        # by itself: what else this call has asked for comes later
        aside = self.on(self.stream if mine.device == self.stream.device else HOST)
        if aside.by_rows and wire.numel():
            rows = aside.wire(self.world * wire.numel()).view(self.world, -1)
            self.transport.all_gather(rows, wire).wait()
            self.sent_bytes += (self.world - 1) * wire.numel()
            return list(rows.view(mine.dtype).view(self.world, *mine.shape))
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
        self.stream.reduce_in_place(self.transport.sum_, values)

    def all_max_(self, values: Tensor) -> None:
        """Let the backend find the maximum of each int32."""
        self.stream.reduce_in_place(self.transport.max_, values)

    def others(self) -> list[int]:
        """The peers, starting after this rank, so that not everybody sends to the same one first."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]


class MessagePath(Protocol):
    """How messages get to the transport. Tags grow in the order in which a call sends; messages of one tag between two
    ranks arrive in order.
    """

    def receive(self, wire: Tensor, peer: int, tag: int) -> Callable[[], object]:
        """Ask for a message of at least one byte, which lies in `wire` when what is returned has been called, once."""

    def send(self, wire: Tensor, peer: int, tag: int) -> None:
        """Send it; it must not change before `finish`."""

    def depart(self) -> None:
        """Nothing more will be sent: let go what still waits, so that another call's messages come after it."""

    def finish(self) -> None:
        """Wait until everything has left; buffers may be reused afterwards."""


class PlainPath:
    """What is asked for is posted at once, what is sent is sent."""

    def __init__(self, stream: DeviceStream, transport: Transport) -> None:
        self._transport = transport
        self._sends: list[tuple[Pending, Tensor]] = []

    def receive(self, wire: Tensor, peer: int, tag: int) -> Callable[[], object]:
        return self._transport.irecv(wire, peer, tag).wait

    def send(self, wire: Tensor, peer: int, tag: int) -> None:
        self._sends.append((self._transport.isend(wire, peer, tag), wire))

    def depart(self) -> None: ...

    def finish(self) -> None:
        sends, self._sends = self._sends, []
        for pending, _ in sends:
            pending.wait()


@dataclass
class _Copy:
    """A wire in host memory, from `copied` on; `wire` stays alive, so that no other takes its place meanwhile."""

    wire: Tensor
    host: Tensor
    copied: torch.cuda.Event | None
    to: list[tuple[int, int]] = field(default_factory=list)


class StagedPath:
    """Through pinned memory. Copies are started at once; this thread waits for them when it has to wait anyway."""

    def __init__(self, stream: DeviceStream, transport: Transport) -> None:
        self._stream, self._transport, self._plain = stream, transport, PlainPath(stream, transport)
        self._copies: list[_Copy] = []

    def receive(self, wire: Tensor, peer: int, tag: int) -> Callable[[], object]:
        host = self._stream.pinned(wire.numel())
        pending = self._transport.irecv(host, peer, tag)

        def land() -> None:
            self.depart()
            pending.wait()
            wire.copy_(host, non_blocking=True)

        return land

    def send(self, wire: Tensor, peer: int, tag: int) -> None:
        # one copy for all peers of a message
        if not self._copies or self._copies[-1].wire is not wire:
            self._copies.append(_Copy(wire, *self._stream.to_host(wire)))
        self._copies[-1].to.append((peer, tag))

    def depart(self) -> None:
        copies, self._copies = self._copies, []
        for copy in copies:
            self._stream.synchronize(copy.copied)
            for peer, tag in copy.to:
                self._plain.send(copy.host, peer, tag)

    def finish(self) -> None:
        self.depart()
        self._plain.finish()


@dataclass
class _Round:
    """All that this rank sends and receives with one tag."""

    sends: list[Parcel] = field(default_factory=list)
    receives: list[Parcel] = field(default_factory=list)
    pending: Pending | None = None
    waited: bool = False


class RoundsPath:
    """A backend of a device does one thing after another, so ranks must do them in one order, and sending and receiving
    together: what has one tag is one round, rounds start in the order of their tags, and none before its last send.
    """

    def __init__(self, stream: DeviceStream, transport: Transport) -> None:
        self._transport = transport
        self._rounds: dict[int, _Round] = {}

    def receive(self, wire: Tensor, peer: int, tag: int) -> Callable[[], object]:
        self._open(tag).receives.append((wire, peer))
        return lambda: self._arrive(tag)

    def send(self, wire: Tensor, peer: int, tag: int) -> None:
        self._start_below(tag)
        self._open(tag).sends.append((wire, peer))

    def _open(self, tag: int) -> _Round:
        one = self._rounds.setdefault(tag, _Round())
        assert one.pending is None, "a round that has started takes no more messages"
        return one

    def _start_below(self, tag: int) -> None:
        for number in sorted(self._rounds):
            one = self._rounds[number]
            if number < tag and one.pending is None:
                one.pending = self._transport.swap(one.sends, one.receives)

    def depart(self) -> None:
        self._start_below(max(self._rounds, default=0) + 1)

    def _arrive(self, tag: int) -> None:
        self._start_below(tag + 1)
        one = self._rounds[tag]
        if not one.waited:
            assert one.pending is not None
            one.waited = True
            one.pending.wait()

    def finish(self) -> None:
        self.depart()
        for tag in sorted(self._rounds):
            self._arrive(tag)
        self._rounds.clear()


_PATHS: dict[Way, Callable[[DeviceStream, Transport], MessagePath]] = {
    Way.PLAIN: PlainPath,
    Way.ROUNDS: RoundsPath,
    Way.STAGED: StagedPath,
}
