"""A channel: one group's own transport, on which calls begin in one order, so that all ranks agree on it.

A call is `submit`ted with its signature, which all ranks compare the first time, and with a function of an `Exchange`,
which is run when it is the call's turn: by a thread of the channel, since the host has to wait for messages; or by the
caller itself where the device's backend does all the waiting.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.collectives.p2p import Lines
from narrowcast.collectives.runtime import agreement
from narrowcast.collectives.runtime.agreement import DisagreementError, Failure, Signature
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.runtime.streams import HOST, DeviceStream, StreamScope, Way, without_autocast
from narrowcast.collectives.runtime.watchdog import REMEMBERED, StartedCall, Watchdog
from narrowcast.collectives.transports.base import Transport
from narrowcast.collectives.transports.torch import TorchTransport, check_group
from narrowcast.collectives.work import ChannelCall, Extents, Work, extents, overlap

THREADS = 2
"""One call ends while the next begins."""


class BrokenChannelError(RuntimeError):
    """An earlier call failed, so ranks may be out of step."""


CallQueue = queue.SimpleQueue[ChannelCall | None]


class Channel:
    """Calls on one transport, first in first out. After a failure every further call raises at once.

    A call begins when the one before is over, or has said that all it sends is on its way: the next one's first bytes
    are then made while the last ones travel, and the link does not rest between two calls. Where both use the same
    memory it waits for the end, since what it is to read is still being written.
    A channel that nobody holds any more, and that has no call under way, closes by itself.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport, self.rank, self.world = transport, transport.rank, transport.world
        self.lines = Lines(weakref.proxy(self))
        """Messages from rank to rank, which have no place among the calls."""
        self.streams: dict[torch.device, DeviceStream] = {HOST.device: HOST}
        self._calls = 0
        self._kinds: dict[str, int] = {}
        self._broken: BaseException | None = None
        self.started: deque[StartedCall] = deque(maxlen=REMEMBERED)
        """The last calls, for the watchdog."""
        self._parted: DisagreementError | None = None
        self._queue: CallQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._submitting = threading.Lock()
        self._queued = 0
        """Calls that were given to the threads and are not over."""
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

    def submit(
        self,
        signature: Signature | str,
        run: Callable[[Exchange], None],
        tensors: Sequence[Tensor] = (),
        *,
        waits: bool = True,
    ) -> Work:
        """Run `run` after everything submitted before; every rank must submit the same in the same order.

        signature: a mapping, or its text. tensors: all that the call reads and writes of memory that others may use;
        they are on one device. What it reads has been given to the current stream there; what it writes is there for
        any stream that waited for the work. waits=False: where the transport carries the device's memory nothing in
        `run` makes the host wait for other ranks, so that the caller itself may run it.
        """
        text = signature if isinstance(signature, str) else agreement.to_text(signature)
        stream = self.stream_on(tensors[0].device) if tensors else HOST
        scope = None if stream is HOST else StreamScope(stream, tensors)
        with self._submitting:
            # behind calls of the threads it waits there; what is new takes the other ranks, who may be elsewhere first
            by_thread = waits or stream.way is not Way.ROUNDS or self._queued > 0 or text not in stream.known
            work, uses = Work(scope, at_once=not by_thread), extents(tensors) if by_thread else []
            call = ChannelCall(self, text, run, work, uses, stream, torch.is_inference_mode_enabled())
            if by_thread:
                self._start_threads()
                self._queued += 1
                self._queue.put(call)
                return work
            try:  # no thread has a call under way, and the device's backend keeps the order of those before
                error = without_autocast(stream.device.type, self._run, call)
            except BaseException as fault:  # noqa: BLE001  the work comes to its end, as in a thread
                error = self._broken = self._broken or fault
        work.complete(error)
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt is for this thread
        return work

    def stream_on(self, device: torch.device) -> DeviceStream:
        """The stream of this channel's calls on a device; a side stream is made at the first one."""
        stream = self.streams.get(device)
        if stream is None:
            way = Way.ROUNDS if self.transport.carries(device) else Way.STAGED
            stream = self.streams[device] = DeviceStream(device, way, torch.cuda.Stream(device, priority=-1))
        return stream

    def called(self, name: str) -> Channel:
        """This channel, for calls that are part of another one: `name` stands for them where ranks disagree."""
        return cast(Channel, _NamedChannel(self, name))

    def _start_threads(self) -> None:
        if self._threads:
            return
        count = THREADS if self.transport.shared_by_threads else 1
        task: dict[str, Any] = {"target": _loop, "args": (self._queue, self._turn), "daemon": True}
        threads = [threading.Thread(name="narrowcast-channel", **task) for _ in range(count)]
        for thread in threads:
            thread.start()
        with _LISTING:
            _THREADS.update(threads)
        _WATCHDOG.start()
        self._threads = threads  # not before all run: nobody would read the queue

    def gather(self, mine: Tensor, call: str = "gather", **alike: object) -> list[Tensor]:
        """Everyone's small tensor, by rank. call: what it is in errors. alike: what makes its size."""
        everyones: list[Tensor] = []
        signature = {"call": call, "numel": mine.numel(), "dtype": str(mine.dtype), **alike}
        self.submit(signature, lambda exchange: everyones.extend(exchange.gather(mine, 0)), [mine], waits=False).wait()
        return everyones

    def fail(self, error: BaseException) -> None:
        """For a caller that cannot make the call that the others make: they hear of it at once, unless they know."""
        failure = Failure(self._calls + 1, "{}", f"{type(error).__name__}: {error}", own=True)
        with self._failing:
            if self._broken is None:
                self._broken = error
                self._notes = self.transport.give_up(failure.to_text())

    def part(self, error: DisagreementError) -> None:
        """For the watchdog: another rank is in another call, and nothing of ours will come to its end."""
        self._parted = error
        self.transport.interrupt()

    def do(self, call: ChannelCall) -> None:
        """In one of the threads, which has the turn. Whatever happens, the work comes to its end."""
        call.turn = self._turn
        try:
            self._await_memory(call)
            error = self._run(call)
        except BaseException as fault:  # noqa: BLE001  it belongs to whoever waits
            error = self._broken = self._broken or fault
        finally:
            call.end_turn()
        if error is None and call.stream.way is Way.ROUNDS:
            call.stream.known.add(call.text)
        with self._submitting:
            self._queued -= 1
        call.work.complete(error)

    def _await_memory(self, call: ChannelCall) -> None:
        """Wait for the calls before that may still write what this one uses. They have all sent, and need no turn."""
        for over, uses in self._underway:
            if overlap(uses, call.uses):
                over.wait()
        self._underway = [(over, uses) for over, uses in self._underway if not over.is_set()]
        self._underway.append((call.work.over, call.uses))

    def _run(self, call: ChannelCall) -> BaseException | None:
        """Run one call; None, or what went wrong. A disagreement, found before anything moved, leaves us usable."""
        if self._broken is not None:
            return self.refusal()
        self._calls += 1
        started = StartedCall(self._calls, call.text, call.work.over, time.monotonic())
        self.started.append(started)
        try:
            if call.text not in self._kinds:
                agreement.agree(self.transport, call.text)
                # agreements happen in the same order everywhere, so a kind has one number on all ranks
                self._kinds[call.text] = len(self._kinds)
            kind = self._kinds[call.text]
            call.perform(Exchange(self.transport, started.number, kind, call.stream, pass_on=call.end_turn))
        except DisagreementError as error:
            # all ranks have heard of it: who differs at this number goes on
            with contextlib.suppress(ValueError):
                self.started.remove(started)
            return error
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs to the caller
            return self._give_up(started.number, call.text, error)
        return None

    def refusal(self) -> BaseException | None:
        """Why nothing can be called any more, if so."""
        if self._broken is None:
            return None
        return BrokenChannelError(f"an earlier collective failed ({self._broken}); make a new group and attach again")

    def fail_message(self, error: BaseException) -> BaseException:
        """A message between two ranks ended in this; what its waiter is to see."""
        return self._give_up(0, "{}", error)

    def _give_up(self, number: int, text: str, error: BaseException) -> BaseException:
        """Let the peers know at once, since they would wait for their timeout otherwise; find out what they saw."""
        named_error = self._parted or error
        failure = Failure.of(number, text, named_error)
        self._broken = self._broken or named_error
        try:
            with self._failing:  # of two calls under way the first to fail speaks for both
                if self._notes is None:
                    self._notes = self.transport.give_up(failure.to_text())
            if not failure.own:
                explanation = agreement.explain(error, self._notes)
                named_error = explanation if explanation is not error else named_error
        except BaseException as fault:  # noqa: BLE001  what went wrong first says more
            named_error.__context__ = fault
        if named_error is not error:
            named_error.__cause__ = error
            if self._broken is error:
                self._broken = named_error
        return named_error

    def close(self, timeout: timedelta = timedelta(seconds=5)) -> None:
        """End the threads and the transport; calls that are queued still run, for so long."""
        _end_threads([self], timeout.total_seconds())
        if self._broken is None:
            self._broken = BrokenChannelError("the channel was closed")
            self.transport.close()

    def stop(self) -> list[threading.Thread]:
        """Ask the threads to end after what is queued; which those are."""
        held = self._submitting.acquire(timeout=EXIT_GRACE)
        if not held:
            self.transport.interrupt()  # a call that is being posted does not come back
        calls, self._threads = self._threads, []
        for _ in calls:
            self._queue.put(None)
        if held:
            self._submitting.release()
        return [*calls, *self.lines.threads()]


class _NamedChannel:
    """A channel whose calls have another name: all else is the channel's own."""

    def __init__(self, channel: Channel, name: str) -> None:
        self._channel, self._name = channel, name

    def __getattr__(self, attribute: str) -> object:
        return getattr(self._channel, attribute)

    def submit(self, signature: Signature | str, *args: Any, **kwargs: Any) -> Work:
        if isinstance(signature, str):
            signature = agreement.read(signature)
        return self._channel.submit({**signature, "call": self._name}, *args, **kwargs)


def _loop(calls: CallQueue, turn: threading.Semaphore) -> None:
    """A thread of a channel: one call after another."""
    while True:
        turn.acquire()
        call = calls.get()
        if call is None:
            turn.release()
            return
        call.channel.do(call)
        del call  # and with it the tensors of the call, and the channel, which may be nobody else's any more


def _let_go(calls: CallQueue, transport: Transport) -> None:
    """A channel is gone, with no call under way, since calls hold it. In any thread: no lock is taken."""
    for _ in range(THREADS):
        calls.put(None)
    with contextlib.suppress(Exception):
        transport.close()


def _end_threads(channels: Sequence[Channel], seconds: float) -> None:
    """Let calls under way come to their end for so long, and then interrupt them."""
    threads, until = {channel: channel.stop() for channel in channels}, time.monotonic() + seconds
    stuck = [channel for channel in channels if not _join_threads(threads[channel], until)]
    for channel in stuck:
        channel.transport.interrupt()
    until = time.monotonic() + LAST_WORDS
    for channel in stuck:
        _join_threads(threads[channel], until)


LAST_WORDS = 3.0
"""Seconds for a thread that was interrupted to tell the other ranks, through a store that may be gone."""


def _join_threads(threads: Sequence[threading.Thread], until: float) -> bool:
    """Whether they have all ended by then."""
    # whoever is called back when a call is over may close its channel
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(until - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in others)


_OPEN: weakref.WeakSet[Channel] = weakref.WeakSet()
_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Of channels that are gone, too: theirs end by themselves, but a process may end first."""
_LISTING = threading.Lock()


def _open_channels() -> list[Channel]:
    with _LISTING:
        return [*_OPEN]


_WATCHDOG = Watchdog(_open_channels)

EXIT_GRACE = 2.0
"""Seconds that a process which ends gives to the calls that nobody waited for."""


@atexit.register
def _at_exit() -> None:
    """A thread that comes back from a backend while the interpreter is taken down would end the process by SIGABRT."""
    _WATCHDOG.stop()
    channels = _open_channels()
    theirs = {thread for channel in channels for thread in channel._threads}
    _end_threads(channels, EXIT_GRACE)
    with _LISTING:
        others = set(_THREADS) - theirs
    _join_threads([*others], time.monotonic() + EXIT_GRACE)


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
        channel = _CHANNELS.get(chosen)
        if channel is None:
            channel = _CHANNELS[chosen] = Channel(TorchTransport(chosen))
    return channel
