"""Calls that take long: are all ranks in the same one? Ranks that wait for each other would learn it by a timeout only.

A rank that is late is no fault. A rank that is in another call at the same number is: calls of a channel have the same
signatures in the same order everywhere, so that neither will ever come to the other's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from narrowcast.collectives.runtime.agreement import DisagreementError, Failure, parted
from narrowcast.collectives.transports.torch import Transport

log = logging.getLogger("narrowcast")

PATIENCE, EVERY = 2.0, 0.5
"""Seconds after which a call is looked after, and between two looks."""
REMEMBERED = 64
"""Calls whose signatures are kept, so that a rank that went on can still tell another that it is in the wrong one."""


@dataclass(frozen=True)
class Begun:
    """A call that a channel began."""

    number: int
    text: str
    over: threading.Event
    since: float


class Watched(Protocol):
    """A channel, as much of it as is looked at."""

    transport: Transport
    begun: deque[Begun]

    def part(self, error: DisagreementError) -> None:
        """End what is under way with this error."""


def look(channel: Watched) -> None:
    """Where the first call under way takes long: leave in which one we are, and part where a peer is in another."""
    begun = list(channel.begun)
    waiting = next((one for one in begun if not one.over.is_set()), None)
    if waiting is None or time.monotonic() - waiting.since < PATIENCE:
        return
    place = Failure(waiting.number, waiting.text, "", own=False)
    ours = {one.number: one.text for one in begun}
    for rank, note in channel.transport.tell(place.written()).items():
        with contextlib.suppress(ValueError):
            theirs = Failure.read(note)
            if ours.get(theirs.call, theirs.text) != theirs.text:
                channel.part(parted({channel.transport.rank: ours[theirs.call], rank: theirs.text}))
                return
    _say_that_it_waits(waiting)


def _say_that_it_waits(call: Begun) -> None:
    """Ranks that are missed may be late, or in a collective of torch's: nobody can tell, so the user is told once."""
    name = json.loads(call.text).get("call")
    if name in BY_HAND and call.number not in _SAID:
        _SAID.append(call.number)
        log.warning("%s waits for other ranks: it is collective, so call it on every rank", name)


BY_HAND = ("state_dict", "check_ranks")
"""What users call themselves, and easily on one rank alone."""
_SAID: deque[int] = deque(maxlen=64)


class Lookout:
    """The thread of a process that looks. It starts with the first channel that has calls."""

    def __init__(self, channels: Callable[[], Iterable[Watched]]) -> None:
        self._channels, self._lock, self._end = channels, threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._deaf: weakref.WeakSet[Transport] = weakref.WeakSet()
        """Those whose store did not answer: each look would leave a thread behind."""

    def start(self) -> None:
        with self._lock:
            # after a fork the child has the object and not the thread
            if self._thread is None or not self._thread.is_alive():
                self._end.clear()
                self._thread = threading.Thread(target=self._run, name="narrowcast-lookout", daemon=True)
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
            if channel.transport not in self._deaf:
                self._look(channel)

    def _look(self, channel: Watched) -> None:
        try:
            look(channel)
        except Exception:  # noqa: BLE001  a store that is gone: the call itself ends by its timeout
            self._deaf.add(channel.transport)
