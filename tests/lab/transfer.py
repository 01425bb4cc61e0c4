"""A rank that moves bytes over plain TCP, run as a script: argv are source host, destination host and bytes.

The destination asks for the bytes, and prints how long it took from then to the last one, and whether each was the one
expected. A destination that is late to ask makes no link look quicker than it is: nothing is on its way before.
Other ranks end at once. It needs no torch and starts in a moment.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress

BLOCK = bytes(range(256)) * 256


def send(to: str, size: int) -> None:
    with connected(to) as peer:
        peer.recv(1)  # they are asked for
        for begin in range(0, size, len(BLOCK)):
            peer.sendall(BLOCK[: size - begin])
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)  # until the other side has everything


def connected(to: str) -> socket.socket:
    until = time.monotonic() + 60
    while True:
        with suppress(OSError):  # it does not listen yet
            return socket.create_connection((to, 5000), timeout=60)
        assert time.monotonic() < until, f"nobody listens on {to}"
        time.sleep(0.02)


def receive(size: int) -> dict[str, object]:
    with socket.create_server(("", 5000)) as server:
        peer, _ = server.accept()
    with peer:
        got, start = bytearray(), time.perf_counter()
        peer.sendall(b"?")
        while part := peer.recv(1 << 20):
            got += part
        seconds = time.perf_counter() - start
    expected = (BLOCK * (size // len(BLOCK) + 1))[:size]
    return {"seconds": seconds, "intact": got == expected}


def main() -> None:
    source, destination, size = map(int, sys.argv[1:])
    me = int(os.environ["GROUP_RANK"])
    if me == source:
        send(f"10.9.0.{destination + 1}", size)
    elif me == destination:
        print(json.dumps(receive(size)))


if __name__ == "__main__":
    main()
