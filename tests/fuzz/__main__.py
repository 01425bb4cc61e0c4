"""Broken input by the million: `make fuzz`, or with tests/ on the path `python -m fuzz --count 1000000 --seed 7`.

Ends with 1 at a fault, after showing the input and the command that makes it again.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator

import torch
from fuzz.base import Kind
from fuzz.registry import KINDS, shares

SLOW_SECONDS = 5.0
"""Nothing may keep its reader waiting for so long."""
TELL_SECONDS = 10.0


def faults(kind: Kind, seed: int, numbers: range, told: float = TELL_SECONDS) -> Iterator[str]:
    """What is wrong with inputs of these numbers."""
    last = time.monotonic()
    for number in numbers:
        given, began = kind.input(seed, number), time.process_time()
        why = ""
        try:
            kind.check(given)
        except BaseException as error:  # whatever it is, it is a fault
            if isinstance(error, KeyboardInterrupt):
                raise
            why = "".join(traceback.format_exception(error)[-6:])
        # the processor's time: how busy the machine is with other things is no fault of the input
        spent, now = time.process_time() - began, time.monotonic()
        if spent > SLOW_SECONDS:
            why += f"it took {spent:.1f} s"
        if why:
            yield f"{given!r}\n{why}\nagain: python -m fuzz --only {kind.name} --seed {seed} --first {number} --count 1"
        if now - last > told:
            last = now
            print(f"  {kind.name}: {number - numbers.start + 1:,} of {len(numbers):,}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1_000_000, help="inputs in all")
    parser.add_argument("--only", choices=KINDS, help="one kind of input")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input of each kind")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    counts = {asked.only: asked.count} if asked.only else shares(asked.count)
    found, began = 0, time.monotonic()
    for name, count in counts.items():
        begun, before = time.monotonic(), found
        for fault in faults(KINDS[name], asked.seed, range(asked.first, asked.first + count)):
            found += 1
            print(f"FAULT in {name}: {fault}\n", flush=True)
        print(f"{name:9} {count:>9,} inputs {found - before:>3} faults {time.monotonic() - begun:>7.1f} s", flush=True)
    print(f"{sum(counts.values()):,} inputs, {found} faults, seed {asked.seed}, {time.monotonic() - began:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
