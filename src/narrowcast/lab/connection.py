"""A lab's line to its supervisor: starts it, asks it, ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import syscalls
from .channel import Channel
from .errors import LabError
from .supervisor import MARK

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


class Connection:
    """The guard as a child process, and a socket to PID 1. `ask` may be called from any thread."""

    def __init__(self, hosts: int) -> None:
        ours, theirs = socket.socketpair()
        owner = (str(os.getpid()), str(syscalls.started(os.getpid())))
        words = [sys.executable, "-I", "-S", "-c", BOOT, MARK, *owner, str(theirs.fileno()), str(hosts)]
        self._lock = threading.Lock()
        self._channel = Channel(ours)
        with theirs:
            # a session of its own: Ctrl-C is for us, and we tell the ranks
            self.guard = subprocess.Popen(
                words,
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
