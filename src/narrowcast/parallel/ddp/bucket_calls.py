"""The calls of a DDP bucket: one for each codec, started by itself or together with others, and DDP's future."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.collectives import (
    AllReduce,
    Channel,
    LowRankCall,
    LowRankReduce,
    PreparedCall,
    Times,
    Work,
    start_low_rank,
    start_together,
)
from narrowcast.parallel.ddp.buckets import is_enough
from narrowcast.parallel.stats import Stats

Done = torch.futures.Future[Tensor]
CALL = "all_reduce of gradients"
Grouped = list[tuple["BucketGroup", list[Tensor]]]
"""The groups of a bucket, each with its gradients."""


@dataclass(frozen=True)
class BucketGroup:
    """The gradients of a bucket that travel with one codec: what their calls have in common, at whatever step."""

    codec: Codec
    names: tuple[str, ...]
    numel: int
    kind: AllReduce | LowRankReduce
    wire_bytes: int
    """Of all its values."""
    plain_bytes: int
    """What a plain all-reduce would send."""
    compressed: int
    """Values that travel in fewer bits than their own type has."""


class BucketReduction:
    """A bucket under way: when the last of its groups is over, DDP's future gets the buffer, or the first error."""

    def __init__(
        self, buffer: Tensor, groups: int, rescale: Callable[[Tensor], Tensor], show: Callable[[], None]
    ) -> None:
        self._buffer, self._rescale, self._show = buffer, rescale, show
        self.future, self._missing = new_future(buffer), groups
        self._works: list[Work] = []
        self._lock = threading.Lock()

    def on_arrival(self, work: Work) -> None:
        """A group is over, whatever came of it. In whatever thread that was done."""
        with self._lock:
            self._works.append(work)
            self._missing -= 1
            is_last = not self._missing
        if is_last:
            settle(self.future, self._buffer, self._finish())

    def fail(self, error: BaseException) -> None:
        """A group will not be started."""
        with self._lock:
            is_open, self._missing = self._missing > 0, 0
        if is_open:
            settle(self.future, self._buffer, error)

    def _finish(self) -> BaseException | None:
        """What DDP expects in the buffer; or what went wrong."""
        try:
            for work in self._works:
                work.wait()  # done, all of them: what follows comes after them on the device, too
            self._rescale(self._buffer)
            self._show()
        except BaseException as error:  # noqa: BLE001  DDP's future carries it, whosever it is
            return error
        return None


@dataclass(frozen=True)
class GroupCall:
    """A group of a bucket, ready to be sent."""

    group: BucketGroup
    prepared: PreparedCall | LowRankCall
    reduction: BucketReduction


class HeldCalls:
    """Calls that wait for others, where a device's backend carries the wires, or by low rank: those of a bucket, and of
    buckets that are small on the wire, travel together. All are of one kind: plain ones, or of one low rank.
    """

    def __init__(self, channel: Channel, stats: Stats) -> None:
        self._channel, self._stats = channel, stats
        self._calls: list[GroupCall] = []
        self._streams: set[torch.cuda.Stream] = set()
        """Those that gradients which are held have been given to."""

    def add(self, call: GroupCall) -> None:
        """Hold it, or start it with those that are held, once they have MERGED_BYTES."""
        device = call.prepared.device
        if self._calls and self._calls[0].prepared.device != device:
            self.start()
        if device.type == "cuda":
            self._streams.add(torch.cuda.current_stream(device))
        self._calls.append(call)
        if is_enough(sum(one.group.wire_bytes for one in self._calls)):
            self.start()

    def start(self) -> None:
        """Start what is held as one call."""
        calls, streams = self._calls, self._streams
        self.clear()
        try:
            for stream in streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            if calls:
                start_calls(self._channel, calls, self._stats)
        except BaseException as error:
            for call in calls:
                call.reduction.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """They will not be started: their futures say why."""
        calls = self._calls
        self.clear()
        for call in calls:
            call.reduction.fail(error)

    def clear(self) -> None:
        """Forget them: those of a backward pass that did not get to its end, say."""
        self._calls, self._streams = [], set()


def start_calls(channel: Channel, calls: Sequence[GroupCall], stats: Stats) -> None:
    """Start them as one call on the wire."""
    times, began = Times(), time.perf_counter()
    for call in calls:
        call.prepared.times = times
    plain = [call.prepared for call in calls if isinstance(call.prepared, PreparedCall)]
    matrices = [call.prepared for call in calls if isinstance(call.prepared, LowRankCall)]
    work = start_low_rank(channel, matrices) if matrices else start_together(channel, plain)

    def on_arrival(work: Work) -> None:
        numel, plain_bytes, compressed = (
            sum(numbers) for numbers in zip(*((g.numel, g.plain_bytes, g.compressed) for g in groups), strict=True)
        )
        seconds = time.perf_counter() - began
        try:
            stats.count(CALL, numel, work.sent_bytes, plain_bytes, times, seconds, compressed=compressed)
        finally:  # DDP waits for every future
            for call in calls:
                call.reduction.on_arrival(work)

    groups = [call.group for call in calls]
    work.then(on_arrival)


def new_future(buffer: Tensor) -> Done:
    """On a CUDA device it carries the stream's work with it: whoever waits for it lets its own stream wait."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)


def settle(future: Any, buffer: Tensor, error: BaseException | None) -> None:
    """Every future is set, always: DDP would wait for ever otherwise."""
    if error is None:
        future.set_result(buffer)
    else:
        future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def failed_future(buffer: Tensor, error: BaseException) -> Done:
    """What a hook returns that could not even start; through then(), so that the error keeps its own text."""
    future = new_future(buffer)
    settle(future, buffer, error)
    return future.then(lambda done: done.value())


def shared_buffer(gradients: Sequence[Tensor], buffer: Tensor) -> Tensor | None:
    """The part of a bucket's buffer that these gradients fill without a gap, so that nothing is copied; or None."""
    start = at = gradients[0].storage_offset()
    for gradient in gradients:
        if (
            gradient.storage_offset() != at
            or gradient.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
        ):
            return None
        at += gradient.numel()
    return buffer[start - buffer.storage_offset() : at - buffer.storage_offset()]
