"""By hand on a machine with a GPU, root and MPS: NCCL ranks of a lab compute what the simulator does, and hear of
faults.

    PYTHONPATH=src:research python3 tests/gpu/check_nccl.py [--hosts 2,3,4,8] [--only bits|faults]

Prints a line for each check and how many passed; ends with 1 where one did not. About three minutes with cold kernels.
Without a GPU it runs the same on the CPU over Gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from narrowcast.lab import Lab

RANK = str(Path(__file__).with_name("nccl_rank.py"))
FAULTS = ("killed", "stopped", "raises", "cut off")
TIMEOUT, GRACE = 15, 5
"""Seconds: of the group, and beyond it."""
HAS_GPU = torch.cuda.is_available()
Check = tuple[str, bool, str]


def bits(hosts: int) -> Iterator[Check]:
    """Every algorithm, spec and collective on so many ranks."""
    with Lab(hosts, None, gpu=HAS_GPU) as lab:
        result = lab.run([sys.executable, RANK, "bits"], capture=True, timeout=300)
    said = [json.loads(line.text) for line in result.lines if line.text.startswith("{")]
    for fact in said:
        yield f"{hosts} ranks: {fact['check']}", fact["good"], "" if fact["good"] else f"rank {fact['rank']}"
    yield f"{hosts} ranks end with 0", result.ok, "" if result.ok else result.text()[-2000:]


def faults(kind: str) -> Iterator[Check]:
    """On four ranks, without MPS: what a killed client does to the others under it is not defined."""
    with Lab(4, None, gpu=HAS_GPU, mps=False) as lab:
        result = lab.run([sys.executable, RANK, "fault", kind], capture=True, timeout=TIMEOUT + 75, grace=TIMEOUT + 60)
    said = {
        fact["rank"]: fact for line in result.lines if line.text.startswith("{") for fact in [json.loads(line.text)]
    }
    for rank in range(3):
        fact = said.get(rank)
        if fact is None:
            yield f"{kind}: rank {rank} hears of it", False, result.summary()
            continue
        good = bool(fact["error"]) and fact["seconds"] <= TIMEOUT + GRACE
        yield f"{kind}: rank {rank} hears of it", good, f"{fact['seconds']} s, {fact['error']}: {fact['text']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", default="2,3,4,8")
    parser.add_argument("--only", choices=("bits", "faults"))
    chosen = parser.parse_args()
    began, passed, count = time.monotonic(), 0, 0

    def checks() -> Iterator[Check]:
        if chosen.only != "faults":
            for hosts in map(int, chosen.hosts.split(",")):
                yield from bits(hosts)
        if chosen.only != "bits":
            for kind in FAULTS:
                yield from faults(kind)

    for what, good, detail in checks():
        print(f"{'ok  ' if good else 'FAIL'} {what}{': ' + detail if detail else ''}", flush=True)
        passed, count = passed + good, count + 1
    where = "NCCL" if HAS_GPU else "Gloo, no GPU"
    print(f"{passed} of {count} checks passed on {where} in {time.monotonic() - began:.0f} s")
    return passed != count


if __name__ == "__main__":
    sys.exit(main())
