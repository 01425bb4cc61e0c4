"""A lab's line to its supervisor: starts it, asks it, ends it; and finds what a lab left behind.

Nothing here imports torch: the supervisor, which speaks through the same socket, must start at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from narrowcast.lab import syscalls

MARK = "narrowcast-lab"
"""In the command line of every guard."""
LENGTH = struct.Struct("!I")
MOST_FDS = 8
PACKAGE = Path(__file__).parents[1]
# A stand-in for the package: PID 1 then imports lab/ alone, not torch.
BOOT = f"""
import sys, types
narrowcast = sys.modules["narrowcast"] = types.ModuleType("narrowcast")
narrowcast.__path__ = [{str(PACKAGE)!r}]
from narrowcast.lab.supervisor import main
main()
"""
CLOSE_SECONDS = 20

Memory = Literal["own", "shared"]
"""Whether each host has a /dev/shm of its own, or all hosts of the lab have one."""


class LabError(RuntimeError):
    """The lab cannot be set up, or a command in it failed: what went wrong, what was found, what to do."""


class MessageSocket:
    """One end of a socket pair: JSON behind a length, file descriptors beside it.

    `receive` returns None when the other end is gone.
    """

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


class Connection:
    """The guard as a child process, and a socket to PID 1. `ask` may be called from any thread."""

    def __init__(self, hosts: int, memory: Memory = "own") -> None:
        ours, theirs = socket.socketpair()
        owner = (str(os.getpid()), str(syscalls.started(os.getpid())))
        command = [sys.executable, "-I", "-S", "-c", BOOT, MARK, *owner, str(theirs.fileno()), str(hosts), memory]
        self._lock = threading.Lock()
        self._channel = MessageSocket(ours)
        with theirs:
            # a session of its own: Ctrl-C is for us, and we tell the ranks
            self.guard = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        ready = self._channel.receive()
        if ready is None or "error" in ready[0]:
            why = ready[0]["error"] if ready else "the supervisor ended"
            raise LabError(f"cannot make namespaces: {why}; in a container, start it with --privileged")

    def ask(self, do: str, fds: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """A method of the supervisor, by name, and its reply."""
        with self._lock:
            reply = self._exchange({"do": do, **arguments}, fds)
        if reply is None:
            raise LabError("the lab's supervisor is gone; open a new lab")
        if "error" in reply:
            raise LabError(reply["error"])
        return reply

    def _exchange(self, message: dict[str, Any], fds: Sequence[int]) -> dict[str, Any] | None:
        try:
            self._channel.send(message, fds)
            answer = self._channel.receive()
        except OSError:
            return None
        except BaseException:
            self._channel.close()  # Ctrl-C in the middle: the next request would get this one's reply
            raise
        return answer[0] if answer else None

    def close(self) -> None:
        """End PID 1, and with it every process of the lab. Returns when none is left."""
        self._channel.close()
        try:
            self.guard.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.guard.kill()  # which kills PID 1
            self.guard.wait()


@dataclass(frozen=True)
class Leftover:
    """A lab without an owner: its guard could not do its work (it was stopped, say)."""

    guard: int
    owner: int


def leftovers() -> list[Leftover]:
    """Guards of this pid namespace (in another one the owner's number means another process) whose owner is gone."""
    here = _pid_namespace(os.getpid())
    abandoned = []
    for pid in syscalls.processes():
        words = syscalls.command_line(pid)
        if MARK in words[:-5] and _pid_namespace(pid) == here:
            owner, began = words[words.index(MARK) + 1 :][:2]
            if syscalls.started(int(owner)) != began:
                abandoned.append(Leftover(pid, int(owner)))
    return abandoned


def clean() -> list[Leftover]:
    """Kill each leftover's guard; the kernel then kills its PID 1 and takes everything down."""
    abandoned = leftovers()
    for leftover in abandoned:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leftover.guard, signal.SIGKILL)
    return abandoned


def _pid_namespace(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None
