"""The two shots of an exchange between all ranks: a wire for each of them (`Scatter`), and one wire for all (`Gather`).

Where host memory travels both are messages, asked for before anything is sent, sent and waited for one by one. Where a
device's backend carries the wires, each shot is one call of it, on rows of equal length: as many calls as there are
messages, one after another, would cost more than the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.transports.base import Pending
from narrowcast.kernels import ROW_ALIGNMENT, aligned_rows

SPARE_BYTES = 1 << 16
"""That rows may always waste: a call of the backend saves more."""


class Scatter(Protocol):
    """Every rank has a wire for each rank, itself too."""

    rows: Tensor | None
    """Memory for all of them, each at the begin of a row, where they lie so."""

    def leaving(self, rank: int) -> Tensor:
        """Memory for the wire to a rank."""

    def send(self, rank: int) -> None:
        """It has been written. To be called once for each rank."""

    def send_all(self) -> None:
        """All have."""

    def arrived(self) -> Tensor:
        """The wires for this rank, one a row; waits for all of them."""


class Gather(Protocol):
    """Every rank has one wire, for all."""

    own: Tensor
    """Memory for it."""

    def rows(self) -> Tensor | None:
        """The wires of all ranks, each at the begin of a row, where they lie so; waits for them."""

    def send(self) -> None:
        """It has been written."""

    def arrived(self, rank: int) -> Tensor:
        """A rank's wire; waits for it."""


def scatter(exchange: Exchange, sizes: Sequence[int], index: int) -> Scatter:
    """sizes: bytes of the wires to each rank, equal on all ranks. index: see `Exchange.receive`."""
    return scatter_together(exchange, [sizes], index)[0]


def gather(exchange: Exchange, sizes: Sequence[int], index: int) -> Gather:
    """sizes: bytes of the wire of each rank. index: see `Exchange.receive`."""
    return gather_together(exchange, [sizes], index)[0]


def scatter_together(exchange: Exchange, sizes: Sequence[Sequence[int]], index: int) -> Sequence[Scatter]:
    """Several that travel in one call of a backend; those of the host are messages of their own, in this order."""
    if exchange.by_rows and _are_alike(sizes, exchange.world):
        return _ScatteredRows(exchange, sizes).windows
    return [_ScatteredMessages(exchange, of_one, index) for of_one in sizes]


def gather_together(exchange: Exchange, sizes: Sequence[Sequence[int]], index: int) -> Sequence[Gather]:
    """As `scatter_together`."""
    if exchange.by_rows and _are_alike(sizes, exchange.world):
        return _GatheredRows(exchange, sizes).windows
    return [_GatheredMessages(exchange, of_one, index) for of_one in sizes]


def _are_alike(sizes: Sequence[Sequence[int]], world: int) -> bool:
    """Whether rows as long as the longest wire waste little: else messages are better, each as long as it is."""
    total, padded = sum(map(sum, sizes)), world * sum(map(max, sizes))
    return world > 1 and padded - total <= max(total, SPARE_BYTES)


class _ScatteredMessages:
    rows: Tensor | None = None

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
        if rank != self._exchange.rank and self._sizes[rank]:
            self._exchange.send(self._wires.pop(rank), rank, self._index)

    def send_all(self) -> None:
        for rank in self._exchange.others():
            self.send(rank)

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

    def rows(self) -> Tensor | None:
        return None

    def arrived(self, rank: int) -> Tensor:
        return self.own if rank == self._exchange.rank else self._incoming[rank].get()


def _places(exchange: Exchange, sizes: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """A row for each rank, and where each wire of a row begins: at the same place in all of them, since a backend's
    call knows one length, and one kernel reads a wire of every rank; loads are widest at multiples of 16.
    """
    lengths = [-(-max(of_one) // ROW_ALIGNMENT) * ROW_ALIGNMENT for of_one in sizes]
    starts = list(accumulate(lengths, initial=0))
    rows = torch.empty(exchange.world, starts[-1], dtype=torch.uint8, device=exchange.stream.device)
    return rows, starts


class _ScatteredRows:
    def __init__(self, exchange: Exchange, sizes: Sequence[Sequence[int]]) -> None:
        self._exchange = exchange
        self.rows, starts = _places(exchange, sizes)
        self.windows = [_ScatterWindow(self, start, of_one) for start, of_one in zip(starts, sizes, strict=False)]
        self.rank, self._unsent = exchange.rank, exchange.world * len(sizes)
        self._payload = sum(sum(of_one) - of_one[exchange.rank] for of_one in sizes)
        self._arriving = self.rows
        self._pending: Pending | None = None

    def send(self, wires: int) -> None:
        self._unsent -= wires
        if not self._unsent and self.rows.numel():
            self._arriving = torch.empty_like(self.rows)
            self._pending = self._exchange.transport.all_to_all(self._arriving, self.rows)
            self._exchange.sent_bytes += self._payload

    def arrived(self) -> Tensor:
        if self._unsent:
            raise RuntimeError(f"internal: {self._unsent} wires were not sent")
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._arriving


class _ScatterWindow:
    def __init__(self, shared: _ScatteredRows, start: int, sizes: Sequence[int]) -> None:
        self._shared, self._sizes, self._columns = shared, sizes, slice(start, start + max(sizes))
        self._rows = shared.rows[:, self._columns]
        self.rows: Tensor | None = self._rows

    def leaving(self, rank: int) -> Tensor:
        return self._rows[rank, : self._sizes[rank]]

    def send(self, rank: int) -> None:
        self._shared.send(1)

    def send_all(self) -> None:
        self._shared.send(len(self._sizes))

    def arrived(self) -> Tensor:
        return self._shared.arrived()[:, self._columns][:, : self._sizes[self._shared.rank]]


class _GatheredRows:
    def __init__(self, exchange: Exchange, sizes: Sequence[Sequence[int]]) -> None:
        self._exchange = exchange
        self.rows, starts = _places(exchange, sizes)
        self.rank, self._unsent = exchange.rank, len(sizes)
        self.windows = [_GatherWindow(self, start, of_one) for start, of_one in zip(starts, sizes, strict=False)]
        self._payload = (exchange.world - 1) * sum(of_one[exchange.rank] for of_one in sizes)
        self._pending: Pending | None = None

    def send(self) -> None:
        self._unsent -= 1
        if not self._unsent and self.rows.numel():
            self._pending = self._exchange.transport.all_gather(self.rows, self.rows[self.rank])
            self._exchange.sent_bytes += self._payload

    def await_all(self) -> None:
        if self._unsent:
            raise RuntimeError(f"internal: {self._unsent} wires were not sent")
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


class _GatherWindow:
    def __init__(self, shared: _GatheredRows, start: int, sizes: Sequence[int]) -> None:
        self._shared, self._sizes, self._rows = shared, sizes, shared.rows[:, start : start + max(sizes)]
        self.own = self._rows[shared.rank, : sizes[shared.rank]]

    def send(self) -> None:
        self._shared.send()

    def rows(self) -> Tensor | None:
        self._shared.await_all()
        return self._rows

    def arrived(self, rank: int) -> Tensor:
        if rank == self._shared.rank:
            return self.own
        self._shared.await_all()
        return self._rows[rank, : self._sizes[rank]]
