"""FSDP2 training steps on rate-limited links: plain, and gradients and parameters through codecs, all in one run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from narrowcast.bench.fsdp_worker import wires as parsed
from narrowcast.codecs import codec as codec_named
from narrowcast.lab import Lab

WIRES = (
    "plain",
    "gradients=int8/256",
    "gradients=int4/128+ef",
    "parameters=e4m3fn/128",
    "gradients=int8/256,parameters=e4m3fn/128",
)
STEPS = 10
WORKER = "narrowcast.bench.fsdp_worker"

TARGETS = {("200mbit", WIRES[-1]): (3.5, 2.5)}
"""How many times fewer bytes and faster steps we promise on 4 hosts, by rate and wire."""


def run(hosts: int, rate: str | None, wires: Sequence[str] = WIRES, steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """A row for each wire: the median step and what the link of rank 0 carried, beside plain FSDP2 where it was run."""
    for wire in wires:
        for spec in parsed(wire).values():
            codec_named(spec)
    with Lab(hosts, rate) as lab:
        words = [sys.executable, "-m", WORKER, str(steps), *wires]
        done = lab.run(words, capture=True, timeout=1800).check()
    plain: dict[str, Any] | None = None
    for line in done.lines:
        if line.rank == 0 and line.stream == "stdout" and line.text.startswith("{"):
            row = json.loads(line.text)
            plain = row if row["wire"] == "plain" else plain
            yield row | compared(row, plain, hosts, rate)


def compared(row: dict[str, Any], plain: dict[str, Any] | None, hosts: int, rate: str | None) -> dict[str, Any]:
    if plain is None:
        return {"fewer_bytes": None, "speedup": None, "target": None, "met": None}
    fewer, faster = plain["link_bytes"] / row["link_bytes"], plain["step"] / row["step"]
    target = TARGETS.get((str(rate), row["wire"])) if hosts == 4 else None
    met = None if target is None else fewer >= target[0] and faster >= target[1]
    return {"fewer_bytes": fewer, "speedup": faster, "target": target, "met": met}
