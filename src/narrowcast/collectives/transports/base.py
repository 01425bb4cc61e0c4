"""What a transport is: how bytes get from rank to rank, in point-to-point messages and a few small exact reductions.

Algorithms speak to a `Transport` only, so that the same code runs on torch.distributed and on MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor


class TransportError(RuntimeError):
    """A message did not get through: the fault is the connection's or a peer's, not that of whoever waited for it."""


class _BackendErrors:
    """What a backend raises in here is the transport's: everything else that a call raises is its own fault.

    A class, since it stands around messages, and a generator costs several times as much.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, TransportError):
            raise TransportError(str(error)) from error


backend_errors = _BackendErrors()


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Block until it has arrived or left; call it once. Raises TransportError where it does not."""


Parcel = tuple[Tensor, int]
"""A wire, and the rank that it goes to or comes from."""


class Transport(Protocol):
    """A rank's view of its peers. Messages of one tag between two ranks arrive in order."""

    rank: int
    world: int
    shared_by_threads: bool
    """Whether two threads may use it at a time."""

    def isend(self, wire: Tensor, peer: int, tag: int) -> Pending:
        """Send a contiguous uint8 tensor; it must not change before `wait` returned."""

    def irecv(self, wire: Tensor, peer: int, tag: int) -> Pending:
        """Receive exactly `wire.numel()` bytes."""

    def carries(self, device: torch.device) -> bool:
        """Whether `swap`, `carry`, `all_to_all`, `all_gather`, `max_` and `sum_` take memory of this device."""

    def swap(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        """Send and receive device memory, all at once; to `wait` is to let the current stream wait.

        Rounds happen one after another, after what the current stream has been given. There are no tags: messages
        between two ranks match by their order.
        """

    def carry(self, wire: Tensor, source: int, target: int) -> Pending:
        """Device memory from one rank to another; both call. Those of one source and target follow each other in the
        order in which each of the two calls, and wait for nothing else; the first may wait for the other rank.
        """

    def all_to_all(self, arriving: Tensor, leaving: Tensor) -> Pending:
        """Row p of `leaving` goes to rank p, and row p of `arriving` comes from there: contiguous device memory of one
        shape on all ranks. As `swap`, one call of the backend.
        """

    def all_gather(self, rows: Tensor, row: Tensor) -> Pending:
        """Everyone's `row`, by rank, in device memory; `row` may be this rank's own of `rows`. As `swap`."""

    def max_(self, values: Tensor) -> None:
        """Replace each int32 by its maximum over all ranks."""

    def sum_(self, values: Tensor) -> None:
        """Replace each value by its sum over all ranks, added by the backend in its own order."""

    def share(self, text: str) -> list[str]:
        """Everyone's text, by rank; before any other traffic of the call."""

    def tell(self, place: str) -> dict[int, str]:
        """Leave word of where this rank is, and return where others said that they were, by rank."""

    def close(self) -> None:
        """Be done; peers that still wait for us find out at once where the transport can tell them."""

    def interrupt(self) -> None:
        """Let whoever waits in a thread of this process raise TransportError, where the transport can; then it is of
        no use any more.
        """

    def give_up(self, note: str) -> dict[int, str]:
        """After a failure: close, leave a note for the others, and return what they left, by rank; takes a moment."""


class RowsBySwap:
    """`all_to_all` and `all_gather` for transports whose backend has no such calls."""

    rank: int
    world: int

    def swap(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        """See `Transport`."""
        raise NotImplementedError

    def all_to_all(self, arriving: Tensor, leaving: Tensor) -> Pending:
        """See `Transport`."""
        arriving[self.rank].copy_(leaving[self.rank])
        return self.swap([(leaving[peer], peer) for peer in self._peers()], self._rows_of_peers(arriving))

    def all_gather(self, rows: Tensor, row: Tensor) -> Pending:
        """See `Transport`."""
        if row.data_ptr() != rows[self.rank].data_ptr():
            rows[self.rank].copy_(row)
        return self.swap([(row, peer) for peer in self._peers()], self._rows_of_peers(rows))

    def _rows_of_peers(self, rows: Tensor) -> list[Parcel]:
        return [(rows[peer], peer) for peer in self._peers()]

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.world) if peer != self.rank]


class Subset(RowsBySwap):
    """Some ranks of a transport, renumbered from 0: the nodes or the members of a node in a hierarchy."""

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, list(ranks)
        self.rank, self.world = self._ranks.index(whole.rank), len(self._ranks)
        self.shared_by_threads = whole.shared_by_threads

    def isend(self, wire: Tensor, peer: int, tag: int) -> Pending:
        return self._whole.isend(wire, self._ranks[peer], tag)

    def irecv(self, wire: Tensor, peer: int, tag: int) -> Pending:
        return self._whole.irecv(wire, self._ranks[peer], tag)

    def carries(self, device: torch.device) -> bool:
        return self._whole.carries(device)

    def swap(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        return self._whole.swap(*([(wire, self._ranks[peer]) for wire, peer in part] for part in (sends, receives)))

    def carry(self, wire: Tensor, source: int, target: int) -> Pending:
        return self._whole.carry(wire, self._ranks[source], self._ranks[target])

    def max_(self, values: Tensor) -> None:
        raise NotImplementedError("a subset of ranks has no reductions of its own")

    def sum_(self, values: Tensor) -> None:
        raise NotImplementedError("a subset of ranks has no reductions of its own")

    def share(self, text: str) -> list[str]:
        raise NotImplementedError("agreement is made by the whole group")

    def tell(self, place: str) -> dict[int, str]:
        raise NotImplementedError("agreement is made by the whole group")

    def close(self) -> None:
        self._whole.close()

    def interrupt(self) -> None:
        self._whole.interrupt()

    def give_up(self, note: str) -> dict[int, str]:
        return self._whole.give_up(note)
