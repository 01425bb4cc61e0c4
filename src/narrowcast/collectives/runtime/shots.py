"""The two shots of an exchange between all ranks: a wire for each of them (`Scatter`), and one wire for all (`Gather`).

Where host memory travels both are messages, asked for before anything is sent, sent and waited for one by one. Where a
device's backend carries the wires, each shot is one call of it, on rows of equal length: as many calls as messages
would take, one after another, cost more than the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.runtime.streams import Way
from narrowcast.collectives.transports.base import Pending
from narrowcast.kernels import ROW_ALIGNMENT, aligned_rows


class Scatter(Protocol):
    """Every rank has a wire for each rank, itself too."""

    def leaving(self, rank: int) -> Tensor:
        """Memory for the wire to a rank."""

    def send(self, rank: int) -> None:
        """It has been written. To be called for all ranks."""

    def arrived(self) -> Tensor:
        """The wires for this rank, one a row; waits for all of them."""


class Gather(Protocol):
    """Every rank has one wire, for all."""

    own: Tensor
    """Memory for it."""

    def send(self) -> None:
        """It has been written."""

    def arrived(self, rank: int) -> Tensor:
        """A rank's wire; waits for it."""


def scatter(exchange: Exchange, sizes: Sequence[int], index: int) -> Scatter:
    """sizes: bytes of the wires to each rank, equal on all ranks. index: see `Exchange.receive`."""
    by_rows = exchange.stream.way is Way.ROUNDS
    return _ScatteredRows(exchange, sizes) if by_rows else _ScatteredMessages(exchange, sizes, index)


def gather(exchange: Exchange, sizes: Sequence[int], index: int) -> Gather:
    """sizes: bytes of the wire of each rank. index: see `Exchange.receive`."""
    by_rows = exchange.stream.way is Way.ROUNDS
    return _GatheredRows(exchange, sizes) if by_rows else _GatheredMessages(exchange, sizes, index)


class _ScatteredMessages:
    def __init__(self, exchange: Exchange, sizes: Sequence[int], index: int) -> None:
        self._exchange, self._sizes, self._index = exchange, sizes, index
        self._rows = aligned_rows(exchange.world, sizes[exchange.rank], exchange.stream.device)
        self._incoming = [exchange.receive(sizes[exchange.rank], p, index, self._rows[p]) for p in exchange.others()]
        self._wires: dict[int, Tensor] = {}

    def leaving(self, rank: int) -> Tensor:
        if rank == self._exchange.rank:
            return self._rows[rank]
        wire = self._wires[rank] = self._exchange.wire(self._sizes[rank])
        return wire

    def send(self, rank: int) -> None:
        if rank != self._exchange.rank:
            self._exchange.send(self._wires.pop(rank), rank, self._index)

    def arrived(self) -> Tensor:
        for incoming in self._incoming:
            incoming.get()
        return self._rows


class _GatheredMessages:
    def __init__(self, exchange: Exchange, sizes: Sequence[int], index: int) -> None:
        self._exchange, self._index = exchange, index
        self.own = exchange.wire(sizes[exchange.rank])
        self._incoming = {p: exchange.receive(sizes[p], p, index) for p in exchange.others()}

    def send(self) -> None:
        for peer in self._exchange.others():
            self._exchange.send(self.own, peer, self._index)

    def arrived(self, rank: int) -> Tensor:
        return self.own if rank == self._exchange.rank else self._incoming[rank].get()


def _rows(exchange: Exchange, sizes: Sequence[int]) -> Tensor:
    """A row for each rank, as long as the longest wire; a backend's calls know one length."""
    length = -(-max(sizes) // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return torch.empty(exchange.world, length, dtype=torch.uint8, device=exchange.stream.device)


class _ScatteredRows:
    def __init__(self, exchange: Exchange, sizes: Sequence[int]) -> None:
        self._exchange, self._sizes = exchange, sizes
        self.rows = _rows(exchange, sizes)
        self._unsent = exchange.world
        self._arriving: Tensor | None = None
        self._pending: Pending | None = None

    def leaving(self, rank: int) -> Tensor:
        return self.rows[rank, : self._sizes[rank]]

    def send(self, rank: int) -> None:
        self._unsent -= 1
        if not self._unsent:
            self._arriving = torch.empty_like(self.rows)
            if self.rows.numel():
                self._pending = self._exchange.transport.all_to_all(self._arriving, self.rows)
            own = self._exchange.rank
            self._exchange.sent_bytes += sum(self._sizes) - self._sizes[own]

    def arrived(self) -> Tensor:
        if self._arriving is None:
            raise RuntimeError("internal: a rank's wire was not sent")
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._arriving[:, : self._sizes[self._exchange.rank]]


class _GatheredRows:
    def __init__(self, exchange: Exchange, sizes: Sequence[int]) -> None:
        self._exchange, self._sizes = exchange, sizes
        self.rows = _rows(exchange, sizes)
        self.own = self.rows[exchange.rank, : sizes[exchange.rank]]
        self._pending: Pending | None = None

    def send(self) -> None:
        if self.rows.numel():
            self._pending = self._exchange.transport.all_gather(self.rows, self.rows[self._exchange.rank])
        self._exchange.sent_bytes += (self._exchange.world - 1) * self._sizes[self._exchange.rank]

    def arrived(self, rank: int) -> Tensor:
        if self._pending is not None and rank != self._exchange.rank:
            self._pending.wait()
            self._pending = None
        return self.rows[rank, : self._sizes[rank]]
