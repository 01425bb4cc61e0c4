"""Calls that take long: are all ranks in the same one? Ranks that wait for each other would learn it by a timeout only.

A rank that is late is no fault. A rank that is in another call at the same number is: calls of a channel have the same
signatures in the same order everywhere, so that neither will ever come to the other's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from narrowcast.collectives.runtime.agreement import DisagreementError, Failure, different_calls, name_of
from narrowcast.collectives.transports.base import Transport

log = logging.getLogger("narrowcast")

PATIENCE, EVERY = 2.0, 0.5
"""Seconds after which a call is looked after, and between two looks."""
REMEMBERED = 64
"""Calls whose signatures are kept, so that a rank that went on can still tell another that it is in the wrong one."""
BY_HAND = ("state_dict", "check_ranks")
"""What users call themselves, and easily on one rank alone."""


@dataclass
class StartedCall:
    """A call that a channel began."""

    number: int
    text: str
    over: threading.Event
    since: float
    warned: bool = False
    """Whether the user has been told that it waits: once a call, whatever other channels do."""


class WatchedChannel(Protocol):
    """A channel, as much of it as is looked at."""

    transport: Transport
    started: deque[StartedCall]

    def part(self, error: DisagreementError) -> None:
        """End what is under way with this error."""


def look(channel: WatchedChannel) -> None:
    """Where the first call under way takes long: leave in which one we are, and part where a peer is in another."""
    started = list(channel.started)
    waiting = next((call for call in started if not call.over.is_set()), None)
    if waiting is None or time.monotonic() - waiting.since < PATIENCE:
        return
    place = Failure(waiting.number, waiting.text, "", own=False)
    ours = {call.number: call.text for call in started}
    for rank, note in channel.transport.tell(place.to_text()).items():
        with contextlib.suppress(ValueError):
            theirs = Failure.read(note)
            if ours.get(theirs.call, theirs.text) != theirs.text:
                channel.part(different_calls({channel.transport.rank: ours[theirs.call], rank: theirs.text}))
                return
    _warn_once(waiting)


def _warn_once(call: StartedCall) -> None:
    """Ranks that are missed may be late, or in a collective of torch's: nobody can tell, so the user is told."""
    name = name_of(call.text)
    if name in BY_HAND and not call.warned:
        call.warned = True
        log.warning("%s waits for other ranks: it is collective, so call it on every rank", name)


class Watchdog:
    """The thread of a process that looks. It starts with the first channel that has calls."""

    def __init__(self, channels: Callable[[], Iterable[WatchedChannel]]) -> None:
        self._channels, self._lock, self._end = channels, threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._deaf: weakref.WeakKeyDictionary[Transport, tuple[float, float]] = weakref.WeakKeyDictionary()
        """Those whose store did not answer, as one may not on a busy machine: when they are looked at again, and how
        long that was put off. Ever longer, since each look leaves a thread behind."""

    def start(self) -> None:
        with self._lock:
            # after a fork the child has the object and not the thread
            if self._thread is None or not self._thread.is_alive():
                self._end.clear()
                self._thread = threading.Thread(target=self._run, name="narrowcast-watchdog", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(2 * PATIENCE)

    def _run(self) -> None:
        while not self._end.wait(EVERY):
            self._look_at_all()

    def _look_at_all(self) -> None:
        """Apart, so that this thread holds no channel while it waits."""
        for channel in self._channels():
            again, _ = self._deaf.get(channel.transport, (0.0, 0.0))
            if time.monotonic() >= again:
                self._look(channel)

    def _look(self, channel: WatchedChannel) -> None:
        _, pause = self._deaf.get(channel.transport, (0.0, EVERY))
        try:
            look(channel)
        except Exception:  # noqa: BLE001  a store that is gone: the call itself ends by its timeout
            self._deaf[channel.transport] = time.monotonic() + 2 * pause, 2 * pause
        else:
            self._deaf.pop(channel.transport, None)
