"""Where the wires of a call lie, and on which stream they are made.

On a CPU that is ordinary memory. On a CUDA device a channel works on a side stream of its own, which waits for the
caller's stream when a call begins, and which the caller's stream waits for when the call is waited for; the host waits
for neither. Wires then lie on the device. They travel as they are where the transport carries its memory, and else
through pinned host memory: the bytes of the wire, never the values.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from narrowcast.collectives.transports.torch import Transport

Mark = torch.cuda.Event
"""A point in the work of a stream."""


class Way(enum.Enum):
    """How wires get to the transport."""

    PLAIN = "as they are, at once"
    ROUNDS = "as they are, all of a round together, since a device's backend does one thing after another"
    STAGED = "through pinned host memory"


class Lane:
    """The calls of one channel on one device. All waiting between streams is here."""

    def __init__(self, device: torch.device, way: Way, stream: torch.cuda.Stream | None = None) -> None:
        self.device, self.way, self.stream = device, way, stream

    def wire(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory that the device copies to and from by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.stream is not None)

    def current(self) -> AbstractContextManager[object]:
        """Work goes to the side stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> Mark | None:
        """What the current stream of this thread has been given so far."""
        if self.stream is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """The side stream uses these: their memory is not given to others before it is done, whoever lets go of it."""
        if self.stream is not None:
            for tensor in tensors:
                tensor.record_stream(self.stream)

    def follow(self, caller: Mark | None) -> None:
        """The side stream waits for what the caller gave its stream before the call."""
        if self.stream is not None and caller is not None:
            self.stream.wait_event(caller)

    def join(self, done: Mark | None) -> None:
        """The current stream of this thread waits for what the side stream did."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)

    def hold(self, copied: Mark | None) -> None:
        """This thread waits: the host is about to read what the device wrote."""
        if copied is not None:
            copied.synchronize()

    def to_host(self, values: Tensor) -> tuple[Tensor, Mark | None]:
        """A pinned copy, and when it is there; on the host the tensor itself."""
        if self is HOST:
            return values, None
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self.stream is not None)
        host.copy_(values, non_blocking=True)
        return host, self.mark()

    def let(self, reduce: Callable[[Tensor], None], values: Tensor) -> None:
        """Let the backend reduce in place."""
        if self.way is not Way.STAGED:
            reduce(values)
            return
        host, copied = self.to_host(values)
        self.hold(copied)
        reduce(host)
        values.copy_(host, non_blocking=True)


HOST = Lane(torch.device("cpu"), Way.PLAIN)


class Visit:
    """One call on a lane: there from the caller's stream, and back."""

    def __init__(self, lane: Lane, tensors: Iterable[Tensor]) -> None:
        """In the caller's thread, when everything that the call reads has been given to the caller's stream."""
        self.lane, self._ready = lane, lane.mark()
        self._done: Mark | None = None
        lane.lend(tensors)

    @contextmanager
    def working(self) -> Iterator[None]:
        """In the thread that does the work."""
        with self.lane.current():
            self.lane.follow(self._ready)
            try:
                yield
            finally:
                self._done = self.lane.mark()

    def join(self) -> None:
        self.lane.join(self._done)

    def is_over(self) -> bool:
        return self._done is None or self._done.query()


LANES: weakref.WeakKeyDictionary[Transport, dict[torch.device, Lane]] = weakref.WeakKeyDictionary()
"""Of each transport, so of each channel."""


def lane_of(transport: Transport, device: torch.device) -> Lane:
    """The lane of a channel's calls on a device; a stream is made at the first one."""
    known = LANES.setdefault(transport, {})
    if device not in known:
        known[device] = HOST if device.type == "cpu" else _on_device(transport, device)
    return known[device]


def _on_device(transport: Transport, device: torch.device) -> Lane:
    way = Way.ROUNDS if transport.carries(device) else Way.STAGED
    return Lane(device, way, torch.cuda.Stream(device))
