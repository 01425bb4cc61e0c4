"""How bytes get from rank to rank: point-to-point messages, and a few small exact reductions.

Algorithms speak to a `Transport` only, so the same code runs on torch.distributed, on MPI and in one process.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.collectives.runtime.groups import check_group, group_timeout, has_nccl


class TransportError(RuntimeError):
    """A message did not get through: the fault is the connection's or a peer's, not that of whoever waited for it."""


class _Underway:
    """What a backend raises in here is the transport's: everything else that a call raises is its own fault.

    A class, since it stands around every message, and a generator costs several times as much.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, TransportError):
            raise TransportError(str(error)) from error


underway = _Underway()


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Block until it has arrived or left; call it once. Raises TransportError where it does not."""


class Message:
    """One that a backend of torch carries."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        with underway:
            self._work.wait()


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
        """Whether `swap`, `max_` and `sum_` take memory of this device."""

    def swap(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        """Send and receive device memory, all at once; to `wait` is to let the current stream wait.

        Rounds happen one after another, after what the current stream has been given. There are no tags: messages
        between two ranks match by their order.
        """

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


class TorchTransport:
    """Connections of our own between the ranks of `group`, so that user traffic cannot get between our messages.

    A Gloo backend by itself, made on the group's store: torch's registry of groups does not know it, so that it can be
    made again and again, and is gone when we drop it. Where the group has NCCL for CUDA tensors, so have we.
    """

    shared_by_threads = True
    messages = 0
    """That this process has sent, over all transports."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        chosen = group or dist.group.WORLD
        assert chosen is not None
        check_group(chosen)
        self._timeout = timeout or group_timeout(group)
        self.rank, self.world = dist.get_rank(chosen), dist.get_world_size(chosen)
        # attaching is collective, so all ranks count alike
        number = _MADE[chosen] = _MADE.get(chosen, 0) + 1
        store, prefix = dist.distributed_c10d._get_process_group_store(chosen), f"narrowcast/{number}"
        # to meet is to wait, and with us whoever else uses the connection
        meeting = dist.PrefixStore(prefix, _connection(chosen, store, "meeting"))  # type: ignore[attr-defined]
        self._backend: Any = dist.ProcessGroupGloo(meeting, self.rank, self.world, self._timeout)
        self._has_nccl, self._meeting = has_nccl(chosen), meeting
        self._carrier: Any = None
        self._store: Any = dist.PrefixStore(prefix, _connection(chosen, store, "notes"))  # type: ignore[attr-defined]
        self._shared, self._asked = 0, 0

    def isend(self, wire: Tensor, peer: int, tag: int) -> Pending:
        TorchTransport.messages += 1
        with underway:
            return Message(self._open().send([wire], peer, tag))

    def irecv(self, wire: Tensor, peer: int, tag: int) -> Pending:
        with underway:
            return Message(self._open().recv([wire], peer, tag))

    def carries(self, device: torch.device) -> bool:
        return device.type == "cuda" and self._has_nccl

    def _nccl(self) -> Any:
        """Made at its first use; NCCL itself connects all ranks in the first round, which all take part in."""
        self._open()
        if self._carrier is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            meeting = dist.PrefixStore("nccl", self._meeting)  # type: ignore[attr-defined]
            self._carrier = dist.ProcessGroupNCCL(meeting, self.rank, self.world, options)
        return self._carrier

    def swap(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        with underway:
            backend = self._nccl()
            backend._start_coalescing()
            for wire, peer in receives:
                backend.recv([wire], peer, 0)
            for wire, peer in sends:
                backend.send([wire], peer, 0)
            return Message(backend._end_coalescing())

    def max_(self, values: Tensor) -> None:
        self._reduce(values, dist.ReduceOp.MAX)

    def sum_(self, values: Tensor) -> None:
        self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: Tensor, op: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        with underway:
            backend = self._nccl() if values.is_cuda else self._open()
            backend.allreduce([values], options).wait()

    def share(self, text: str) -> list[str]:
        number, self._shared = self._shared, self._shared + 1
        with underway:
            return bounded(lambda: self._share(number, text), self._timeout.total_seconds() + STORE_GRACE)

    def _share(self, number: int, text: str) -> list[str]:
        self._store.set(f"call/{number}/{self.rank}", text)
        keys = [f"call/{number}/{peer}" for peer in range(self.world)]
        pause, began = 0.0005, time.monotonic()
        until, probe_at = began + self._timeout.total_seconds(), began + PROBE_EVERY
        # no store.wait: a rank that gives up must be heard while we wait
        while not self._store.check(keys):
            missing = [peer for peer, key in enumerate(keys) if not self._store.check([key])]
            if self._store.check([GAVE_UP]):
                raise TransportError(f"ranks {missing} did not come to this call, and one gave up")
            if time.monotonic() > until:
                raise TimeoutError(f"ranks {missing} made no such call within {self._timeout}")
            if time.monotonic() > probe_at:
                self._probe(missing)
                probe_at = time.monotonic() + PROBE_EVERY
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
        found = [self._read(key) for key in keys]
        # whoever is here has read all of the time before
        if number:
            with contextlib.suppress(RuntimeError):  # a store that cannot is a store that grows
                self._store.delete_key(f"call/{number - 1}/{self.rank}")
        return found

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode(errors="replace"))

    def tell(self, place: str) -> dict[int, str]:
        def ask() -> dict[int, str]:
            self._store.set(f"at/{self.rank}", place)
            # a few in turn: all of them twice a second would be W squared requests
            asked = range(self._asked, self._asked + min(ASKED_AT_ONCE, self.world - 1))
            self._asked = asked.stop
            others = {
                peer: f"at/{peer}" for peer in ((self.rank + 1 + k % (self.world - 1)) % self.world for k in asked)
            }
            return {peer: self._read(key) for peer, key in others.items() if self._store.check([key])}

        with underway:
            return bounded(ask, STORE_GRACE)

    def _probe(self, missing: Sequence[int]) -> None:
        """Raise where a connection has closed: the store knows nothing of a rank that died."""
        try:
            for peer in missing:
                # nobody asks for it, so that but a few bytes of Gloo's own go there
                self._open().send([torch.zeros(1, dtype=torch.uint8)], peer, PROBE)
        except RuntimeError as error:
            raise TransportError(f"ranks {missing} did not come to this call, and one is gone: {error}") from error

    def _open(self) -> Any:
        if self._backend is None:
            raise TransportError("collectives: the connections were closed")
        return self._backend

    def interrupt(self) -> None:
        backend, self._backend = self._backend, None
        if backend is None or self.world == 1:
            return
        # the only end that Gloo knows for a wait: when one runs out, all connections close, and every wait on them ends
        with contextlib.suppress(RuntimeError):
            peer = (self.rank + 1) % self.world
            backend.recv([torch.empty(1, dtype=torch.uint8)], peer, NEVER).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self._backend = None
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.shutdown()  # what is under way gets through first

    def give_up(self, note: str) -> dict[int, str]:
        notes: dict[int, str] = {}
        # the store may be gone, or its host may be stopped: then nobody can tell anything
        with contextlib.suppress(RuntimeError, TimeoutError):
            bounded(lambda: self._leave(note), STORE_GRACE)
        if self._carrier is not None:
            self._carrier.abort()  # peers may never come
            self._carrier = None
        self.close()
        with contextlib.suppress(RuntimeError, TimeoutError):
            bounded(lambda: self._collect(notes, time.monotonic() + NOTES_WAIT), STORE_GRACE)
        return dict(notes)

    def _leave(self, note: str) -> None:
        self._store.set(f"failed/{self.rank}", note)
        self._store.set(GAVE_UP, str(self.rank))

    def _collect(self, notes: dict[int, str], until: float) -> None:
        while len(notes) < self.world and time.monotonic() < until:
            for peer in set(range(self.world)) - set(notes):
                if self._store.check([f"failed/{peer}"]):
                    notes[peer] = self._read(f"failed/{peer}")
            time.sleep(0.02)


GAVE_UP = "gave up"
PROBE, NEVER = (1 << 30) + 3, (1 << 30) + 7
"""Tags that no message has: those of calls are below 2^30, and `point` leaves out every fourth. Nobody sends NEVER."""
PROBE_EVERY = 0.25
"""Seconds between two looks at the connections of ranks that are missed."""
NOTES_WAIT = 0.5
"""Seconds for the others to notice that we closed, and to write down what they saw."""
ASKED_AT_ONCE = 16
"""Peers whose place a look asks for."""
STORE_GRACE = 1.0
"""Seconds for a few words with the store. Where its host is stopped it never answers, and it knows no timeout."""

Found = TypeVar("Found")


def bounded(ask: Callable[[], Found], seconds: float) -> Found:
    """What `ask` returns, or TimeoutError after so many seconds; its thread is then left behind."""
    found: list[Found] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(ask())
        except Exception as error:  # noqa: BLE001  raised where the answer is waited for
            errors.append(error)

    asking = threading.Thread(target=run, name="narrowcast-store", daemon=True)
    asking.start()
    asking.join(seconds)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError(f"the group's store did not answer within {seconds:g} s")
    return found[0]


def _connection(group: dist.ProcessGroup, store: Any, use: str) -> Any:
    """A connection of our own to the group's store: whoever waits on one holds up all that use it. Ranks wait in that
    where they meet, and never in that for notes.
    """
    known = _CONNECTIONS.setdefault(group, {})
    if use not in known:
        known[use] = store.clone()
    return known[use]


_CONNECTIONS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]] = weakref.WeakKeyDictionary()
"""By group and use, since connecting may take seconds where names are looked up."""

_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many transports were made on each group: it names their keys in the store."""


class Subset:
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
