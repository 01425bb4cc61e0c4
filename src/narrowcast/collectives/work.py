"""A collective under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

from narrowcast.collectives.runtime.streams import StreamScope


class Work:
    """What `async_op=True` returns: `wait()` until the result is there, or raise what went wrong.

    On a CUDA device the current stream waits for the result, as with torch's own Work; this thread waits only until the
    call has been given to the device.
    """

    def __init__(self, scope: StreamScope | None = None) -> None:
        self.scope = scope
        self.over = threading.Event()
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
            with nullcontext() if self.scope is None else self.scope.stream.current():
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
