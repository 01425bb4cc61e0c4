"""Every native kernel under the address and undefined behaviour sanitizers: `make sanitize`.

python -m sanitize LIBRARY --calls 100000 --seed 7     (with tests/ on the path; LIBRARY was built with NC_SANITIZE=ON)

It starts itself again with the sanitizers' library loaded first. A fault ends that process, and its call is told.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import torch

from narrowcast.kernels import native

ROOM = 300
"""Bytes for the words of a call."""
TELL_SECONDS = 10.0
# a leak that is found at the end is Python's own; torch's allocations may be larger than what a sanitizer expects
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def runtime() -> str | None:
    """The library that has to be loaded before all others, where the compiler brings one."""
    compiler = shutil.which("c++")
    if compiler is None:
        return None
    words = [compiler, "-print-file-name=libasan.so"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return found if os.path.isabs(found) else None


def run(library: Path, calls: int, seed: int, first: int = 0) -> subprocess.CompletedProcess[str]:
    """In a process of its own; its output says how many calls were made."""
    preload = runtime()
    if preload is None:
        raise RuntimeError("no C++ compiler here brings the address sanitizer")
    with tempfile.NamedTemporaryFile() as at:
        words = [sys.executable, "-m", "sanitize", str(library), "--at", at.name]
        words += ["--calls", str(calls), "--seed", str(seed), "--first", str(first)]
        env = {**os.environ, **OPTIONS, "LD_PRELOAD": preload}
        done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            done.stdout += f"FAULT in: {at.read().decode().strip()}\n"
    return done


def use(path: Path) -> None:
    """Have all kernels of this process come from another library."""
    library = ctypes.CDLL(str(path))
    native.library._declare(library)
    native.library.load.cache_clear()
    native.library.load = lambda: (library, str(path))  # type: ignore[assignment]


def variants() -> list[str]:
    """The instruction sets that this machine can run."""
    every = ("baseline", "avx2", "avx512")
    # the best one runs at first, and each includes those before it
    return list(every[: every.index(native.isa()) + 1])


def work(calls: int, seed: int, first: int, at: Path) -> None:
    from sanitize.calls import KINDS
    from sanitize.guarded import Guard

    names, told = variants(), time.monotonic()
    with at.open("r+b", buffering=0) as place:
        for number in range(first, first + calls):
            source, guard = Random(f"{seed} {number}"), Guard()
            native.set_isa(names[number % len(names)])
            torch.set_num_threads(source.choice((1, 1, 3)))
            call = KINDS[number // len(names) % len(KINDS)](source, guard)
            words = f"call {number} of seed {seed}, {native.isa()}, {torch.get_num_threads()} threads: {call.words}"
            os.pwrite(place.fileno(), words.encode()[:ROOM].ljust(ROOM), 0)
            with guard.closed():
                call.run()
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                print(f"  {number - first + 1:,} of {calls:,}", file=sys.stderr, flush=True)
    print(f"{calls:,} calls, 0 faults, seed {seed}, instruction sets {', '.join(names)}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sanitize", description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.at is None:
        done = run(asked.library, asked.calls, asked.seed, asked.first)
        print(done.stdout, end="")
        return done.returncode
    use(asked.library)
    work(asked.calls, asked.seed, asked.first, asked.at)
    return 0


if __name__ == "__main__":
    sys.exit(main())
