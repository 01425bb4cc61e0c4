"""The two shots of an exchange between all ranks: a wire for each of them (`Scatter`), and one wire for all (`Gather`);
and calls in two shots, in rounds: everybody encodes for everybody, sums what came, and everybody gets the sums.

Where host memory travels both are messages, asked for before anything is sent, sent and waited for one by one. Where a
device's backend carries the wires, each shot is one call of it, on rows of equal length: as many calls as there are
messages, one after another, would cost more than the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.transports.base import Pending
from narrowcast.kernels import ROW_ALIGNMENT, aligned_rows

Range = tuple[int, int]
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


class Shots(Protocol):
    """What one call does in a round."""

    @property
    def first(self) -> Sequence[int]:
        """Bytes to each rank in the first shot; empty: there is none."""

    @property
    def second(self) -> Sequence[int]:
        """Bytes of each rank in the second."""

    def encode(self, wires: Scatter) -> None:
        """Write and send the wire to each rank, where there is a first shot."""

    def reduce(self, arrived: Tensor | None, wires: Gather) -> None:
        """Make one wire of what came, one a row, and send it."""

    def collect(self, wires: Gather) -> None:
        """Read everybody's."""


def run_rounds(exchange: Exchange, rounds: Sequence[Sequence[Shots]]) -> None:
    """While round r is on the wire, r-1 is summed and r+1 encoded; what one round has travels together."""
    first: list[list[Scatter | None]] = []
    second: list[Sequence[Gather]] = []
    for r, each in enumerate(rounds):
        # numbers grow in the order of sending: 0, 1, sums of 0, 2, sums of 1, ...
        first.append(_scatter_first(exchange, each, 2 * r))
    for r, each in enumerate(rounds):
        second.append(gather_together(exchange, [*map(_SECOND, each)], 2 * r + 3))
    for step in range(len(rounds) + 2):
        if step < len(rounds):
            for one, leaving in zip(rounds[step], first[step], strict=True):
                if leaving is not None:
                    one.encode(leaving)
        if 0 <= step - 1 < len(rounds):
            for one, arriving, own in zip(rounds[step - 1], first[step - 1], second[step - 1], strict=True):
                one.reduce(None if arriving is None else arriving.arrived(), own)
        if step == len(rounds):
            exchange.all_sent()
        if step >= 2:
            for one, gathered in zip(rounds[step - 2], second[step - 2], strict=True):
                one.collect(gathered)
    exchange.finish()


_SECOND = attrgetter("second")


def _scatter_first(exchange: Exchange, each: Sequence[Shots], index: int) -> list[Scatter | None]:
    sizes = [one.first for one in each if one.first]
    wires = iter(scatter_together(exchange, sizes, index) if sizes else ())
    return [next(wires) if one.first else None for one in each]


def scatter(exchange: Exchange, sizes: Sequence[int], index: int) -> Scatter:
    """sizes: bytes of the wires to each rank, equal on all ranks. index: see `Exchange.receive`."""
    return scatter_together(exchange, [sizes], index)[0]


def gather(exchange: Exchange, sizes: Sequence[int], index: int) -> Gather:
    """sizes: bytes of the wire of each rank. index: see `Exchange.receive`."""
    return gather_together(exchange, [sizes], index)[0]


def scatter_together(exchange: Exchange, sizes: Sequence[Sequence[int]], index: int) -> Sequence[Scatter]:
    """Several that travel in one call of a backend; those of the host are messages of their own, in this order."""
    if exchange.by_rows and (layout := _row_layout(tuple(map(tuple, sizes)), exchange.rank)) is not None:
        return _ScatteredRows(exchange, layout).windows
    return [_ScatteredMessages(exchange, of_one, index) for of_one in sizes]


def gather_together(exchange: Exchange, sizes: Sequence[Sequence[int]], index: int) -> Sequence[Gather]:
    """As `scatter_together`."""
    if exchange.by_rows and (layout := _row_layout(tuple(map(tuple, sizes)), exchange.rank)) is not None:
        return _GatheredRows(exchange, layout).windows
    return [_GatheredMessages(exchange, of_one, index) for of_one in sizes]


class _RowLayout(NamedTuple):
    """A row for each rank, with the wires of several calls in it: at the same place in all rows, since a backend's call
    knows one length, and one kernel reads a wire of every rank; loads are widest at multiples of 16.
    """

    rows: int
    columns: tuple[Range, ...]
    """Of the longest wire of each call."""
    width: int
    sizes: tuple[tuple[int, ...], ...]
    scattered: int
    """Bytes of wires that leave this rank in the first shot, and in the second."""
    gathered: int


@lru_cache(maxsize=1024)
def _row_layout(sizes: tuple[tuple[int, ...], ...], rank: int) -> _RowLayout | None:
    """None where rows as long as the longest wire waste much: messages are better, each as long as it is."""
    world, longest = len(sizes[0]), [max(of_one) for of_one in sizes]
    total = sum(map(sum, sizes))
    if world == 1 or world * sum(longest) - total > max(total, SPARE_BYTES):
        return None
    starts = list(accumulate((-(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT for size in longest), initial=0))
    columns = tuple((start, start + size) for start, size in zip(starts, longest, strict=False))
    own = sum(of_one[rank] for of_one in sizes)
    return _RowLayout(world, columns, starts[-1], sizes, total - own, (world - 1) * own)


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


class _ScatteredRows:
    def __init__(self, exchange: Exchange, layout: _RowLayout) -> None:
        self._exchange, self._layout, self.rank = exchange, layout, exchange.rank
        self.rows = torch.empty(layout.rows, layout.width, dtype=torch.uint8, device=exchange.stream.device)
        self.windows = [*map(partial(_ScatterWindow, self), layout.columns, layout.sizes)]
        self._unsent, self._arriving = layout.rows * len(layout.sizes), self.rows
        self._pending: Pending | None = None

    def send(self, wires: int) -> None:
        self._unsent -= wires
        if not self._unsent and self._layout.width:
            self._arriving = torch.empty_like(self.rows)
            self._pending = self._exchange.transport.all_to_all(self._arriving, self.rows)
            self._exchange.sent_bytes += self._layout.scattered

    def arrived(self) -> Tensor:
        if self._unsent:
            raise RuntimeError(f"internal: {self._unsent} wires were not sent")
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._arriving


class _ScatterWindow:
    def __init__(self, shared: _ScatteredRows, columns: Range, sizes: Sequence[int]) -> None:
        self._shared, self._sizes, self._start = shared, sizes, columns[0]
        self._rows = shared.rows[:, columns[0] : columns[1]]
        self.rows: Tensor | None = self._rows

    def leaving(self, rank: int) -> Tensor:
        return self._rows[rank, : self._sizes[rank]]

    def send(self, rank: int) -> None:
        self._shared.send(1)

    def send_all(self) -> None:
        self._shared.send(len(self._sizes))

    def arrived(self) -> Tensor:
        return self._shared.arrived()[:, self._start : self._start + self._sizes[self._shared.rank]]


class _GatheredRows:
    def __init__(self, exchange: Exchange, layout: _RowLayout) -> None:
        self._exchange, self._layout, self.rank = exchange, layout, exchange.rank
        self.rows = torch.empty(layout.rows, layout.width, dtype=torch.uint8, device=exchange.stream.device)
        self.windows = [*map(partial(_GatherWindow, self), layout.columns, layout.sizes)]
        self._unsent = len(layout.sizes)
        self._pending: Pending | None = None

    def send(self) -> None:
        self._unsent -= 1
        if not self._unsent and self._layout.width:
            self._pending = self._exchange.transport.all_gather(self.rows, self.rows[self.rank])
            self._exchange.sent_bytes += self._layout.gathered

    def await_all(self) -> None:
        if self._unsent:
            raise RuntimeError(f"internal: {self._unsent} wires were not sent")
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


class _GatherWindow:
    def __init__(self, shared: _GatheredRows, columns: Range, sizes: Sequence[int]) -> None:
        self._shared, self._sizes, self._rows = shared, sizes, shared.rows[:, columns[0] : columns[1]]
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
