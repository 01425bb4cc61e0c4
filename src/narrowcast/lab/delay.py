"""Links on which packets take their time, in user space: the kernel's own delay, sch_netem, is often not there.

    host: eth0 (TAP) ── forwarder ── v (TAP): the switch

The kernel hands over what a host sends as large as TCP made it, up to 64 KB, with a note on how to cut it and where its
checksum belongs, and takes it back in the same form: few system calls carry much.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import itertools
import math
import mmap
import os
import random
import resource
import select
import struct
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from narrowcast.lab import packets, syscalls

DEVICE, NUMBERS = "/dev/net/tun", (10, 200)
SET_NAME, SET_OFFLOADS = 0x400454CA, 0x400454D0
TAP, NO_HEADER, OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUM, TCP4, TCP6, CONGESTION = 0x01, 0x02, 0x04, 0x08
REQUEST = struct.Struct("16sH22x")
LARGEST = (1 << 16) + 128
LARGEST_MTU_DELAYED = 65521
"""Of a TAP device: the Ethernet header counts too."""
AT_ONCE = 64
"""Packets of one link that are taken before the others have their turn."""
PART, LONGEST_PART = 1 / 50, 1e-3
"""Of the delay: packets are looked for so often at most, and come several at a time, which costs a quarter less."""
MOST_WAITING, OVERHEAD = 1 << 30, 256
"""Bytes that wait at most, and what a packet takes besides its own."""
REFUSED = {errno.EIO, errno.EINVAL, errno.EBADFD, errno.ENETDOWN, errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM}
"""A link that is down, full or without memory takes nothing: the packet is lost, as on any other, and counted."""
FORWARDED = 10**10
"""What is carried at most, in bits a second: no link with a delay is faster."""


@dataclass(frozen=True)
class Delay:
    """What happens to each packet that a host sends: it takes `seconds`, up to `jitter` more, and some are lost."""

    seconds: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.seconds or self.jitter or self.loss)


class Losses:
    """Which packets of a link get lost: each with the same chance, whatever became of the others."""

    def __init__(self, share: float, seed: int) -> None:
        self._share, self._random = share, random.Random(seed)
        self._spared = self._draw()

    def of(self, count: int) -> list[int]:
        """Which of the next `count`."""
        lost = []
        while self._spared < count:
            lost.append(int(self._spared))
            self._spared += 1 + self._draw()
        self._spared -= count
        return lost

    def _draw(self) -> float:
        """Packets until the next that is lost."""
        if not self._share:
            return math.inf
        return math.log(1 - self._random.random()) // math.log1p(-self._share)


@dataclass(slots=True)
class Cable:
    """One host's: both ends, and what became of the packets that it sent."""

    host: int
    switch: int
    losses: Losses
    counts: memoryview
    """Packets that were lost as they should, and those that found no room."""
    last: float = 0.0


class Forwarder:
    """Carries packets between the two ends of every link."""

    def __init__(self, links: Sequence[Cable], delay: Delay, watch: select.epoll) -> None:
        self._delay, self._watch, self._random = delay, watch, random.Random(len(links))
        self._links = {link.host: link for link in links} | {link.switch: link for link in links}
        for end in self._links:
            watch.register(end, select.EPOLLIN)
        # a packet is seen half a part late at each of its two ends, in the mean
        self._part = min(delay.seconds * PART, LONGEST_PART)
        self._waiting: list[tuple[float, int, Cable, bytes]] = []
        self._held = 0
        self._numbers = itertools.count()

    def run(self) -> None:
        """Until the process is ended."""
        look = 0.0
        while True:
            now = time.monotonic()
            due = self._waiting[0][0] if self._waiting else math.inf
            if due > now < look:
                time.sleep(min(due, look) - now)
            elif due > now:
                # epoll itself would wait for whole milliseconds
                select.select([self._watch], [], [], None if due == math.inf else due - now)
            if time.monotonic() >= look:
                ends = [self._take(end) for end, _ in self._watch.poll(0)]
                if ends:
                    look = 0.0 if AT_ONCE in ends else time.monotonic() + self._part
            self._deliver_due()

    def _take(self, end: int) -> int:
        """A host's packets have to wait; those to it have done so. Returns how many there were."""
        link, count = self._links[end], 0
        for packet in _read(end):
            count += 1
            if end == link.switch:
                _deliver(link, link.host, packet)
            elif self._delay.loss:
                for part in self._less(link, packet):
                    self._put(link, part)
            else:
                self._put(link, packet)
        return count

    def _less(self, link: Cable, packet: bytes) -> Iterator[bytes]:
        """A packet without what gets lost of it."""
        lost = link.losses.of(packets.parts(packet))
        link.counts[0] += len(lost)
        return packets.without(packet, lost) if lost else iter((packet,))

    def _put(self, link: Cable, packet: bytes) -> None:
        if self._held > MOST_WAITING:
            link.counts[1] += 1
            return
        late = self._delay.seconds - self._part + self._delay.jitter * self._random.random()
        # jitter never makes a packet overtake another of its link: TCP would take that for loss
        link.last = due = max(link.last, time.monotonic() + late)
        heapq.heappush(self._waiting, (due, next(self._numbers), link, packet))
        self._held += len(packet) + OVERHEAD

    def _deliver_due(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, link, packet = heapq.heappop(self._waiting)
            self._held -= len(packet) + OVERHEAD
            _deliver(link, link.switch, packet)


def _read(end: int) -> Iterator[bytes]:
    with suppress(BlockingIOError):
        for _ in range(AT_ONCE):
            yield os.read(end, LARGEST)


def _deliver(link: Cable, end: int, packet: bytes) -> None:
    try:
        os.write(end, packet)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        link.counts[1] += 1


class Counts:
    """Two numbers for each host, written by the forwarder and read by whoever started it."""

    def __init__(self, hosts: int) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 16 * max(hosts, 1))).cast("Q")

    def of(self, host: int) -> memoryview:
        return self._numbers[2 * host : 2 * host + 2]


def start(namespaces: Sequence[int], home: int, delay: Delay) -> tuple[int, Counts]:
    """Make a link for each host, and the forwarder as a child of this process, which ends with it.

    Returns its number, and counts. namespaces: the hosts' network namespaces, open files; `home` is the caller's own.
    """
    counts, opened = Counts(len(namespaces)), []
    with select.epoll() as watch, _many_files(2 * len(namespaces)), _device() as device:
        try:
            for host, namespace in enumerate(namespaces):
                opened += [_open_link(device, "eth0", namespace, home), _open_link(device, f"v{host}", home, home)]
            links = [
                Cable(*ends, Losses(delay.loss, host), counts.of(host))
                for host, ends in enumerate(zip(opened[::2], opened[1::2], strict=True))
            ]
            return _fork(links, delay, watch), counts
        finally:
            for end in opened:
                os.close(end)  # the forwarder has them; with it the links go


def _fork(links: Sequence[Cable], delay: Delay, watch: select.epoll) -> int:
    child = os.fork()
    if child == 0:
        try:
            syscalls.die_with_parent()
            with suppress(OSError):  # late packets are a longer delay than was asked for
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            Forwarder(links, delay, watch).run()
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)
    return child


@contextmanager
def _many_files(more: int) -> Iterator[None]:
    """Hundreds of hosts need more open files than a process usually may have; those that it starts later may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 1024 + 2 * more
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def _device() -> Iterator[str]:
    """Where TAP devices come from; a container may lack the file while its kernel has them."""
    if os.path.exists(DEVICE):
        yield DEVICE
        return
    with tempfile.TemporaryDirectory(dir="/dev", prefix="narrowcast-") as folder:
        os.mknod(f"{folder}/tun", 0o020600, os.makedev(*NUMBERS))
        yield f"{folder}/tun"


def _open_link(device: str, name: str, namespace: int, home: int) -> int:
    """A file behind a new link of that name in a network namespace."""
    try:
        syscalls.setns(namespace)
        # a link belongs to the namespace in which its file was opened
        link = os.open(device, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        syscalls.setns(home)
    fcntl.ioctl(link, SET_NAME, REQUEST.pack(name.encode(), TAP | NO_HEADER | OFFLOAD_HEADER))
    fcntl.ioctl(link, SET_OFFLOADS, CHECKSUM | TCP4 | TCP6 | CONGESTION)
    return link
