"""Messages of one call, by the way that their wires take: see `lane.Way`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from narrowcast.collectives.runtime.streams import Lane, Mark, Way
from narrowcast.collectives.transports.torch import Parcel, Pending, Transport


@dataclass
class Incoming:
    """A message that was asked for."""

    wire: Tensor
    pending: Pending | None

    def get(self) -> Tensor:
        """Wait (once) and return the bytes. On a device: the current stream waits."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        return self.wire


class Post(Protocol):
    """Tags grow in the order in which a call sends; messages of one tag between two ranks arrive in order."""

    def receive(self, wire: Tensor, peer: int, tag: int) -> Incoming:
        """Ask for a message of at least one byte, which will lie in `wire`."""

    def send(self, wire: Tensor, peer: int, tag: int) -> None:
        """Send it; it must not change before `finish`."""

    def depart(self) -> None:
        """Nothing more will be sent: let go what still waits, so that another call's messages come after it."""

    def finish(self) -> None:
        """Wait until everything has left; buffers may be reused afterwards."""


def post_of(lane: Lane, transport: Transport) -> Post:
    kinds: dict[Way, Callable[[Lane, Transport], Post]] = {
        Way.PLAIN: Plain,
        Way.ROUNDS: Rounds,
        Way.STAGED: Staged,
    }
    return kinds[lane.way](lane, transport)


class Plain:
    """What is asked for is posted at once, what is sent is sent."""

    def __init__(self, lane: Lane, transport: Transport) -> None:
        self._transport = transport
        self._sends: list[tuple[Pending, Tensor]] = []

    def receive(self, wire: Tensor, peer: int, tag: int) -> Incoming:
        return Incoming(wire, self._transport.irecv(wire, peer, tag))

    def send(self, wire: Tensor, peer: int, tag: int) -> None:
        self._sends.append((self._transport.isend(wire, peer, tag), wire))

    def depart(self) -> None: ...

    def finish(self) -> None:
        sends, self._sends = self._sends, []
        for pending, _ in sends:
            pending.wait()


@dataclass
class _Doing:
    """A wait that is something to do."""

    wait: Callable[[], None]


@dataclass
class _Copy:
    """A wire in host memory, from `there` on; `wire` stays alive, so that no other takes its place meanwhile."""

    wire: Tensor
    host: Tensor
    there: Mark | None
    to: list[tuple[int, int]] = field(default_factory=list)


class Staged:
    """Through pinned memory. Copies are started at once; this thread waits for them when it has to wait anyway."""

    def __init__(self, lane: Lane, transport: Transport) -> None:
        self._lane, self._transport, self._plain = lane, transport, Plain(lane, transport)
        self._copies: list[_Copy] = []

    def receive(self, wire: Tensor, peer: int, tag: int) -> Incoming:
        host = self._lane.pinned(wire.numel())
        pending = self._transport.irecv(host, peer, tag)

        def land() -> None:
            self.depart()
            pending.wait()
            wire.copy_(host, non_blocking=True)

        return Incoming(wire, _Doing(land))

    def send(self, wire: Tensor, peer: int, tag: int) -> None:
        # one copy for all peers of a message
        if not self._copies or self._copies[-1].wire is not wire:
            self._copies.append(_Copy(wire, *self._lane.to_host(wire)))
        self._copies[-1].to.append((peer, tag))

    def depart(self) -> None:
        copies, self._copies = self._copies, []
        for copy in copies:
            self._lane.hold(copy.there)
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


class Rounds:
    """A backend of a device does one thing after another, so ranks must do them in one order, and sending and receiving
    together: what has one tag is one round, rounds start in the order of their tags, and none before its last send.
    """

    def __init__(self, lane: Lane, transport: Transport) -> None:
        self._transport = transport
        self._rounds: dict[int, _Round] = {}

    def receive(self, wire: Tensor, peer: int, tag: int) -> Incoming:
        self._open(tag).receives.append((wire, peer))
        return Incoming(wire, _Doing(lambda: self._arrive(tag)))

    def send(self, wire: Tensor, peer: int, tag: int) -> None:
        self._start_below(tag)
        self._open(tag).sends.append((wire, peer))

    def _open(self, tag: int) -> _Round:
        found = self._rounds.setdefault(tag, _Round())
        assert found.pending is None, "a round that has started takes no more messages"
        return found

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
