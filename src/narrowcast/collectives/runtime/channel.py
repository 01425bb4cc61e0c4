"""A channel: one group's own transport, and threads that start its calls in order, so that all ranks agree on it."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from narrowcast.collectives.p2p import Lines
from narrowcast.collectives.runtime.agreement import DisagreementError, Failure, Signature, agree, explained, written
from narrowcast.collectives.runtime.aliasing import Extents, extents, overlap
from narrowcast.collectives.runtime.groups import check_group
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.runtime.watchdog import REMEMBERED, Begun, Lookout
from narrowcast.collectives.transports.torch import TorchTransport, Transport
from narrowcast.collectives.work import Work

Job = Callable[[Exchange], None]


THREADS = 2
"""One call ends while the next begins."""


class BrokenChannelError(RuntimeError):
    """An earlier call failed, so ranks may be out of step."""


Queue = queue.SimpleQueue["_Item | None"]


@dataclass
class _Item:
    channel: Channel
    """Alive as long as one of its calls is: the threads themselves do not hold it."""
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

    A channel that nobody holds any more, and that has no call under way, closes by itself.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.lines = Lines(_weakly(self._give_up_message), _weakly(self._refusal))
        """Messages from rank to rank, which have no place among the calls."""
        self._calls = 0
        self._kinds: dict[str, int] = {}
        self._broken: BaseException | None = None
        self.begun: deque[Begun] = deque(maxlen=REMEMBERED)
        """The last calls, for the lookout."""
        self._parted: DisagreementError | None = None
        self._queue: Queue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._turn = threading.Semaphore()
        """Held by the thread whose call may still send."""
        self._underway: list[tuple[threading.Event, Extents]] = []
        """The calls that had their turn and are not over; only the thread whose turn it is looks."""
        self._failing = threading.Lock()
        self._notes: dict[int, str] | None = None
        with _LISTING:
            _OPEN.add(self)
        # where the process ends first, _at_exit sees to it
        weakref.finalize(self, _let_go, self._queue, transport).atexit = False

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
        item = _Item(self, written(signature), job, work, extents(tensors))
        with self._starting:
            if not self._threads:
                self._threads = self._started()
            self._queue.put(item)
        return work

    def called(self, name: str) -> Channel:
        """This channel, for calls that are part of another one: `name` stands for them where ranks disagree."""
        return cast(Channel, _Called(self, name))

    def _started(self) -> list[threading.Thread]:
        count = THREADS if self.transport.shared_by_threads else 1
        task: dict[str, Any] = {"target": _loop, "args": (self._queue, self._turn), "daemon": True}
        made = [threading.Thread(name="narrowcast-channel", **task) for _ in range(count)]
        for thread in made:
            thread.start()
        _LOOKOUT.start()
        return made

    def gather(self, mine: Tensor, call: str = "gather") -> list[Tensor]:
        """Everyone's small tensor, by rank: same type and size everywhere. call: what it is in errors."""
        found: list[Tensor] = []
        signature = {"call": call, "numel": mine.numel(), "dtype": str(mine.dtype)}
        self.submit(signature, lambda exchange: found.extend(exchange.gather(mine, 0)), tensors=[mine]).wait()
        return found

    def fail(self, error: BaseException) -> None:
        """For a caller that cannot make the call that the others make: they hear of it at once, unless they know."""
        failure = Failure(self._calls + 1, "{}", f"{type(error).__name__}: {error}", own=True)
        with self._failing:
            if self._broken is None:
                self._broken = error
                self._notes = self.transport.give_up(failure.written())

    def part(self, error: DisagreementError) -> None:
        """For the lookout: another rank is in another call, and nothing of ours will come to its end."""
        self._parted = error
        self.transport.interrupt()

    def do(self, item: _Item) -> None:
        """In one of the threads, which has the turn. Whatever happens, the work comes to its end."""
        turn = _Turn(self._turn)
        try:
            self._await_memory(item)
            error = self._run(item, turn)
        except BaseException as found:  # noqa: BLE001  it belongs to whoever waits
            error = self._broken = self._broken or found
        finally:
            turn.end()
        item.work.complete(error)

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
        begun = Begun(number, item.text, item.work.over, time.monotonic())
        self.begun.append(begun)
        try:
            if item.text not in self._kinds:
                agree(self.transport, item.text)
                # agreements happen in the same order everywhere, so a kind has one number on all ranks
                self._kinds[item.text] = len(self._kinds)
            exchange = Exchange(self.transport, number, self._kinds[item.text], pass_on=turn.end)
            item.job(exchange)
        except DisagreementError as error:
            # told: who differs at this number goes on
            with contextlib.suppress(ValueError):
                self.begun.remove(begun)
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

    def _give_up_message(self, error: BaseException) -> BaseException:
        return self._give_up(0, "{}", error)

    def _give_up(self, number: int, text: str, error: BaseException) -> BaseException:
        """Let the peers know at once, since they would wait for their timeout otherwise; find out what they saw."""
        found = self._parted or error
        failure = Failure.of(number, text, found)
        self._broken = self._broken or found
        try:
            with self._failing:  # of two calls under way the first to fail speaks for both
                if self._notes is None:
                    self._notes = self.transport.give_up(failure.written())
            if not failure.own:
                told = explained(error, self._notes)
                found = told if told is not error else found
        except BaseException as fault:  # noqa: BLE001  what went wrong first says more
            found.__context__ = fault
        if found is not error:
            found.__cause__ = error
            if self._broken is error:
                self._broken = found
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


class _Called:
    """A channel whose calls have another name: all else is the channel's own."""

    def __init__(self, channel: Channel, name: str) -> None:
        self._channel, self._name = channel, name

    def __getattr__(self, attribute: str) -> object:
        return getattr(self._channel, attribute)

    def submit(self, signature: Signature, *args: Any, **kwargs: Any) -> Work:
        return self._channel.submit({**signature, "call": self._name}, *args, **kwargs)


def _loop(calls: Queue, turn: threading.Semaphore) -> None:
    """A thread of a channel: one call after another."""
    while True:
        turn.acquire()
        item = calls.get()
        if item is None:
            turn.release()
            return
        item.channel.do(item)
        del item  # and with it the tensors of the call, and the channel, which may be nobody else's any more


def _let_go(calls: Queue, transport: Transport) -> None:
    """A channel is gone. This may run in any thread, between any two steps of it: no lock is taken, nobody waited for.
    No call is under way, since calls hold their channel.
    """
    for _ in range(THREADS):
        calls.put(None)
    with contextlib.suppress(Exception):
        transport.close()


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose object is not kept alive. Whoever calls it holds that by other means, as a message its channel."""
    found = weakref.WeakMethod(method)

    def call(*args: object) -> Any:
        bound = found()
        assert bound is not None
        return bound(*args)

    return call


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
    # whoever is called back when a call is over may close its channel
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(until - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in others)


_OPEN: weakref.WeakSet[Channel] = weakref.WeakSet()
_LISTING = threading.Lock()


def _open_channels() -> list[Channel]:
    with _LISTING:
        return list(_OPEN)


_LOOKOUT = Lookout(_open_channels)

EXIT_GRACE = 2.0
"""Seconds that a process which ends gives to the calls that nobody waited for."""


@atexit.register
def _at_exit() -> None:
    """A thread that comes back from a backend while the interpreter is taken down would end the process by SIGABRT."""
    _LOOKOUT.stop()
    _end_threads(_open_channels(), EXIT_GRACE)


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
    try:
        check_group(chosen)
    except ValueError:
        _CHANNELS.pop(chosen, None)
        raise
    with _LOOKING:
        making = _MAKING.setdefault(chosen, threading.Lock())
    with making:
        found = _CHANNELS.get(chosen)
        if found is None:
            found = _CHANNELS[chosen] = Channel(TorchTransport(chosen))
    return found
