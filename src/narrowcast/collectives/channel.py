"""A channel: one group's own transport, and one thread that runs its calls in order, so that all ranks agree on it."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from narrowcast.collectives.agreement import DisagreementError, Failure, Signature, agree, explained, written
from narrowcast.collectives.exchange import Exchange
from narrowcast.collectives.transport import TorchTransport, Transport
from narrowcast.collectives.work import Work

Job = Callable[[Exchange], None]


class BrokenChannelError(RuntimeError):
    """An earlier call failed, so ranks may be out of step."""


@dataclass
class _Item:
    text: str
    job: Job
    work: Work


class Channel:
    """Calls on one transport, first in first out. After a failure every further call raises at once."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.lines: dict[tuple[str, int, int], Work] = {}
        """The last message of each direction, peer and tag: the next one waits for it."""
        self._calls = 0
        self._kinds: dict[str, int] = {}
        self._broken: BaseException | None = None
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world(self) -> int:
        return self.transport.world

    def submit(self, signature: Signature, job: Job, work: Work | None = None) -> Work:
        """Run `job` after everything submitted before; every rank must submit the same in the same order."""
        work = work or Work()
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="narrowcast-channel", daemon=True)
            self._thread.start()
        self._queue.put(_Item(written(signature), job, work))
        return work

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Everyone's small tensor, by rank: same type and size everywhere."""
        found: list[Tensor] = []
        signature = {"call": "gather", "numel": mine.numel(), "dtype": str(mine.dtype)}
        self.submit(signature, lambda exchange: found.extend(exchange.gather(mine, 0))).wait()
        return found

    def fail(self, error: BaseException) -> None:
        """For a caller that cannot make the call that the others make: they hear of it at once."""
        self._broken = self._broken or error
        self.transport.give_up(Failure(self._calls + 1, "{}", f"{type(error).__name__}: {error}", own=True).written())

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            item.work.complete(self._run(item))

    def _run(self, item: _Item) -> BaseException | None:
        """Run one call; None, or what went wrong. A disagreement, found before anything moved, leaves us usable."""
        if self._broken is not None:
            return BrokenChannelError(
                f"an earlier collective failed ({self._broken}); make a new group and attach again"
            )
        self._calls += 1
        try:
            if item.text not in self._kinds:
                agree(self.transport, item.text)
                # agreements happen in the same order everywhere, so a kind has one number on all ranks
                self._kinds[item.text] = len(self._kinds)
            exchange = Exchange(self.transport, self._calls, self._kinds[item.text])
            item.job(exchange)
        except DisagreementError as error:
            return error
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs to the caller
            return self._give_up(item, error)
        item.work.sent_bytes = exchange.sent_bytes
        return None

    def _give_up(self, item: _Item, error: BaseException) -> BaseException:
        """Let the peers know at once, since they would wait for their timeout otherwise; find out what they saw."""
        self._broken = error
        failure = Failure.of(self._calls, item.text, error)
        notes = self.transport.give_up(failure.written())
        found = error if failure.own else explained(error, notes)
        if found is not error:
            found.__cause__ = error
        return found

    def close(self, timeout: timedelta = timedelta(seconds=5)) -> None:
        """End the thread and the transport; calls that are queued still run."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout.total_seconds())
        if self._broken is None:
            self._broken = BrokenChannelError("the channel was closed")
            self.transport.close()


_CHANNELS: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()


def channel_of(group: dist.ProcessGroup | None) -> Channel:
    """The channel of a group, made at its first use; a collective operation then."""
    if not dist.is_initialized():
        raise RuntimeError("collectives: no process group; call torch.distributed.init_process_group first")
    chosen = group or dist.group.WORLD
    assert chosen is not None
    if not isinstance(chosen, dist.ProcessGroup):
        raise ValueError("collectives: this rank is no member of the group; only its members may call")
    found = _CHANNELS.get(chosen)
    if found is None:
        found = _CHANNELS[chosen] = Channel(TorchTransport(chosen))
        # the thread would outlive the group otherwise
        weakref.finalize(chosen, found.close).atexit = False
    return found
