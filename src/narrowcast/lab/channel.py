"""Messages between a lab and its supervisor: JSON behind a length, file descriptors beside it."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

LENGTH = struct.Struct("!I")
MOST_FDS = 8


class Channel:
    """One end of a socket pair. `receive` returns None when the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        body = json.dumps(message).encode()
        socket.send_fds(self._socket, [LENGTH.pack(len(body))], list(fds))
        self._socket.sendall(body)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, LENGTH.size, MOST_FDS)
            body = self._read(LENGTH.unpack(head)[0]) if head else b""
        except ConnectionResetError:
            return None
        return (json.loads(body), fds) if body else None

    def _read(self, size: int) -> bytes:
        """Exactly `size` bytes, or none."""
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            if not part:
                return b""
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """End the conversation, even where a forked child holds a copy of the socket."""
        with contextlib.suppress(OSError):  # the other end went first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
