"""Several ranks as threads of one process, over a transport that does everything late and on a stream of its own.

On a CUDA device each rank has a caller's stream, the side stream of its channel, and a stream of the transport. Every
round waits behind `torch.cuda._sleep`, as do the values that a call is given: whoever does not wait reads what is not
yet there. Rounds follow NCCL's rules: one after another, no tags, a round ends when all its messages have arrived. On a
CPU there are no streams, but the rules and the lateness are the same.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.runtime.streams import DeviceStream, Way
from narrowcast.collectives.transports.base import Parcel, RowsBySwap

CYCLES = 2_000_000
"""About a millisecond on a GPU. The tests of these tests take more: threads of Python may take as long themselves."""
PATIENCE = 60.0
"""Seconds until a rank that waits for a message is taken for stuck."""


class Hub:
    """What lies between the ranks: a queue for each pair and purpose."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._queues: defaultdict[Hashable, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()
        self.given_up = threading.Event()

    def _queue(self, key: Hashable) -> queue.SimpleQueue[Any]:
        with self._lock:
            return self._queues[key]

    def put(self, key: Hashable, what: Any) -> None:
        self._queue(key).put(what)

    def get(self, key: Hashable) -> Any:
        line, until = self._queue(key), time.monotonic() + PATIENCE
        while line.empty():
            if self.given_up.is_set():
                raise RuntimeError(f"{key}: another rank gave up")
            if time.monotonic() > until:
                raise TimeoutError(f"nothing came for {key}")
            time.sleep(0.0002)
        return line.get()


class Sent:
    def wait(self) -> None: ...


class Host:
    """A message to host memory. What the current stream of whoever waits gets to do next is late, too."""

    def __init__(self, hub: Hub, key: Hashable, wire: Tensor, device: torch.device) -> None:
        self._hub, self._key, self._wire, self._device = hub, key, wire, device

    def wait(self) -> None:
        self._wire.copy_(self._hub.get(self._key))
        if self._device.type == "cuda":
            torch.cuda._sleep(CYCLES)


class Round:
    """One round of a rank, done by the transport's thread."""

    def __init__(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], device: torch.device, careful: bool
    ) -> None:
        self.sends, self.receives, self.device, self._careful = list(sends), list(receives), device, careful
        self.ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self.done: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self.finished = threading.Event()

    def wait(self) -> None:
        if not self._careful and self.ready is None:
            return  # without streams there is nothing else to leave out
        if not self.finished.wait(2 * PATIENCE):
            raise TimeoutError("a round did not end")
        if self.error is not None:
            raise self.error
        if self.done is not None and self._careful:
            torch.cuda.current_stream(self.device).wait_event(self.done)


class Rounds:
    """Rounds of a rank that are done one after another, each of them late. name: apart from those of other orders."""

    def __init__(self, hub: Hub, rank: int, device: torch.device, careful: bool, name: str) -> None:
        self._hub, self._rank, self._device, self._careful, self._name = hub, rank, device, careful, name
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._rounds: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def start(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Round:
        one = Round(sends, receives, self._device, self._careful)
        self._rounds.put(one)
        return one

    def _loop(self) -> None:
        while (one := self._rounds.get()) is not None:
            try:
                with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    self._do(one)
            except BaseException as error:  # noqa: BLE001  raised where the round is waited for
                one.error = error
                self._hub.given_up.set()
            one.finished.set()

    def _do(self, one: Round) -> None:
        self._late(one.ready)
        for wire, peer in one.sends:
            self._hub.put((self._name, self._rank, peer), (wire, self._mark()))
        for wire, peer in one.receives:
            theirs, there = self._hub.get((self._name, peer, self._rank))
            if theirs.shape != wire.shape:
                raise RuntimeError(f"rank {peer} sent {theirs.numel()} bytes, rank {self._rank} expects {wire.numel()}")
            self._follow(there)
            wire.copy_(theirs)
            self._hub.put((f"{self._name} taken", self._rank, peer), self._mark())
        for _, peer in one.sends:
            self._follow(self._hub.get((f"{self._name} taken", peer, self._rank)))
        one.done = self._mark()

    def _late(self, ready: torch.cuda.Event | None) -> None:
        if self._stream is None:
            time.sleep(0.001)
            return
        self._follow(ready)
        torch.cuda._sleep(CYCLES)

    def _mark(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def _follow(self, event: torch.cuda.Event | None) -> None:
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def close(self) -> None:
        self._rounds.put(None)
        self._thread.join(PATIENCE)


class LateTransport(RowsBySwap):
    """See the head of this file. careful=False: a round that is waited for is not waited for."""

    shared_by_threads = True

    def __init__(self, hub: Hub, rank: int, device: torch.device, careful: bool = True) -> None:
        self.hub, self.rank, self.world, self._device, self._careful = hub, rank, hub.world, device, careful
        self._rounds = Rounds(hub, rank, device, careful, "round")
        self._lines: dict[tuple[int, int], Rounds] = {}
        self._shared = 0

    def isend(self, wire: Tensor, peer: int, tag: int) -> Sent:
        assert not wire.is_cuda, "messages are in host memory"
        self.hub.put(("host", self.rank, peer, tag), wire.clone())
        return Sent()

    def irecv(self, wire: Tensor, peer: int, tag: int) -> Host:
        assert not wire.is_cuda, "messages are in host memory"
        return Host(self.hub, ("host", peer, self.rank, tag), wire, self._device)

    def share(self, text: str) -> list[str]:
        self._shared += 1
        for peer in range(self.world):
            self.hub.put(("text", self._shared, self.rank, peer), text)
        return [self.hub.get(("text", self._shared, peer, self.rank)) for peer in range(self.world)]

    def carries(self, device: torch.device) -> bool:
        return True

    def swap(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Round:
        if not sends and not receives:
            raise RuntimeError("NCCL has no work of no messages")
        return self._rounds.start(sends, receives)

    def carry(self, wire: Tensor, source: int, target: int) -> Round | Sent:
        if (source, target) not in self._lines:
            self._connect(source, target)
        line = self._lines[source, target]
        if source != self.rank:
            return line.start([], [(wire, source)])
        one = line.start([(wire, target)], [])
        # the host does not wait for what it sends
        return one if wire.is_cuda else Sent()

    def _connect(self, source: int, target: int) -> None:
        """As NCCL does: neither goes on before both are here."""
        peer = target if source == self.rank else source
        self.hub.put(("connect", source, target, self.rank), None)
        self.hub.get(("connect", source, target, peer))
        name = f"line {source} {target}"
        self._lines[source, target] = Rounds(self.hub, self.rank, self._device, self._careful, name)

    def max_(self, values: Tensor) -> None:
        values.copy_(torch.stack(self._everyones(values)).amax(dim=0))

    def sum_(self, values: Tensor) -> None:
        first, *others = self._everyones(values)
        for one in others:
            first = first + one
        values.copy_(first)

    def _everyones(self, values: Tensor) -> list[Tensor]:
        peers = [peer for peer in range(self.world) if peer != self.rank]
        theirs = {peer: torch.empty_like(values) for peer in peers}
        mine = values.clone()
        self.swap([(mine, peer) for peer in peers], [(theirs[peer], peer) for peer in peers]).wait()
        return [mine if rank == self.rank else theirs[rank] for rank in range(self.world)]

    def close(self) -> None:
        for rounds in (self._rounds, *self._lines.values()):
            rounds.close()

    def interrupt(self) -> None:
        self.hub.given_up.set()

    def give_up(self, note: str) -> dict[int, str]:
        self.hub.given_up.set()
        self.close()
        return {}


class NoFollow(DeviceStream):
    """The side stream does not wait for the caller's."""

    def follow(self, caller: object) -> None: ...


class NoJoin(DeviceStream):
    """The caller's stream does not wait for the side stream."""

    def join(self, done: object) -> None: ...


class NoSynchronize(DeviceStream):
    """The host does not wait for a copy that it reads."""

    def synchronize(self, copied: object) -> None: ...


class NoKeep(DeviceStream):
    """Memory is given away while the side stream still reads it."""

    def keep(self, tensors: object) -> None: ...


Job = Callable[[int, Channel], Any]


def run(
    world: int, device: torch.device, way: Way, job: Job, kind: type[DeviceStream] = DeviceStream, careful: bool = True
) -> list[Any]:
    """What `job(rank, channel)` returns on each rank. The channel's stream on `device` is of this kind and way."""
    hub, found, errors = Hub(world), dict[int, Any](), list[BaseException]()

    def rank_thread(rank: int) -> None:
        transport = LateTransport(hub, rank, device, careful)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        channel = Channel(transport)
        channel.streams[device] = kind(device, way, stream)
        try:
            with nullcontext() if stream is None else torch.cuda.stream(torch.cuda.Stream(device)):
                found[rank] = job(rank, channel)
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)
            hub.given_up.set()
        finally:
            channel.close()

    threads = [threading.Thread(target=rank_thread, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(world)]
