"""Packets as a TAP device hands them over, as large as TCP made them: their frames, and what stays without some.

A packet is a virtio_net header, then an Ethernet frame. The header says where the frame is to be cut (`size` bytes of
data in each part) and where its checksum belongs: both are done by whoever takes it from the other end.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from itertools import groupby

HEADER = struct.Struct("=BBHHHH")  # flags, kind, length of all headers, size, where the checksum begins, and its offset
PLAIN, TCP4, TCP6, KIND = 0, 1, 4, 0x7F
FRAME = HEADER.size + 14
"""Where the IP header begins."""
TOTAL4, NUMBER4, SUM4, LENGTH6, HEADER6 = 2, 4, 10, 4, 40
SEQUENCE, DATA_OFFSET, FLAGS, TCP_SUM = 4, 12, 13, 16
LAST_ONLY, FIRST_ONLY = 0x09, 0x80
"""FIN and PSH; CWR."""
U16, U32 = struct.Struct(">H"), struct.Struct(">I")


def parts(packet: bytes) -> int:
    """How many packets of the wire it is."""
    kind, size, data = _cut(packet)
    return 1 if kind == PLAIN else max(1, -(-(len(packet) - data) // size))


def without(packet: bytes, lost: Collection[int]) -> Iterator[bytes]:
    """What is left of it when these parts are lost: a packet for each run of parts that stay."""
    count = parts(packet)
    for gone, run in groupby(range(count), lost.__contains__):
        if not gone:
            stay = list(run)
            yield packet if count == 1 else _run(packet, stay[0], stay[-1], count)


def _run(packet: bytes, first: int, last: int, count: int) -> bytes:
    kind, size, data = _cut(packet)
    payload = packet[data + first * size : data + (last + 1) * size]
    head, tcp = bytearray(packet[:data]), _tcp(packet)
    if len(payload) <= size:
        flags, _, _, _, begins, offset = HEADER.unpack_from(head)
        HEADER.pack_into(head, 0, flags, PLAIN, 0, 0, begins, offset)
    if kind == TCP4:
        _ipv4(head, len(head) + len(payload) - FRAME, first)
    else:
        U16.pack_into(head, FRAME + LENGTH6, len(head) + len(payload) - FRAME - HEADER6)
    U32.pack_into(head, tcp + SEQUENCE, (U32.unpack_from(head, tcp + SEQUENCE)[0] + first * size) % (1 << 32))
    head[tcp + FLAGS] &= ~((LAST_ONLY if last + 1 < count else 0) | (FIRST_ONLY if first else 0))
    # not a checksum yet but its beginning, in which the length is the only thing that changes
    old, new = len(packet) - tcp, len(head) + len(payload) - tcp
    U16.pack_into(head, tcp + TCP_SUM, _fold(U16.unpack_from(head, tcp + TCP_SUM)[0] + new + (0xFFFF ^ old)))
    return bytes(head) + payload


def _ipv4(head: bytearray, total: int, first: int) -> None:
    """Its length, its number and the checksum of its header."""
    U16.pack_into(head, FRAME + TOTAL4, total)
    U16.pack_into(head, FRAME + NUMBER4, (U16.unpack_from(head, FRAME + NUMBER4)[0] + first) % (1 << 16))
    U16.pack_into(head, FRAME + SUM4, 0)
    words = struct.unpack_from(f">{2 * (head[FRAME] & 0x0F)}H", head, FRAME)
    U16.pack_into(head, FRAME + SUM4, 0xFFFF ^ _fold(sum(words)))


def _cut(packet: bytes) -> tuple[int, int, int]:
    """PLAIN, TCP4 or TCP6; bytes of data in each part; where the data begins."""
    _, kind, _, size, _, _ = HEADER.unpack_from(packet)
    kind &= KIND
    if kind == PLAIN:
        return PLAIN, 0, len(packet)
    tcp = _tcp(packet)
    return kind, size, tcp + (packet[tcp + DATA_OFFSET] >> 4) * 4


def _tcp(packet: bytes) -> int:
    return HEADER.size + int(HEADER.unpack_from(packet)[4])


def _fold(total: int) -> int:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
