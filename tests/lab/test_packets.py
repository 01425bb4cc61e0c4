"""What loss takes of a large packet: single frames of the wire, each with its chance. No root needed."""

from __future__ import annotations

import random
import socket
import struct

import pytest

from narrowcast.lab.delay import Losses
from narrowcast.lab.packets import FRAME, HEADER, PLAIN, TCP4, TCP6, parts, without

OPTIONS, SIZE = bytes(range(12)), 1000
SEQUENCE = (1 << 32) - 2500  # it goes round within the packet


def words(data: bytes) -> int:
    """The sum of 16-bit words in ones' complement, which checksums are made of."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    return total % 0xFFFF


def large(kind: int, payload: bytes) -> bytes:
    """A packet as a TAP device gives it, with a FIN at its end and a CWR at its beginning."""
    ip, tcp = 20 if kind == TCP4 else 40, 20 + len(OPTIONS)
    ends = bytes(range(8)) if kind == TCP4 else bytes(range(32))
    begun = words(ends + struct.pack(">II", 6, tcp + len(payload)))
    if kind == TCP4:
        head = struct.pack(">BBHHHBBH", 0x45, 0, ip + tcp + len(payload), 65535, 0, 64, 6, 0) + ends
    else:
        head = struct.pack(">IHBB", 6 << 28, tcp + len(payload), 6, 64) + ends
    segment = struct.pack(">HHIIBBHHH", 1, 2, SEQUENCE, 3, tcp // 4 << 4, 0x99, 4, begun, 0) + OPTIONS
    virtual = HEADER.pack(1, kind | 0x80, 14 + ip + tcp, SIZE, 14 + ip, 16)
    return virtual + bytes(12) + b"\x08\x00" + head + segment + payload


@pytest.mark.parametrize("kind", [TCP4, TCP6])
@pytest.mark.parametrize("lost", [{0}, {6}, {1, 2, 4}, {0, 1, 2, 3, 4, 5}, set(range(7))])
def test_what_stays_are_frames_with_right_headers(kind: int, lost: set[int]) -> None:
    payload = random.Random(1).randbytes(6 * SIZE + 34)
    packet = large(kind, payload)
    assert parts(packet) == 7
    got: dict[int, bytes] = {}
    for piece in without(packet, lost):
        flags, how, _, size, begins, _ = HEADER.unpack_from(piece)
        tcp = HEADER.size + begins
        _, _, sequence, _, offset, bits, _, check, _ = struct.unpack_from(">HHIIBBHHH", piece, tcp)
        data = piece[tcp + (offset >> 4) * 4 :]
        first = (sequence - SEQUENCE) % (1 << 32) // SIZE
        assert (flags, how & 0x7F, size) == ((1, kind, SIZE) if len(data) > SIZE else (1, PLAIN, 0))
        for part in range(first, first + parts(piece)):
            got[part] = data[(part - first) * SIZE : (part - first + 1) * SIZE]
        assert bits & 0x80 == (0x80 if first == 0 else 0)
        assert bits & 0x09 == (0x09 if first + parts(piece) == 7 else 0)
        ip, ends = piece[FRAME:tcp], piece[FRAME + 12 : tcp] if kind == TCP4 else piece[FRAME + 8 : tcp]
        if kind == TCP4:
            assert words(ip) == 0
            assert struct.unpack_from(">HH", ip, 2) == (len(piece) - FRAME, (65535 + first) % 65536)
        else:
            assert struct.unpack_from(">H", ip, 4) == (len(piece) - tcp,)
        assert check % 0xFFFF == words(ends + struct.pack(">II", 6, len(piece) - tcp))
        assert piece[tcp + 20 : tcp + 32] == OPTIONS
    assert got == {part: payload[part * SIZE : (part + 1) * SIZE] for part in set(range(7)) - lost}


def test_a_packet_of_one_frame_is_lost_whole() -> None:
    plain = HEADER.pack(0, PLAIN, 0, 0, 0, 0) + socket.inet_aton("10.9.0.1") * 10
    assert parts(plain) == 1
    assert list(without(plain, [0])) == []


def test_losses_are_right_on_average_and_do_not_hang_on_how_packets_come() -> None:
    share, count = 0.02, 200_000
    once = Losses(share, seed=3).of(count)
    assert len(once) == pytest.approx(share * count, rel=0.06)
    losses, apart, begin = Losses(share, seed=3), [], 0
    for size in random.Random(0).choices(range(1, 45), k=5000):
        apart += [begin + lost for lost in losses.of(size)]
        begin += size
    assert apart == [lost for lost in once if lost < begin]
    assert Losses(share, seed=4).of(1000) != Losses(share, seed=3).of(1000)
    assert Losses(0.0, seed=3).of(count) == []
