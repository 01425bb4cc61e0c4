"""Point to point: both sides say what they mean, so that two ranks that disagree find out before values travel."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from narrowcast.collectives.runtime import agreement
from narrowcast.collectives.runtime.agreement import DisagreementError
from narrowcast.collectives.runtime.streams import DeviceStream, StreamScope
from narrowcast.collectives.segments import Coder
from narrowcast.collectives.transports.base import Transport, TransportError
from narrowcast.collectives.work import Work
from narrowcast.kernels import Noise

POINT_TAGS = 1 << 30
"""Tags of point-to-point messages, apart from those of collectives."""
MAX_TAG = 1 << 28
NONE_COMES = -1
"""In place of a message's number: the two ranks disagree."""


def header(coder: Coder) -> Tensor:
    """What both sides must agree on: the codec, the sizes and the version, as a hash."""
    text = f"{agreement.VERSION} {coder.codec} {coder.segments}"
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


def check_tag(tag: int) -> None:
    if not 0 <= tag < MAX_TAG:
        raise ValueError(f"send/recv: tag must be from 0 to {MAX_TAG - 1}, got {tag}")


def _tags(tag: int) -> tuple[int, int, int]:
    """For the receiver's header, the sender's, and the bytes."""
    first = POINT_TAGS + 4 * tag
    return first, first + 1, first + 2


def encode_message(coder: Coder, x: Tensor, noise: Noise) -> Tensor:
    """The bytes of a message."""
    whole = (0, x.numel())
    wire = torch.empty(coder.nbytes(whole), dtype=torch.uint8, device=x.device)
    coder.encode(x, whole, wire, noise, coder.scales(x))
    return wire


Deliver = Callable[[Callable[[int], None], int], object]
"""Sends the bytes: it gets what announces the message by its number, and the tag of the bytes."""


def send(transport: Transport, coder: Coder, peer: int, tag: int, deliver: Deliver) -> int:
    """The receiver's header comes when it wants the message, ours goes back with the number that `deliver` gives it,
    ahead of the bytes; where they differ, both raise. Returns how many bytes were sent.
    """
    ask, answer, data = _tags(tag)
    mine = header(coder)
    theirs = torch.empty_like(mine)

    def announce(number: int) -> None:
        transport.isend(torch.cat([mine, torch.tensor([number]).view(torch.uint8)]), peer, answer).wait()

    transport.irecv(theirs, peer, ask).wait()
    size, agreed = coder.nbytes((0, coder.numel)), torch.equal(mine, theirs)
    if agreed and size:
        deliver(announce, data)
    else:
        announce(NONE_COMES)
    _compare("send", f"rank {peer} expects", mine, theirs, coder)
    return mine.numel() + size


def receive(transport: Transport, coder: Coder, peer: int, tag: int, accept: Callable[[int, int], object]) -> int:
    """The same from the other side: `accept` gets the message's number and the tag of its bytes, and receives them."""
    ask, answer, data = _tags(tag)
    mine = header(coder)
    theirs = torch.empty(mine.numel() + 8, dtype=torch.uint8)
    reply = transport.irecv(theirs, peer, answer)
    transport.isend(mine, peer, ask).wait()
    reply.wait()
    _compare("recv", f"rank {peer} sends", mine, theirs[:-8], coder)
    if coder.nbytes((0, coder.numel)):
        accept(int(theirs[-8:].clone().view(torch.int64)), data)
    return mine.numel()


def _compare(what: str, who: str, mine: Tensor, theirs: Tensor, coder: Coder) -> None:
    if not torch.equal(mine, theirs):
        raise DisagreementError(
            f"{what}: {who} something else than {coder.numel} values with {coder.codec}, so nothing was sent; "
            "call send and recv with the same spec, sizes and version"
        )


class DeviceLine:
    """Messages from one rank to another where a device's backend carries them, on a stream of their own.

    The backend does them one after another, so both ranks must come to them in one order, whatever threads and tags
    they have. It is the sender's: once both sides want a message, its number goes ahead through host memory.
    """

    def __init__(self, transport: Transport, source: int, target: int, stream: DeviceStream) -> None:
        self._transport, self._source, self._target, self.stream = transport, source, target, stream
        self._next = 0
        self._turn = threading.Condition()
        self._broken = False

    def send(self, wire: Tensor, scope: StreamScope, announce: Callable[[int], None], tag: int) -> None:
        """After what the scope's caller gave its stream; the host does not wait for the bytes."""
        with self._turn:
            number, self._next = self._next, self._next + 1
            # ahead of the bytes: where the backend connects first, that takes both sides
            announce(number)
            with scope:
                self._transport.carry(wire, self._source, self._target).wait()

    def receive(self, nbytes: int, number: int, tag: int) -> Tensor:
        """The wire of that message, which is there for the line's stream."""
        with self._turn:
            self._turn.wait_for(lambda: self._broken or self._next == number)
            if self._broken:
                raise TransportError(f"recv: an earlier message from rank {self._source} failed")
            self._next += 1
            with self.stream.current():
                wire = torch.empty(nbytes, dtype=torch.uint8, device=self.stream.device)
                self._transport.carry(wire, self._source, self._target).wait()
            self._turn.notify_all()
        return wire

    def break_off(self) -> None:
        """A message failed: those that wait for their turn would wait for ever."""
        with self._turn:
            self._broken = True
            self._turn.notify_all()


Line = tuple[str, int, int]
"""The direction, the peer and the tag of messages that keep their order."""


class MessageOwner(Protocol):
    """A channel, as its messages between two ranks see it."""

    def refusal(self) -> BaseException | None:
        """Why no message can be sent any more, if so."""

    def fail_message(self, error: BaseException) -> BaseException:
        """A message ended in this, which is no disagreement; returns what its waiter is to see."""


class Lines:
    """Messages under way. Each has a thread of its own: only those of one line wait for each other."""

    def __init__(self, channel: MessageOwner) -> None:
        """channel: by a weak reference, since it holds us; a message holds it by its job."""
        self._channel, self._lock = channel, threading.Lock()
        self._last: dict[Line, Work] = {}
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._on_device: dict[tuple[int, int], DeviceLine] = {}

    def on_device(self, transport: Transport, source: int, target: int, stream: DeviceStream) -> DeviceLine:
        """The line of one rank's messages to another, made at its first use. stream: the channel's on that device."""
        key = source, target
        with self._lock:
            if key not in self._on_device:
                self._on_device[key] = DeviceLine(transport, source, target, stream.another())
            line = self._on_device[key]
        if line.stream.device != stream.device:
            # a message has one number, and NCCL another connection for each device
            raise ValueError(
                f"send/recv: messages from rank {source} to rank {target} lie on {line.stream.device} here, got a "
                f"tensor on {stream.device}; move it to {line.stream.device}"
            )
        return line

    def __len__(self) -> int:
        return len(self._last)

    def threads(self) -> list[threading.Thread]:
        with self._lock:
            return list(self._threads)

    def start(self, line: Line, job: Callable[[], int], work: Work) -> Work:
        """Run `job`, which returns how many bytes it sent, after the line's messages before it."""
        with self._lock:
            task = (line, self._last.get(line), job, work)
            thread = threading.Thread(target=self._run, args=task, name="narrowcast-p2p", daemon=True)
            thread.start()
            self._threads.add(thread)
            self._last[line] = work
        return work

    def _run(self, line: Line, after: Work | None, job: Callable[[], int], work: Work) -> None:
        if after is not None:
            after.join()
        error = self._attempt(job, work)
        with self._lock:
            if self._last[line] is work:
                del self._last[line]
        work.complete(error)

    def _attempt(self, job: Callable[[], int], work: Work) -> BaseException | None:
        try:
            refusal = self._channel.refusal()
            if refusal is None:
                work.sent_bytes = job()
        except DisagreementError as disagreement:  # found before values travelled: the next message may come
            return disagreement
        except BaseException as error:  # noqa: BLE001  it belongs to whoever waits
            named_error = self._channel.fail_message(error)
            for line in [*self._on_device.values()]:
                line.break_off()
            return named_error
        return refusal
