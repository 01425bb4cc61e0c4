"""The few system calls behind the lab that Python 3.11 does not offer, and /proc. Importing this calls none of them.

As a script it becomes another command:
    python syscalls.py PARENT COMMAND...      that is killed when its parent ends
    python syscalls.py enter FILE COMMAND...  in namespaces that PID 1 holds open: the three files from this number on
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

NEWNS, NEWUTS, NEWPID, NEWNET = 0x00020000, 0x04000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc(), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` name for new ones (for NEWPID: the children do)."""
    _call("unshare", flags)


def setns(fd: int) -> None:
    """Enter the namespace behind `fd`."""
    _call("setns", fd, 0)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    names = [None if text is None else text.encode() for text in (source, target, kind)]
    _call("mount", *names, ctypes.c_ulong(flags), None)


def die_with_parent() -> None:
    """Be killed when the thread that forked us ends, however it ends."""
    _call("prctl", PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def processes() -> Iterator[int]:
    """The number of every process that /proc shows."""
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def command_line(pid: int) -> list[str]:
    """A process's words; empty where it is gone or a kernel thread."""
    return _strings(pid, "cmdline")


def environment(pid: int) -> list[str]:
    """The variables that a process was started with, as NAME=value."""
    return _strings(pid, "environ")


def _strings(pid: int, file: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def started(pid: int) -> str | None:
    """When a process began, in ticks since boot: with its number, its identity. None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def main() -> None:
    first, *words = sys.argv[1:]
    if first == "enter":
        begin, *words = words
        # all of them, then in: the last one brings another /proc
        for fd in [os.open(f"/proc/1/fd/{int(begin) + k}", os.O_RDONLY) for k in range(3)]:
            setns(fd)
    else:
        die_with_parent()
        if os.getppid() != int(first):
            sys.exit("the process that started this one is gone")
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
