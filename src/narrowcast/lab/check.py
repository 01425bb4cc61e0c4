"""Do the links hold their rate? Gloo's float32 all-reduce against arithmetic.

A rank, as a lab starts it: python -m narrowcast.lab.check VALUES ROUNDS
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.lab.lab import Lab
from narrowcast.lab.rates import Rate, parse_rate

TOLERANCE = 0.10
# A second's worth, within these bytes: long enough that the bucket's content and the first packets do not count.
SECONDS = 1.0
LEAST, MOST = 25_000_000, 100_000_000
# Below this the bucket's content is all that is measured.
LEAST_BYTES = 1_000_000


@dataclass(frozen=True)
class RateCheck:
    """A rate, and how long an all-reduce took on links that should have it."""

    hosts: int
    rate: str
    nbytes: int
    expected: float
    seconds: tuple[float, ...]

    @property
    def measured(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        return self.measured / self.expected

    @property
    def held(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        derived = {"measured": self.measured, "ratio": self.ratio, "held": self.held}
        return {**vars(self), "seconds": list(self.seconds), **derived}


def all_reduce_seconds(nbytes: int, hosts: int, rate: Rate) -> float:
    """A ring sends 2(W - 1)/W of the data from each host, and no way is shorter."""
    return 2 * (hosts - 1) / hosts * nbytes * 8 / rate.bits_per_second


def _nbytes(hosts: int, rate: Rate) -> int:
    enough = SECONDS / all_reduce_seconds(1, hosts, rate)
    return round(min(max(enough, LEAST), MOST))


def check_rate(hosts: int, text: str, nbytes: int | None = None, rounds: int = 3) -> RateCheck:
    """Build a lab whose links have a rate, and measure."""
    if hosts < 2:
        raise ValueError(f"hosts: got {hosts}; one host sends nothing: give 2 or more")
    if nbytes is not None and nbytes < LEAST_BYTES:
        raise ValueError(f"--mb: got {nbytes / 1e6:g} megabytes to reduce; give {LEAST_BYTES / 1e6:g} or more")
    rate = parse_rate(text)
    values = (nbytes or _nbytes(hosts, rate)) // 4
    expected = all_reduce_seconds(4 * values, hosts, rate)
    with Lab(hosts, text) as lab:
        command = [sys.executable, "-m", __name__, str(values), str(rounds)]
        done = lab.run(command, capture=True, timeout=60 + 4 * (rounds + 1) * expected).check()
    return RateCheck(hosts, text, 4 * values, expected, tuple(done.json_lines()[0]))


def check_rates(hosts: int, rates: Sequence[str], nbytes: int | None, rounds: int) -> Iterator[RateCheck]:
    return (check_rate(hosts, rate, nbytes, rounds) for rate in rates)


def main() -> None:
    # a rank needs torch; whoever builds a lab need not wait for it
    import torch
    import torch.distributed as dist

    from narrowcast.measure import from_barrier, run_rank, slowest

    values, rounds = int(sys.argv[1]), int(sys.argv[2])

    def seconds(x: torch.Tensor) -> float:
        return slowest([from_barrier(lambda: dist.all_reduce(x))])[0]

    def measure() -> Iterator[list[float]]:
        x = torch.zeros(values)
        seconds(x[: max(1, values // 8)])  # connections are made at the first use
        yield [seconds(x) for _ in range(rounds)]

    run_rank(measure)


if __name__ == "__main__":
    main()
