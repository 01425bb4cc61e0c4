"""A channel: one group's own transport, and threads that start its calls in order, so that all ranks agree on it."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from narrowcast.collectives.agreement import DisagreementError, Failure, Signature, agree, explained, written
from narrowcast.collectives.exchange import Exchange
from narrowcast.collectives.memory import Extents, extents, overlap
from narrowcast.collectives.point import Lines
from narrowcast.collectives.transport import TorchTransport, Transport
from narrowcast.collectives.work import Work

Job = Callable[[Exchange], None]


THREADS = 2
"""One call ends while the next begins."""


class BrokenChannelError(RuntimeError):
    """An earlier call failed, so ranks may be out of step."""


@dataclass
class _Item:
    text: str
    job: Job
    work: Work
    uses: Extents


class _Turn:
    """The right to send, which a call gives on once: when all is sent, or at its end."""

    def __init__(self, turn: threading.Semaphore) -> None:
        self._turn: threading.Semaphore | None = turn

    def end(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.release()


class Channel:
    """Calls on one transport, first in first out. After a failure every further call raises at once.

    A call begins when the one before is over, or has said that all it sends is on its way: the next one's first bytes
    are then made while the last ones travel, and the link does not rest between two calls. Where both use the same
    memory it waits for the end, since what it is to read is still being written.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.lines = Lines(lambda error: self._give_up(0, "{}", error), self._refusal)
        """Messages from rank to rank, which have no place among the calls."""
        self._calls = 0
        self._kinds: dict[str, int] = {}
        self._broken: BaseException | None = None
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._turn = threading.Semaphore()
        """Held by the thread whose call may still send."""
        self._underway: list[tuple[threading.Event, Extents]] = []
        """The calls that had their turn and are not over; only the thread whose turn it is looks."""
        self._failing = threading.Lock()
        self._notes: dict[int, str] | None = None
        _OPEN.add(self)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world(self) -> int:
        return self.transport.world

    def submit(self, signature: Signature, job: Job, work: Work | None = None, tensors: Sequence[Tensor] = ()) -> Work:
        """Run `job` after everything submitted before; every rank must submit the same in the same order.

        tensors: what it reads and writes of memory that other calls may use.
        """
        work = work or Work()
        item = _Item(written(signature), job, work, extents(tensors))
        with self._starting:
            if not self._threads:
                self._threads = self._started()
            self._queue.put(item)
        return work

    def _started(self) -> list[threading.Thread]:
        count = THREADS if self.transport.shared_by_threads else 1
        made = [threading.Thread(target=self._loop, name="narrowcast-channel", daemon=True) for _ in range(count)]
        for thread in made:
            thread.start()
        return made

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Everyone's small tensor, by rank: same type and size everywhere."""
        found: list[Tensor] = []
        signature = {"call": "gather", "numel": mine.numel(), "dtype": str(mine.dtype)}
        self.submit(signature, lambda exchange: found.extend(exchange.gather(mine, 0)), tensors=[mine]).wait()
        return found

    def fail(self, error: BaseException) -> None:
        """For a caller that cannot make the call that the others make: they hear of it at once, unless they know."""
        failure = Failure(self._calls + 1, "{}", f"{type(error).__name__}: {error}", own=True)
        with self._failing:
            if self._broken is None:
                self._broken = error
                self._notes = self.transport.give_up(failure.written())

    def _loop(self) -> None:
        while True:
            self._turn.acquire()
            item = self._queue.get()
            if item is None:
                self._turn.release()
                return
            turn = _Turn(self._turn)
            self._await_memory(item)
            try:
                error = self._run(item, turn)
            finally:
                turn.end()
            item.work.complete(error)
            del item  # and with it the tensors of the call

    def _await_memory(self, item: _Item) -> None:
        """Wait for the calls before that may still write what this one uses. They have all sent, and need no turn."""
        for over, uses in self._underway:
            if overlap(uses, item.uses):
                over.wait()
        self._underway = [(over, uses) for over, uses in self._underway if not over.is_set()]
        self._underway.append((item.work.over, item.uses))

    def _run(self, item: _Item, turn: _Turn) -> BaseException | None:
        """Run one call; None, or what went wrong. A disagreement, found before anything moved, leaves us usable."""
        refusal = self._refusal()
        if refusal is not None:
            return refusal
        self._calls += 1
        number = self._calls
        try:
            if item.text not in self._kinds:
                agree(self.transport, item.text)
                # agreements happen in the same order everywhere, so a kind has one number on all ranks
                self._kinds[item.text] = len(self._kinds)
            exchange = Exchange(self.transport, number, self._kinds[item.text], pass_on=turn.end)
            item.job(exchange)
        except DisagreementError as error:
            return error
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs to the caller
            return self._give_up(number, item.text, error)
        item.work.sent_bytes = exchange.sent_bytes
        return None

    def _refusal(self) -> BaseException | None:
        """Why nothing can be called any more, if so."""
        if self._broken is None:
            return None
        return BrokenChannelError(f"an earlier collective failed ({self._broken}); make a new group and attach again")

    def _give_up(self, number: int, text: str, error: BaseException) -> BaseException:
        """Let the peers know at once, since they would wait for their timeout otherwise; find out what they saw."""
        failure = Failure.of(number, text, error)
        with self._failing:  # of two calls under way the first to fail speaks for both
            if self._notes is None:
                self._broken = self._broken or error
                self._notes = self.transport.give_up(failure.written())
        found = error if failure.own else explained(error, self._notes)
        if found is not error:
            found.__cause__ = error
        return found

    def close(self, timeout: timedelta = timedelta(seconds=5)) -> None:
        """End the threads and the transport; calls that are queued still run, for so long."""
        _end_threads([self], timeout.total_seconds())
        if self._broken is None:
            self._broken = BrokenChannelError("the channel was closed")
            self.transport.close()

    def stop(self) -> list[threading.Thread]:
        """Ask the threads to end after what is queued; which those are."""
        with self._starting:
            calls, self._threads = self._threads, []
            for _ in calls:
                self._queue.put(None)
        return [*calls, *self.lines.threads()]


def _end_threads(channels: Sequence[Channel], seconds: float) -> None:
    """Let calls under way come to their end for so long, and then interrupt them."""
    threads, until = {channel: channel.stop() for channel in channels}, time.monotonic() + seconds
    stuck = [channel for channel in channels if not _ended(threads[channel], until)]
    for channel in stuck:
        channel.transport.interrupt()
    until = time.monotonic() + LAST_WORDS
    for channel in stuck:
        _ended(threads[channel], until)


LAST_WORDS = 3.0
"""Seconds for a thread that was interrupted to tell the other ranks, through a store that may be gone."""


def _ended(threads: Sequence[threading.Thread], until: float) -> bool:
    """Whether they have all ended by then."""
    # the last reference to a group may go, and with it the channel be closed, in a thread of the channel itself
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(until - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in others)


_OPEN: weakref.WeakSet[Channel] = weakref.WeakSet()

EXIT_GRACE = 2.0
"""Seconds that a process which ends gives to the calls that nobody waited for."""


@atexit.register
def _at_exit() -> None:
    """A thread that comes back from a backend while the interpreter is taken down would end the process by SIGABRT."""
    _end_threads(list(_OPEN), EXIT_GRACE)


_CHANNELS: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()

_MAKING: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()
"""One lock for each group: to make a channel is to wait for the group's other ranks."""
_LOOKING = threading.Lock()


def channel_of(group: dist.ProcessGroup | None) -> Channel:
    """The channel of a group, made at its first use; a collective operation then."""
    if not dist.is_initialized():
        raise RuntimeError("collectives: no process group; call torch.distributed.init_process_group first")
    chosen = group or dist.group.WORLD
    assert chosen is not None
    if not isinstance(chosen, dist.ProcessGroup):
        raise ValueError("collectives: this rank is no member of the group; only its members may call")
    with _LOOKING:
        making = _MAKING.setdefault(chosen, threading.Lock())
    with making:
        found = _CHANNELS.get(chosen)
        if found is None:
            found = _CHANNELS[chosen] = Channel(TorchTransport(chosen))
            # the thread would outlive the group otherwise; where the process ends first, _at_exit sees to it
            weakref.finalize(chosen, found.close).atexit = False
    return found
