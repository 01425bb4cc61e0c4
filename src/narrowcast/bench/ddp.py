"""DDP training steps on rate-limited links: plain, torch's own hooks, and `attach`, all in the same run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from narrowcast.lab import Lab

WIRES = ("plain", "fp16-hook", "powersgd-4", "bf16", "int8/256", "e5m2+aps", "int4/128", "int4/128+ef")
STEPS = 5
WORKER = "narrowcast.bench.ddp_worker"
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(8 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30), "MALLOC_ARENA_MAX": "1"}
"""glibc otherwise gives the memory of large gradients back at every step, and getting it anew takes a fifth of the
compute time. For all wires alike, the plain one included."""


def run(hosts: int, rate: str | None, wires: Sequence[str] = WIRES, steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """A row for each wire: step time, the part of it that communication adds, and the error of the mean gradient."""
    with Lab(hosts, rate) as lab:
        words = [sys.executable, "-m", WORKER, str(steps), *wires]
        done = lab.run(words, env=KEEP_MEMORY, capture=True, timeout=1800).check()
    for line in done.lines:
        if line.rank == 0 and line.stream == "stdout" and line.text.startswith("{"):
            yield json.loads(line.text)
