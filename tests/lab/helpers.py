"""Moving bytes in a lab, and looking for what a lab left behind."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.lab import Lab, Result
from narrowcast.lab.syscalls import started as began

TRANSFER = str(Path(__file__).with_name("transfer.py"))


def transfer(source: int, destination: int, size: int) -> list[str]:
    """The command that moves `size` bytes between two hosts."""
    return [sys.executable, "-I", "-S", TRANSFER, str(source), str(destination), str(size)]


def outcome(result: Result, destination: int) -> dict[str, Any]:
    return json.loads(result.check().text(destination))


def seconds_taken(lab: Lab, source: int, destination: int, size: int) -> float:
    found = outcome(lab.run(transfer(source, destination, size), capture=True, timeout=60), destination)
    assert found["intact"]
    return found["seconds"]


def rate_seen(lab: Lab, source: int, destination: int, size: int) -> float:
    """Mbit/s."""
    return size * 8 / 1e6 / seconds_taken(lab, source, destination, size)


TRIES = 8


def best_rate(lab: Lab, source: int, destination: int, size: int, enough: float) -> float:
    """Mbit/s of the quickest of several transfers, of which one that is quick enough is the last.

    A busy machine keeps a transfer from filling its link, and never makes one quicker: what the link holds shows in the
    quickest, and one that is too quick is too quick in any of them.
    """
    best = 0.0
    for _ in range(TRIES):
        best = max(best, rate_seen(lab, source, destination, size))
        if best >= enough:
            break
    return best


def running(lab: Lab, begins: str) -> int:
    """How many processes of a lab have a command line that begins so."""
    script = r"""for file in /proc/[0-9]*/cmdline; do tr '\0' ' ' <$file; echo; done 2>/dev/null | grep -c "$1" """
    result = lab.run(["sh", "-c", script, "sh", f"^{begins}"], capture=True, keep=True)
    return int(result.text(0))


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def interfaces() -> list[str]:
    """Of the machine itself: a lab must not add any."""
    return sorted(os.listdir("/sys/class/net"))


def references(namespaces: set[int]) -> list[str]:
    """All that keeps one of the network namespaces alive: processes in it, open files, mounts."""
    held = re.compile("|".join(rf"net:\[{inode}\]" for inode in namespaces) or "(?!)")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            links = [process / "ns/net", *(process / "fd").iterdir()]
            found += [str(link) for link in links if held.match(target(link))]
            mounts = (process / "mountinfo").read_text().splitlines()
            found += [f"{process}: {mount}" for mount in mounts if held.search(mount)]
    return found


def target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


@dataclass(frozen=True)
class Footprint:
    """A lab as the rest of the machine sees it: its processes and its network namespaces."""

    processes: dict[int, str]
    namespaces: set[int]

    @classmethod
    def of(cls, guard: int) -> Footprint:
        found = {pid: start for pid in family(guard) if (start := began(pid))}
        switch = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in found}
        links = [target(link) for pid in found for link in Path(f"/proc/{pid}/fd").iterdir()]
        opened = {int(match[1]) for link in links if (match := re.match(r"net:\[(\d+)\]", link))}
        return cls(found, (switch | opened) - {os.stat("/proc/self/ns/net").st_ino})

    def left(self) -> list[str]:
        """What is still there of it."""
        return [f"process {pid}" for pid, start in self.processes.items() if began(pid) == start] + references(
            self.namespaces
        )


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(member for child in children for member in family(child))]
