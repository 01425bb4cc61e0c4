"""Many cases of law 8, by hand: `make law8`, or `python -m dist.law8 --first 17 --cases 1` for one of them again."""

from __future__ import annotations

import argparse
import sys
import time

from dist.law8.run import run_all
from dist.pool import made_once


def main() -> int:
    parser = argparse.ArgumentParser(prog="law8", description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first case")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.cases)
    began, done, failed = time.monotonic(), 0, 0
    with made_once() as current:
        for batch, failures in run_all(current, seeds):
            done, failed = done + len(batch), failed + len(failures)
            for failure in failures:
                print(failure, flush=True)
            if done // 100 > (done - len(batch)) // 100:
                print(f"{done} of {options.cases}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(f"{done} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
