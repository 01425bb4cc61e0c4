"""torch.distributed as a transport: Gloo for host memory, NCCL for that of a device."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.collectives.transports.base import Parcel, Pending, TransportError, backend_errors
from narrowcast.collectives.transports.several import Together, agree_on_connections, connections_of, shares


class Message:
    """One that a backend of torch carries."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransportError(str(error)) from error


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
        # attaching is collective, so all ranks count alike
        number = _MADE[chosen] = _MADE.get(chosen, 0) + 1
        store, prefix = dist.distributed_c10d._get_process_group_store(chosen), f"narrowcast/{number}"
        # to meet is to wait, and with us whoever else uses the connection
        own = {use: _connection(chosen, store, use) for use in ("meeting", "notes")}
        self._has_nccl = _has_nccl(chosen)
        self._timeout = timeout or _group_timeout(group)
        self.rank, self.world = dist.get_rank(chosen), dist.get_world_size(chosen)
        self._connect(own["meeting"], own["notes"], prefix, connections_of(chosen))

    @classmethod
    def on_store(cls, store: Any, rank: int, world: int, timeout: timedelta) -> TorchTransport:
        """For ranks that are in no group of torch's, such as members that come and go: they meet in a store of theirs,
        which nobody else uses. Host memory only.
        """
        made = cls.__new__(cls)
        made._has_nccl, made._timeout, made.rank, made.world = False, timeout, rank, world
        made._connect(store, store.clone(), "narrowcast", 1)
        return made

    def _connect(self, meeting_store: Any, notes_store: Any, prefix: str, count: int) -> None:
        meeting = dist.PrefixStore(prefix, meeting_store)  # type: ignore[attr-defined]
        agree_on_connections(meeting, self.rank, self.world, count, self._timeout)
        self._backend: Any
        self._others: list[Any]
        """More connections to the same ranks, which carry shares of large messages."""
        self._backend, *self._others = self._gloo_backends(meeting, count)
        self._meeting: Any = meeting
        self._carrier: Any = None
        self._lines: dict[tuple[int, int], Any] = {}
        """Of device messages between two ranks, by source and target: NCCL does all of one connection in one order."""
        self._store: Any = dist.PrefixStore(prefix, notes_store)  # type: ignore[attr-defined]
        self._shared, self._asked = 0, 0

    def _gloo_backends(self, meeting: Any, count: int) -> list[Any]:
        """Once all ranks have them. Gloo lets a rank go on whose peers still connect; were it to fail and close, they
        could not, nor say why. And on a busy machine connecting may fail (connectFullMesh): then all try again.
        """
        keys = [f"connected/{peer}" for peer in range(self.world)]
        faults: list[str] = []
        for attempt in range(CONNECT_TRIES):
            store, made, fault = dist.PrefixStore(f"try/{attempt}", meeting), list[Any](), ""  # type: ignore[attr-defined]
            try:
                for number in range(count):
                    own = dist.PrefixStore(f"connection/{number}", store)  # type: ignore[attr-defined]
                    made.append(dist.ProcessGroupGloo(own, self.rank, self.world, self._timeout))
            except RuntimeError as error:
                fault = str(error)
            store.set(keys[self.rank], fault)
            store.wait(keys, self._timeout)
            faults = [text.decode(errors="replace") for text in store.multi_get(keys)]
            if not any(faults):
                return made
        said = "; ".join(f"rank {peer}: {fault}" for peer, fault in enumerate(faults) if fault)
        raise TransportError(f"ranks could not connect in {CONNECT_TRIES} tries: {said}")

    def isend(self, wire: Tensor, peer: int, tag: int) -> Pending:
        return self._begin("send", wire, peer, tag)

    def irecv(self, wire: Tensor, peer: int, tag: int) -> Pending:
        return self._begin("recv", wire, peer, tag)

    def _begin(self, do: str, wire: Tensor, peer: int, tag: int) -> Pending:
        parts = shares(wire, 1 + len(self._others))
        TorchTransport.messages += len(parts) * (do == "send")
        # no variable for the backend, here and below: an error keeps the frames that it passed, and with one of them
        # the connections, which peers are to see closed
        try:
            first = Message(getattr(self._open(), do)([parts[0]], peer, tag))
            if len(parts) == 1:
                return first
            others = enumerate(parts[1:])
            return Together([first, *(Message(getattr(self._others[n], do)([part], peer, tag)) for n, part in others)])
        except (RuntimeError, IndexError) as error:
            raise TransportError(str(error)) from error

    def carries(self, device: torch.device) -> bool:
        return device.type == "cuda" and self._has_nccl

    def _nccl(self) -> Any:
        """Made at its first use; NCCL itself connects all ranks in the first call, which all take part in."""
        self._open()
        if self._carrier is None:
            self._carrier = self._new_nccl(self._meeting, "nccl", self.rank, self.world)
        return self._carrier

    def _new_nccl(self, store: Any, prefix: str, rank: int, world: int) -> Any:
        # what has arrived is summed, and what is summed sent on, before a computation that can wait
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(dist.PrefixStore(prefix, store), rank, world, options)  # type: ignore[attr-defined]

    def carry(self, wire: Tensor, source: int, target: int) -> Pending:
        sends = source == self.rank
        with backend_errors:
            self._open()
            if (source, target) not in self._lines:
                # the target waits in the store for what the source writes there: on one connection for all lines two
                # ranks that send to each other would each hold up what the other waits for
                own = self._meeting.clone()
                self._lines[source, target] = self._new_nccl(own, f"nccl/{source}/{target}", int(not sends), 2)
            line = self._lines[source, target]
            return Message(line.send([wire], 1, 0) if sends else line.recv([wire], 0, 0))

    def swap(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        with backend_errors:
            backend = self._nccl()
            backend._start_coalescing()
            for wire, peer in receives:
                backend.recv([wire], peer, 0)
            for wire, peer in sends:
                backend.send([wire], peer, 0)
            return Message(backend._end_coalescing())

    def all_to_all(self, arriving: Tensor, leaving: Tensor) -> Pending:
        with backend_errors:
            return Message(self._nccl().alltoall_base(arriving, leaving, [], []))

    def all_gather(self, rows: Tensor, row: Tensor) -> Pending:
        with backend_errors:
            return Message(self._nccl()._allgather_base(rows, row))

    def max_(self, values: Tensor) -> None:
        self._reduce(values, dist.ReduceOp.MAX)

    def sum_(self, values: Tensor) -> None:
        self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: Tensor, op: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        with backend_errors:
            (self._nccl() if values.is_cuda else self._open()).allreduce([values], options).wait()

    def share(self, text: str) -> list[str]:
        number, self._shared = self._shared, self._shared + 1
        with backend_errors:
            return ask_within(lambda: self._share(number, text), self._timeout.total_seconds() + STORE_GRACE)

    def _share(self, number: int, text: str) -> list[str]:
        self._store.set(f"call/{number}/{self.rank}", text)
        keys = [f"call/{number}/{peer}" for peer in range(self.world)]
        pause, began = 0.0005, time.monotonic()
        until, probe_at = began + self._timeout.total_seconds(), began + PROBE_EVERY
        # no store.wait: a rank that gives up must be heard while we wait
        while not self._store.check(keys):
            # before the keys: who gives up over this very call, since ranks differ in it, saw all of them come to it
            gave_up = self._store.check([GAVE_UP])
            missing = [peer for peer, key in enumerate(keys) if not self._store.check([key])]
            if not missing:
                break
            if gave_up:
                if self._backend is not None:
                    self._probe(missing)  # who is gone says more than who noticed it first
                raise TransportError(f"ranks {missing} did not come to this call, and one gave up")
            if time.monotonic() > until:
                raise TimeoutError(f"ranks {missing} made no such call within {self._timeout}")
            if time.monotonic() > probe_at:
                self._probe(missing)
                probe_at = time.monotonic() + PROBE_EVERY
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
        texts = [self._read(key) for key in keys]
        # whoever is here has read all of the time before
        if number:
            with contextlib.suppress(RuntimeError):  # a store that cannot is a store that grows
                self._store.delete_key(f"call/{number - 1}/{self.rank}")
        return texts

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

        with backend_errors:
            return ask_within(ask, STORE_GRACE)

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
        others, self._others = self._others, []
        for closing in (backend, *others):
            with contextlib.suppress(RuntimeError):
                peer = (self.rank + 1) % self.world
                closing.recv([torch.empty(1, dtype=torch.uint8)], peer, NEVER).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self._backend, self._others = None, []
        for carrier in self._carriers():
            carrier.shutdown()  # what is under way gets through first

    def _carriers(self) -> list[Any]:
        """All connections of NCCL, which are no longer ours."""
        carriers = [*self._lines.values()] if self._carrier is None else [self._carrier, *self._lines.values()]
        self._carrier, self._lines = None, {}
        return carriers

    def give_up(self, note: str) -> dict[int, str]:
        notes: dict[int, str] = {}
        # the store may be gone, or its host may be stopped: then nobody can tell anything
        with contextlib.suppress(RuntimeError, TimeoutError):
            ask_within(lambda: self._leave(note), STORE_GRACE)
        for carrier in self._carriers():
            carrier.abort()  # peers may never come
        self.close()
        with contextlib.suppress(RuntimeError, TimeoutError):
            ask_within(lambda: self._collect(notes, time.monotonic() + NOTES_WAIT), STORE_GRACE)
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


CONNECT_TRIES = 3
GAVE_UP = "gave up"
PROBE, NEVER = (1 << 30) + 3, (1 << 30) + 7
"""Tags that no message has: those of calls are below 2^30, and `p2p` leaves out every fourth. Nobody sends NEVER."""
PROBE_EVERY = 0.25
"""Seconds between two looks at the connections of ranks that are missed."""
NOTES_WAIT = 0.5
"""Seconds for the others to notice that we closed, and to write down what they saw."""
ASKED_AT_ONCE = 16
"""Peers whose place a look asks for."""
STORE_GRACE = 1.0
"""Seconds for a few words with the store. Where its host is stopped it never answers, and it knows no timeout."""

Answer = TypeVar("Answer")


def ask_within(ask: Callable[[], Answer], seconds: float) -> Answer:
    """What `ask` returns, or TimeoutError after so many seconds; its thread is then left behind."""
    answers: list[Answer] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # noqa: BLE001  raised where the answer is waited for
            errors.append(error)

    asking = threading.Thread(target=run, name="narrowcast-store", daemon=True)
    asking.start()
    asking.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"the group's store did not answer within {seconds:g} s")
    return answers[0]


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


def check_group(group: dist.ProcessGroup) -> None:
    """Refuse one that was destroyed: whoever still holds it could go on, on connections that nobody closes."""
    if group not in dist.distributed_c10d._world.pg_map:
        raise ValueError("collectives: the group was destroyed (destroy_process_group); make a new one")


def _group_timeout(group: dist.ProcessGroup | None) -> timedelta:
    """The timeout of a user's group: ours takes it over."""
    chosen = group or dist.group.WORLD
    for device in ("cpu", "cuda"):
        try:
            timeout = chosen._get_backend(torch.device(device)).options._timeout  # type: ignore[union-attr]
        except (RuntimeError, AttributeError):
            continue
        if isinstance(timeout, timedelta):
            return timeout
    return timedelta(minutes=30)


def _has_nccl(group: dist.ProcessGroup) -> bool:
    """Whether NCCL moves the CUDA tensors of a group."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return False
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # none for CUDA tensors
        return False
    return isinstance(backend, dist.ProcessGroupNCCL)
