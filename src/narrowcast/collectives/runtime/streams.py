"""Where the wires of a call lie, and on which stream they are made.

On a CPU that is ordinary memory. On a CUDA device a channel works on a side stream of its own, which waits for the
caller's stream when a call begins, and which the caller's stream waits for when the call is waited for; the host waits
for neither. Wires then lie on the device. They travel as they are where the transport carries its memory, and else
through pinned host memory: the bytes of the wire, never the values.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

Job = TypeVar("Job")
Result = TypeVar("Result")
NOTHING = nullcontext()
"""For all that want none: it keeps nothing, and may be entered any number of times."""


class Way(enum.Enum):
    """How wires get to the transport."""

    PLAIN = "as they are, at once"
    ROUNDS = "as they are, all of a round together, since a device's backend does one thing after another"
    STAGED = "through pinned host memory"


class DeviceStream:
    """The calls of one channel on one device, and their side stream there. All waiting between streams is here."""

    def __init__(self, device: torch.device, way: Way, side: torch.cuda.Stream | None = None) -> None:
        self.device, self.way, self.side = device, way, side
        self.known: set[str] = set()
        """Signatures of calls that have run here: their ranks agree, and the device's backend is connected."""

    def another(self) -> DeviceStream:
        """Of the same device, kind and way, for what must not wait in line with this one."""
        side = None if self.side is None else torch.cuda.Stream(self.device, priority=self.side.priority)
        return type(self)(self.device, self.way, side)

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory that the device copies to and from by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.side is not None)

    def current(self) -> AbstractContextManager[object]:
        """Work goes to the side stream."""
        return NOTHING if self.side is None else torch.cuda.stream(self.side)

    def record(self) -> torch.cuda.Event | None:
        """What the current stream of this thread has been given so far."""
        return None if self.side is None else torch.cuda.current_stream(self.device).record_event()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """The side stream uses these: their memory is not given to others before it is done, whoever lets go of it."""
        if self.side is not None:
            for tensor in tensors:
                tensor.record_stream(self.side)

    def follow(self, caller: torch.cuda.Event | None) -> None:
        """The side stream waits for what the caller gave its stream before the call."""
        if self.side is not None and caller is not None:
            self.side.wait_event(caller)

    def join(self, done: torch.cuda.Event) -> None:
        """The current stream of this thread waits for what the side stream did."""
        torch.cuda.current_stream(self.device).wait_event(done)

    def synchronize(self, copied: torch.cuda.Event | None) -> None:
        """This thread waits: the host is about to read what the device wrote."""
        if copied is not None:
            copied.synchronize()

    def to_host(self, values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """A pinned copy, and when it is there; on the host the tensor itself."""
        if self is HOST:
            return values, None
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self.side is not None)
        host.copy_(values, non_blocking=True)
        return host, self.record()

    def reduce_in_place(self, reduce: Callable[[Tensor], None], values: Tensor) -> None:
        """Let the backend reduce, where the values are or in a copy on the host."""
        if self.way is not Way.STAGED:
            reduce(values)
            return
        host, copied = self.to_host(values)
        self.synchronize(copied)
        reduce(host)
        values.copy_(host, non_blocking=True)


HOST = DeviceStream(torch.device("cpu"), Way.PLAIN)


class StreamScope:
    """One call on a side stream: there from the caller's stream, and back."""

    def __init__(self, stream: DeviceStream, tensors: Iterable[Tensor]) -> None:
        """In the caller's thread, when everything that the call reads has been given to the caller's stream."""
        self.stream, self._ready = stream, stream.record()
        self._done: torch.cuda.Event | None = None
        self._current: AbstractContextManager[object] = NOTHING
        stream.keep(tensors)

    def __enter__(self) -> None:
        """In the thread that does the work: it goes to the side stream."""
        if self.stream.side is None:
            return
        self._current = self.stream.current()
        self._current.__enter__()
        try:
            self.stream.follow(self._ready)
        except BaseException:
            self._current.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> None:
        if self.stream.side is None:
            return
        try:
            self._done = self.stream.side.record_event()
        finally:
            self._current.__exit__(*error)

    def join(self) -> None:
        """The caller's stream waits for the call."""
        if self._done is not None:
            self.stream.join(self._done)

    def is_over(self) -> bool:
        return self._done is None or self._done.query()


def without_autocast(device: str, run: Callable[[Job], Result], job: Job) -> Result:
    """As it is in a thread of the channel: what the caller casts its own computation to changes no bit of a call."""
    if not torch.is_autocast_enabled(device):
        return run(job)
    with torch.autocast(device, enabled=False):
        return run(job)
