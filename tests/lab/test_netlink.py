"""What the lab asks of the kernel, and what the kernel then says that it has: in a namespace of the test's own."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from narrowcast.lab import Lab, syscalls
from narrowcast.lab.netlink import HEADER, LINK, QUEUE, Netlink, attribute, attributes
from narrowcast.lab.topology import parse_rate

GET_QUEUE, DUMP = 38, 0x301
TBF_FIXED, TBF_RATE = 1, 4


def in_a_namespace(test: Callable[[Netlink], None]) -> None:
    """Run a test in a thread that has left for an empty network namespace; the kernel takes it down with the thread."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            syscalls.unshare(syscalls.NEWNET)
            with closing(Netlink()) as netlink:
                test(netlink)
        except BaseException as error:  # noqa: BLE001  it is raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    for error in errors:
        raise error


def links() -> set[str]:
    """Of the namespace that this thread is in, as /proc shows them."""
    return {line.split(":")[0].strip() for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]}


def queue_of(netlink: Netlink, name: str) -> tuple[str, dict[int, bytes]]:
    """The kind and options of a link's queue, or nothing: the lab itself never asks for it."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as asked:
        body = QUEUE.pack(0, netlink.index(name), 0, 0, 0)
        asked.send(HEADER.pack(HEADER.size + len(body), GET_QUEUE, DUMP, 0, 0) + body)
        data = asked.recv(1 << 16)
    while len(data) > HEADER.size + QUEUE.size:
        length = HEADER.unpack_from(data)[0]
        message, data = data[HEADER.size : length], data[(length + 3) // 4 * 4 :]
        found = attributes(message[QUEUE.size :])
        if QUEUE.unpack_from(message)[1] == netlink.index(name):
            return found[1].rstrip(b"\0").decode(), attributes(found.get(2, b""))
    return "", {}


pytestmark = pytest.mark.usefixtures("needs_lab")


def test_links_are_made_and_found() -> None:
    def test(netlink: Netlink) -> None:
        netlink.add_bridge("rack0")
        netlink.add_pair("up0", "down0")
        netlink.set_up("up0", mtu=9000, master="rack0")
        assert links() == {"lo", "rack0", "up0", "down0"}
        assert len({netlink.index(name) for name in links()}) == 4
        found = attributes(netlink._link("up0")[LINK.size :])
        assert struct.unpack("=I", found[4]) == (9000,)
        assert struct.unpack("=I", found[10]) == (netlink.index("rack0"),)
        assert LINK.unpack_from(netlink._link("up0"))[3] & 1  # it is up
        netlink.unplug("up0")
        assert 10 not in attributes(netlink._link("up0")[LINK.size :])

    in_a_namespace(test)


def test_a_peer_is_born_in_the_other_namespace() -> None:
    def test(netlink: Netlink) -> None:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        syscalls.unshare(syscalls.NEWNET)
        there = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        with closing(Netlink()) as other:
            netlink.add_pair("v0", "eth0", namespace=there)  # a socket stays in the namespace where it was made
            assert links() == {"lo", "eth0"}
            other.add_address("eth0", "10.9.0.1", 24)
            other.set_up("eth0", mtu=1500)
        syscalls.setns(home)
        assert links() == {"lo", "v0"}
        os.close(home)
        os.close(there)

    in_a_namespace(test)


@pytest.mark.parametrize("text", ["1mbit", "200mbit", "1gbit", "10gbit", "40gbit", "100gbit"])
def test_the_kernel_has_the_rate_that_was_given(text: str) -> None:
    """Also rates that do not fit the 32 bits in which the kernel once took bytes a second: 34 Gbit/s and more."""
    rate = parse_rate(text)

    def test(netlink: Netlink) -> None:
        netlink.add_pair("v0", "v1")
        for again in (parse_rate("1gbit"), rate):  # set, then changed
            netlink.limit("v0", **again.bucket)
        kind, options = queue_of(netlink, "v0")
        short, limit, buffer = struct.unpack_from("=8xI12xII", options[TBF_FIXED])
        exact = struct.unpack("=Q", options[TBF_RATE])[0] if TBF_RATE in options else short
        assert (kind, exact, limit) == ("tbf", rate.bits_per_second / 8, rate.queue)
        # the bucket, which the kernel keeps in ticks of 64 ns
        assert buffer * 64e-9 * exact == pytest.approx(rate.burst, rel=0.01)
        netlink.free("v0")
        assert queue_of(netlink, "v0")[0] != "tbf"

    in_a_namespace(test)


def test_a_refusal_has_the_kernels_reason() -> None:
    def test(netlink: Netlink) -> None:
        netlink.add_bridge("rack0")
        for call, reason in (
            (lambda: netlink.add_bridge("rack0"), r"add bridge rack0: File exists"),
            (lambda: netlink.set_up("v9"), r"set v9 up: No such device"),
            (lambda: netlink.limit("v9", 1, 1, 1), r"find v9: No such device"),
            (lambda: netlink._add_queue("rack0", 1 << 16, 0xFFFFFFFF, "no-such-queue"), r"kind is unknown"),
        ):
            with pytest.raises(OSError, match=reason):
                call()

    in_a_namespace(test)


def test_attributes_come_back_as_they_went() -> None:
    sent = {1: b"", 2: b"x", 3: b"four", 4: b"fives"}
    assert attributes(b"".join(attribute(kind, value) for kind, value in sent.items())) == sent


def test_no_program_of_the_system_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without iproute2: nothing at all is on the path."""
    monkeypatch.setenv("PATH", "/nowhere")
    with Lab(2, "1gbit", racks=[[0], [1]], uplink="500mbit") as lab:
        lab.cut(1)
        lab.heal(1)
        lab.set_rate(0, None)
        assert [(counter.sent, counter.received) for counter in lab.counters()] != []
