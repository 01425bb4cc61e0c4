"""Loss curves of FSDP2 training through codecs beside plain ones, on loopback: every seed is a pair.

Each run is kept as a file of its own, so a study that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WIRES = ("plain", "gradients=int8/256", "gradients=int4/128+ef", "gradients=int8/256,parameters=e4m3fn/128")
STEPS, SEEDS, RANKS = 500, 3, 2
WORKER = "narrowcast_research.bench.fsdp_curves_worker"
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t for 95 % on both sides, by degrees of freedom."""


def run(folder: Path, wires: Sequence[str] = WIRES, steps: int = STEPS, seeds: int = SEEDS) -> Iterator[dict[str, Any]]:
    """Every run that is not in the folder yet, and then all of them, one by one."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        for wire in wires:
            kept = folder / f"{re.sub('[^a-z0-9=+-]+', '_', wire)}-{steps}-{seed}.json"
            if not kept.exists():
                kept.with_suffix(".new").write_text(json.dumps(loopback(steps, seed, wire)))
                kept.with_suffix(".new").rename(kept)
            yield json.loads(kept.read_text())


def loopback(steps: int, seed: int, wire: str, ranks: int = RANKS) -> dict[str, Any]:
    """One run, each rank a process; none is left behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    words = [sys.executable, "-m", WORKER, str(steps), str(seed), wire]
    processes = [
        subprocess.Popen(words, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"bench fsdp-curves: a rank of {wire} ended with {[p.returncode for p in processes]}")
    return json.loads(outputs[0].strip().splitlines()[-1])


def compared(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each wire: the last held-out loss, and its difference to plain with the same seed, with a 95 % interval."""
    by_wire: dict[str, dict[int, dict[str, Any]]] = {}
    for one in runs:
        by_wire.setdefault(one["wire"], {})[one["seed"]] = one
    plain = by_wire.get("plain", {})
    return [_row(wire, found, plain) for wire, found in by_wire.items()]


def _row(wire: str, found: dict[int, dict[str, Any]], plain: dict[int, dict[str, Any]]) -> dict[str, Any]:
    last = [_last(one) for one in found.values()]
    pairs = [_last(found[seed]) - _last(plain[seed]) for seed in found if seed in plain]
    curve = [_apart(found[seed], plain[seed]) for seed in found if seed in plain]
    mean, half = interval(pairs)
    facts = {"wire": wire, "seeds": len(found), "held_out": statistics.mean(last), "values": last}
    return {**facts, "difference": mean, "half_width": half, "largest_gap": max(curve, default=math.nan)}


def _last(one: dict[str, Any]) -> float:
    return float(list(one["held_out"].values())[-1])


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two held-out curves."""
    return max(abs(a - b) for a, b in zip(one["held_out"].values(), other["held_out"].values(), strict=True))


def interval(pairs: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval; nan where one pair alone tells nothing."""
    if len(pairs) < 2:
        return (pairs[0] if pairs else math.nan), math.nan
    t = STUDENT.get(len(pairs) - 1, 1.96)
    return statistics.mean(pairs), t * statistics.stdev(pairs) / math.sqrt(len(pairs))
