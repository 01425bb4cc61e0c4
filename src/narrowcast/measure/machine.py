"""On what something was measured, and whether something else used its processors meanwhile: what /proc says of all,
less what our ranks used.
"""

from __future__ import annotations

import os
import platform
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STAT, BOOT = Path("/proc/stat"), Path("/proc/sys/kernel/random/boot_id")
USER, NICE, STEAL = 0, 1, 7
"""Places in the first line of /proc/stat. What the kernel does for our packets is not in them."""
LOOK = 1.0
"""Seconds of a look at a machine that should be idle."""


def used_by_all(text: str) -> float:
    """Seconds that programs ran, on all processors together, since the machine was started; other guests' too."""
    numbers = [int(word) for word in text.split("\n", 1)[0].split()[1:]]
    ticks = sum(numbers[place] for place in (USER, NICE, STEAL) if place < len(numbers))
    return ticks / os.sysconf("SC_CLK_TCK")


def _machine() -> int:
    """The same number on every rank of one machine, whatever its host is called."""
    return zlib.crc32(BOOT.read_bytes()) if BOOT.exists() else zlib.crc32(os.uname().nodename.encode())


class LoadWatch:
    """From its making to `share`: how much of the processors others used."""

    def __init__(self) -> None:
        self._began, self._all, self._own = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        every = used_by_all(STAT.read_text()) if STAT.exists() else 0.0
        return time.monotonic(), every, os.times().user

    def alone(self) -> float:
        """The share that others used, where this process is the only one of ours."""
        return share_of_others([(0, *self._since())])

    def together(self) -> float:
        """Collective: the largest share on a machine of the group, all ranks of it being ours."""
        mine = torch.tensor([float(_machine()), *self._since()], dtype=torch.float64)
        if torch.cuda.is_available() and "nccl" in dist.get_backend_config():
            mine = mine.cuda()
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        return share_of_others([(int(row[0]), float(row[1]), float(row[2]), float(row[3])) for row in rows])

    def _since(self) -> tuple[float, float, float]:
        now, every, own = self._now()
        return every - self._all, own - self._own, (now - self._began) * (os.cpu_count() or 1)


def share_of_others(ranks: Sequence[tuple[int, float, float, float]]) -> float:
    """Of ranks as (machine, seconds used by all, seconds used by the rank, seconds there were): the busiest machine."""
    worst = 0.0
    for machine in {rank[0] for rank in ranks}:
        own = [rank for rank in ranks if rank[0] == machine]
        there, ours = max(rank[3] for rank in own), sum(rank[2] for rank in own)
        every = max(rank[1] for rank in own)
        worst = max(worst, (every - ours) / there if there else 0.0)
    return min(worst, 1.0)


def wait_until_quiet(seconds: float, most: float) -> float:
    """Look until others use less than `most` of the processors, for so many seconds; the last share that was seen."""
    until = time.monotonic() + seconds
    while True:
        watch = LoadWatch()
        time.sleep(LOOK)
        share = watch.alone()
        if share < most or time.monotonic() >= until:
            return share


def describe_machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.release()}",
    }


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30))
    except (ValueError, OSError, AttributeError):
        return None
