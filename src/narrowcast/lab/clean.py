"""What a lab left behind: a guard whose owner is gone and that could not do its work (it was stopped, say)."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass

from . import syscalls
from .supervisor import MARK


@dataclass(frozen=True)
class Leftover:
    """A lab without an owner."""

    guard: int
    owner: int


def leftovers() -> list[Leftover]:
    """Guards of this pid namespace (in another one the owner's number means another process) whose owner is gone."""
    here = _pid_namespace(os.getpid())
    found = []
    for pid in syscalls.processes():
        words = syscalls.command_line(pid)
        if MARK in words[:-4] and _pid_namespace(pid) == here:
            owner, began = words[words.index(MARK) + 1 :][:2]
            if syscalls.started(int(owner)) != began:
                found.append(Leftover(pid, int(owner)))
    return found


def clean() -> list[Leftover]:
    """Kill each leftover's guard; the kernel then kills its PID 1 and takes everything down."""
    found = leftovers()
    for leftover in found:
        with suppress(ProcessLookupError):
            os.kill(leftover.guard, signal.SIGKILL)
    return found


def _pid_namespace(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None
