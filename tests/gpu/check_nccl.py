"""By hand on a machine with a GPU, root and MPS: NCCL ranks of a lab compute what the simulator does, and hear of
faults.

    PYTHONPATH=src:research python3 tests/gpu/check_nccl.py [--hosts 2,3,4,8] [--only bits,faults,training,...]

Prints a line for each check and how many passed; ends with 1 where one did not. Without a GPU it runs the same on the
CPU over Gloo.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from narrowcast.bench.ranks import lines_of
from narrowcast.lab import Lab, Line

RANK, FEATURES = (str(Path(__file__).with_name(name)) for name in ("nccl_rank.py", "nccl_features.py"))
RATE = "10gbit"
PARTS = ("bits", "training", "levels", "activations", "faults")
FAULTS = ("killed", "stopped", "raises", "cut off")
TIMEOUT, GRACE = 15, 5
"""Seconds: of the group, and beyond it."""
WATCHDOG = ("Watchdog caught collective operation timeout", "watchdog thread terminated with exception")
"""Torch's own words where a call does not end, and where a connection of NCCL has closed under one."""
HAS_GPU = torch.cuda.is_available()
Check = tuple[str, bool, str]


def in_lab(hosts: int, rate: str | None, command: list[str], ranks_per_host: int = 1) -> Iterator[Check]:
    """What the ranks say of their checks, as it comes, and that they end well."""
    heard: queue.SimpleQueue[Line] = queue.SimpleQueue()
    where, others = f"{hosts * ranks_per_host} ranks", list[str]()
    with Lab(hosts, rate, gpu=HAS_GPU) as lab:
        job = lab.start([sys.executable, *command], output=heard.put, timeout=300, ranks_per_host=ranks_per_host)
        for line in lines_of(job, heard):
            if not line.text.startswith("{"):
                others.append(line.text)
                continue
            fact = json.loads(line.text)
            yield f"{where}: {fact['check']}", fact["good"], "" if fact["good"] else f"rank {fact['rank']}"
        result = job.wait()
    yield f"{where} end with 0", result.ok, "" if result.ok else "\n".join(others)[-2000:]


def faults(kind: str) -> Iterator[Check]:
    """On four ranks, without MPS: what a killed client does to the others under it is not defined.

    Where a call of NCCL does not end, or its connection closes under it, torch's watchdog says so and ends the process:
    such a rank says nothing itself.
    """
    heard: list[tuple[float, Line]] = []
    with Lab(4, None, gpu=HAS_GPU, mps=False) as lab:
        result = lab.run(
            [sys.executable, RANK, "fault", kind],
            output=lambda line: heard.append((time.monotonic(), line)),
            timeout=TIMEOUT + 75,
            grace=TIMEOUT + 60,
        )
    for rank in range(3):
        own = [(at, line.text) for at, line in heard if line.rank == rank]
        began = next((at for at, text in own if text.startswith('{"step"')), None)
        named = next((line for line in own if _names_a_fault(line[1])), None)
        if began is None or named is None:
            yield (
                f"{kind}: rank {rank} hears of it",
                False,
                f"{result.summary()}\n" + "\n".join(t for _, t in own[-20:]),
            )
            continue
        seconds = named[0] - began
        good = seconds <= TIMEOUT + GRACE and '"error": ""' not in named[1] and rank not in result.ended
        yield f"{kind}: rank {rank} hears of it", good, f"{seconds:.1f} s, {named[1]}"


def _names_a_fault(text: str) -> bool:
    return text.startswith('{"error"') or any(words in text for words in WATCHDOG)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", default="2,3,4,8", help="of bits")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--faults", default=",".join(FAULTS), help="which of them")
    chosen = parser.parse_args()
    parts = chosen.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    began, passed, count = time.monotonic(), 0, 0

    def checks() -> Iterator[Check]:
        for hosts in map(int, chosen.hosts.split(",") if "bits" in parts else ()):
            yield from in_lab(hosts, None, [RANK, "bits"])
        if "training" in parts:
            yield from in_lab(4, None, [FEATURES, "training"])
        if "levels" in parts:
            yield from in_lab(2, RATE, [FEATURES, "levels"], ranks_per_host=2)
        if "activations" in parts:
            yield from in_lab(4, RATE, [FEATURES, "activations"])
        for kind in chosen.faults.split(",") if "faults" in parts else ():
            yield from faults(kind)

    for what, good, detail in checks():
        print(f"{'ok  ' if good else 'FAIL'} {what}{': ' + detail if detail else ''}", flush=True)
        passed, count = passed + good, count + 1
    where = "NCCL" if HAS_GPU else "Gloo, no GPU"
    print(f"{passed} of {count} checks passed on {where} in {time.monotonic() - began:.0f} s")
    return passed != count


if __name__ == "__main__":
    sys.exit(main())
