"""MPI as a transport, through mpi4py (an extra). Same messages, same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.transports.base import Parcel, Pending, RowsBySwap, backend_errors


class _Request:
    def __init__(self, request: Any, buffer: Tensor) -> None:
        self._request, self._buffer = request, buffer

    def wait(self) -> None:
        with backend_errors:
            self._request.Wait()


class MpiTransport(RowsBySwap):
    """The ranks of an MPI communicator (by default all), on a duplicate of it, so that messages cannot mix."""

    shared_by_threads = False  # that would need MPI_THREAD_MULTIPLE

    def __init__(self, communicator: Any = None) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm: Any = (communicator or MPI.COMM_WORLD).Dup()
        self.rank, self.world = self._comm.Get_rank(), self._comm.Get_size()
        limit: Any = self._comm.Get_attr(MPI.TAG_UB)
        self._limit = int(limit)

    def isend(self, wire: Tensor, peer: int, tag: int) -> Pending:
        with backend_errors:
            return _Request(self._comm.Isend([wire.numpy(), self._mpi.BYTE], dest=peer, tag=tag % self._limit), wire)

    def irecv(self, wire: Tensor, peer: int, tag: int) -> Pending:
        with backend_errors:
            return _Request(self._comm.Irecv([wire.numpy(), self._mpi.BYTE], source=peer, tag=tag % self._limit), wire)

    def carries(self, device: torch.device) -> bool:
        return False  # numpy sees host memory alone

    def swap(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        raise NotImplementedError("MPI carries host memory alone here")

    def carry(self, wire: Tensor, source: int, target: int) -> Pending:
        raise NotImplementedError("MPI carries host memory alone here")

    def max_(self, values: Tensor) -> None:
        self._reduce(values, self._mpi.MAX)

    def sum_(self, values: Tensor) -> None:
        self._reduce(values, self._mpi.SUM)

    def _reduce(self, values: Tensor, op: Any) -> None:
        # MPI has no bfloat16 and float16 sums: add those in float32
        wide = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        with backend_errors:
            self._comm.Allreduce(self._mpi.IN_PLACE, wide.numpy(), op=op)
        if wide is not values:
            values.copy_(wide)

    def share(self, text: str) -> list[str]:
        with backend_errors:
            texts: list[str] = self._comm.allgather(text)
        return texts

    def tell(self, place: str) -> dict[int, str]:
        return {}  # MPI has no place for it

    def close(self) -> None:
        self._comm = None

    def interrupt(self) -> None:
        """MPI has no end for a wait."""

    def give_up(self, note: str) -> dict[int, str]:
        self.close()
        return {}  # MPI has no place for notes


def mpi_channel(communicator: Any = None) -> Channel:
    """A channel over MPI, for `all_reduce(..., channel=...)`."""
    return Channel(MpiTransport(communicator))
