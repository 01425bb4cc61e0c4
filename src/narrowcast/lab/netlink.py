"""Links, addresses and queues, asked of the kernel itself: rtnetlink over a socket, with the standard library alone.

A message is a header, a fixed part, and attributes: length, kind, value, filled up to four bytes. The numbers are those
of linux/rtnetlink.h, if_link.h and pkt_sched.h, which the kernel never changes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
LINK = struct.Struct("=BxHiII")  # family, type, index, flags, which of the flags change
ADDRESS = struct.Struct("=BBBBI")  # family, prefix, flags, scope, index
QUEUE = struct.Struct("=BxxxiIII")  # family, index, handle, parent, info
ATTRIBUTE = struct.Struct("=HH")
RATE = struct.Struct("=BBHhHI")  # cell, link layer, overhead, alignment, smallest packet, bytes a second
BUCKET = struct.Struct("=III")  # limit, buffer, mtu
COUNTS = struct.Struct("=QQQQ")  # packets received and sent, bytes received and sent

ERROR, NEW_LINK, GET_LINK, NEW_ADDRESS, NEW_QUEUE, DELETE_QUEUE = 2, 16, 18, 20, 36, 37
REQUEST, ACK, EXCLUSIVE, REPLACE, CREATE = 0x1, 0x4, 0x200, 0x100, 0x400
EXPLAINED = 0x200
NETLINK, SHORT_ERRORS, EXPLAIN_ERRORS = 270, 10, 11
NAME, MTU, MASTER, INFO, STATS, FAMILIES, NAMESPACE = 3, 4, 10, 18, 23, 26, 28
INFO_KIND, INFO_DATA, SNOOPING, PEER, ADDRESS_MODE = 1, 2, 23, 1, 8
ADDRESS_THERE, ADDRESS_HERE = 1, 2
QUEUE_KIND, QUEUE_OPTIONS, TBF_FIXED, TBF_RATE, TBF_BURST = 1, 2, 1, 4, 6
REASON = 1
UP, ROOT, ETHERNET, IPV6_MTU = 1, 0xFFFFFFFF, 1, 1280
LIMIT_HANDLE = 0x10000
SECONDS = 10
ANY_LINK = LINK.pack(0, 0, 0, 0, 0)


def attribute(kind: int, *parts: bytes) -> bytes:
    """Bytes, or attributes inside of one."""
    value = b"".join(parts)
    return ATTRIBUTE.pack(ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(data: bytes) -> dict[int, bytes]:
    """Every attribute by its kind."""
    found = {}
    while len(data) >= ATTRIBUTE.size:
        length, kind = ATTRIBUTE.unpack_from(data)
        found[kind] = data[ATTRIBUTE.size : length]
        data = data[(length + 3) // 4 * 4 :]
    return found


def _text(kind: int, text: str) -> bytes:
    return attribute(kind, text.encode() + b"\0")


def _u32(kind: int, number: int) -> bytes:
    return attribute(kind, struct.pack("=I", number))


def _name(link: str) -> bytes:
    return _text(NAME, link)


def _no_ipv6_address(mtu: int) -> bytes:
    """The kernel invents none, where it knows IPv6: on no link of smaller packets than that asks for."""
    if 0 < mtu < IPV6_MTU or not Path("/proc/net/if_inet6").exists():
        return b""
    return attribute(FAMILIES, attribute(socket.AF_INET6, attribute(ADDRESS_MODE, b"\1")))


class Netlink:
    """A socket to the network namespace in which it was made. A refusal is an OSError with the kernel's reason."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(SECONDS)
        self._socket.bind((0, 0))
        for option in (SHORT_ERRORS, EXPLAIN_ERRORS):
            with contextlib.suppress(OSError):  # a kernel before 4.12 gives the number of an error alone
                self._socket.setsockopt(NETLINK, option, 1)

    def close(self) -> None:
        self._socket.close()

    def add_bridge(self, name: str) -> None:
        self._add(name, "bridge", attribute(SNOOPING, b"\0"))

    def add_pair(self, name: str, peer: str, namespace: int | None = None) -> None:
        """Two ends of a link; the peer goes into the namespace behind an open file."""
        where = b"" if namespace is None else _u32(NAMESPACE, namespace)
        self._add(name, "veth", attribute(PEER, ANY_LINK, _name(peer), where))

    def set_up(self, name: str, mtu: int = 0, master: str | None = None) -> None:
        """Switch a link on, perhaps as a port of a bridge."""
        options = [_u32(MTU, mtu)] * bool(mtu)
        options += [_u32(MASTER, self.index(master))] if master else []
        ipv6 = _no_ipv6_address(mtu) if name != "lo" else b""
        self._ask(f"set {name} up", NEW_LINK, ACK, LINK.pack(0, 0, 0, UP, UP), _name(name), *options, ipv6)

    def unplug(self, name: str) -> None:
        """Take a port out of its bridge."""
        self._ask(f"unplug {name}", NEW_LINK, ACK, ANY_LINK, _name(name), _u32(MASTER, 0))

    def add_address(self, name: str, address: str, prefix: int) -> None:
        head = ADDRESS.pack(socket.AF_INET, prefix, 0, 0, self.index(name))
        ends = [attribute(end, socket.inet_aton(address)) for end in (ADDRESS_THERE, ADDRESS_HERE)]
        self._ask(f"add {address}", NEW_ADDRESS, ACK | CREATE | EXCLUSIVE, head, *ends)

    def limit(self, name: str, rate: int, burst: int, queue: int) -> None:
        """A token bucket (tbf) of `rate` bytes a second; it may be there already, with packets in it."""
        short = RATE.pack(0, ETHERNET, 0, 0, 0, min(rate, 0xFFFFFFFF))
        fixed = attribute(TBF_FIXED, short, bytes(RATE.size), BUCKET.pack(queue, 0, 0))
        exact = attribute(TBF_RATE, struct.pack("=Q", rate)), _u32(TBF_BURST, burst)
        self._add_queue(name, LIMIT_HANDLE, ROOT, "tbf", fixed, *exact)

    def free(self, name: str) -> None:
        """No limit."""
        self._ask(f"free {name}", DELETE_QUEUE, ACK, QUEUE.pack(0, self.index(name), 0, ROOT, 0))

    def index(self, name: str) -> int:
        return int(LINK.unpack_from(self._link(name))[2])

    def counts(self, name: str) -> tuple[int, int]:
        """Bytes received and sent."""
        _, _, received, sent = COUNTS.unpack_from(attributes(self._link(name)[LINK.size :])[STATS])
        return received, sent

    def _link(self, name: str) -> bytes:
        return self._ask(f"find {name}", GET_LINK, 0, ANY_LINK, _name(name))

    def _add(self, name: str, kind: str, *options: bytes) -> None:
        info = attribute(INFO, _text(INFO_KIND, kind), attribute(INFO_DATA, *options))
        self._ask(f"add {kind} {name}", NEW_LINK, ACK | CREATE | EXCLUSIVE, ANY_LINK, _name(name), info)

    def _add_queue(self, name: str, handle: int, parent: int, kind: str, *options: bytes) -> None:
        head = QUEUE.pack(0, self.index(name), handle, parent, 0)
        what = _text(QUEUE_KIND, kind), attribute(QUEUE_OPTIONS, *options)
        self._ask(f"add {kind} to {name}", NEW_QUEUE, ACK | CREATE | REPLACE, head, *what)

    def _ask(self, what: str, kind: int, flags: int, *parts: bytes) -> bytes:
        """The reply without its header; raise where the kernel refuses."""
        body = b"".join(parts)
        self._socket.send(HEADER.pack(HEADER.size + len(body), kind, REQUEST | flags, 0, 0) + body)
        data = self._socket.recv(1 << 16)
        length, kind, flags, _, _ = HEADER.unpack_from(data)
        reply = data[HEADER.size : length]
        number = -struct.unpack_from("=i", reply)[0] if kind == ERROR else 0
        if number:
            words = attributes(reply[4 + HEADER.size :]).get(REASON, b"") if flags & EXPLAINED else b""
            raise OSError(number, f"{what}: {words.rstrip(bytes(1)).decode() or os.strerror(number)}")
        return reply
