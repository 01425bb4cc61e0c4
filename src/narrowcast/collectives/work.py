"""A collective under way: what its caller holds, what its channel does, and which memory it uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.runtime.streams import NOTHING, DeviceStream, StreamScope

if TYPE_CHECKING:
    from narrowcast.collectives.runtime.channel import Channel


class _Flag(threading.Event):
    """An event that nobody waits for: an ordinary one takes Python ten calls."""

    _is_set = False

    def __init__(self) -> None: ...

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            raise RuntimeError("internal: this call is run by its caller, and nobody can wait for it before")
        return True


class Work:
    """What `async_op=True` returns: `wait()` until the result is there, or raise what went wrong.

    On a CUDA device the current stream waits for the result, as with torch's own Work; this thread waits only until the
    call has been given to the device.
    """

    def __init__(self, scope: StreamScope | None = None, *, at_once: bool = False) -> None:
        """at_once: it is over before anybody gets it."""
        self.scope = scope
        self.over = _Flag() if at_once else threading.Event()
        """Set when the channel has done with it. Whoever waits for that alone keeps no tensor alive."""
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Work], None]] = []
        self._lock = threading.Lock()
        self.sent_bytes = 0

    def is_completed(self) -> bool:
        return self.over.is_set() and (self.scope is None or self.scope.is_over())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done; raises the error of the call. May be called any number of times."""
        if not self.over.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError(f"collective: not done after {timeout}; it goes on, wait again or give up the group")
        if self._error is not None:
            raise self._error
        if self.scope is not None:
            self.scope.join()
        return True

    def join(self) -> None:
        """Block until done, whatever came of it."""
        self.over.wait()

    def exception(self) -> BaseException | None:
        return self._error

    def then(self, callback: Callable[[Work], None]) -> None:
        """Call back when done, from the thread that did the work, or now. The current stream is then that of the work.

        What a callback raises goes to `threading.excepthook`: it is nobody else's fault, neither the call's nor that of
        the callbacks after it.
        """
        with self._lock:
            if not self.over.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def _call(self, callback: Callable[[Work], None]) -> None:
        try:
            with NOTHING if self.scope is None else self.scope.stream.current():
                callback(self)
        except BaseException as error:
            # in the main thread it is the user's, and not from the callback
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            report = (type(error), error, error.__traceback__, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(report))

    def complete(self, error: BaseException | None = None) -> None:
        """For the channel: mark as done and call back."""
        with self._lock:
            self._error = error
            self.over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)


Extents = list[tuple[int, int]]
"""The addresses from the first byte that is used to the last, by storage, rising. Storages may share memory: views that
were made outside of torch have one each.
"""


def extents(tensors: Iterable[Tensor]) -> Extents:
    """The memory of these tensors. What lies between the parts of a storage counts as used."""
    spans: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if tensor.numel():
            storage, low = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
            high = low + _reach(tensor) * tensor.itemsize
            begin, end = spans.get(storage, (low, high))
            spans[storage] = min(begin, low), max(end, high)
    return sorted(spans.values())


def _reach(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def overlap(one: Extents, other: Extents) -> bool:
    return any(low < end and begin < high for low, high in one for begin, end in other)


@dataclass
class ChannelCall:
    """A call that was submitted: what ranks compare, what it does, and what it uses."""

    channel: Channel
    """Alive as long as one of its calls is: the threads themselves do not hold it."""
    text: str
    run: Callable[[Exchange], None]
    work: Work
    uses: Extents
    stream: DeviceStream
    inference: bool
    """Inference mode is each thread's own: what the caller may write, the channel's thread must be allowed to."""
    turn: threading.Semaphore | None = None
    """The right to send, where a thread of the channel has it for this call."""

    def end_turn(self) -> None:
        """Give on the right to send, once: when all is sent, or at the call's end."""
        turn, self.turn = self.turn, None
        if turn is not None:
            turn.release()

    def perform(self, exchange: Exchange) -> None:
        """In whatever thread has the turn."""
        if self.inference and not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                self.perform(exchange)
            return
        with self.work.scope or NOTHING:
            self.run(exchange)
        self.work.sent_bytes = exchange.sent_bytes
