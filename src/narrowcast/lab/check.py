"""Do the links hold their rate, and their delay? Gloo's float32 all-reduce against arithmetic, or NCCL's on this
machine's GPUs, and the way of one byte there and back.

A rank, as a lab starts it: python -m narrowcast.lab.check VALUES ROUNDS gloo|nccl
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.lab.lab import Lab
from narrowcast.lab.topology import Rate, parse_delay, parse_rate

TOLERANCE = 0.10
# A second's worth, within these bytes: long enough that the bucket's content and the first packets do not count.
SECONDS = 1.0
LEAST, MOST = 25_000_000, 100_000_000
GPU_BYTES = 100 << 20
# Below this the bucket's content is all that is measured.
LEAST_BYTES = 1_000_000
PINGS = 10
"""Of them the quickest counts: a busy machine only adds to it."""


@dataclass(frozen=True)
class RateCheck:
    """A rate, and how long an all-reduce took on links that should have it."""

    hosts: int
    rate: str
    nbytes: int
    expected: float
    seconds: tuple[float, ...]
    backend: str = "gloo"
    delay: str | None = None
    round_trip: float = 0.0
    """Seconds that a byte takes from one host to another and back."""

    @property
    def measured(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        return self.measured / self.expected

    @property
    def share(self) -> float:
        """Bus bandwidth, 2(W - 1)/W of the bytes over the seconds, as a share of the rate."""
        return 1 / self.ratio

    @property
    def held(self) -> bool:
        """The rate; where packets take their time, that: TCP fills such a link slowly, and that is no fault of it."""
        ratio = self.round_trip / (2 * parse_delay(self.delay)) if self.delay else self.ratio
        return abs(ratio - 1) <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        derived = {"measured": self.measured, "ratio": self.ratio, "share": self.share, "held": self.held}
        return {**vars(self), "seconds": list(self.seconds), **derived}


def all_reduce_seconds(nbytes: int, hosts: int, rate: Rate) -> float:
    """A ring sends 2(W - 1)/W of the data from each host, and no way is shorter."""
    return 2 * (hosts - 1) / hosts * nbytes * 8 / rate.bits_per_second


def _nbytes(hosts: int, rate: Rate) -> int:
    enough = SECONDS / all_reduce_seconds(1, hosts, rate)
    return round(min(max(enough, LEAST), MOST))


def check_rate(
    hosts: int,
    text: str,
    nbytes: int | None = None,
    rounds: int | None = None,
    gpu: bool = False,
    delay: str | None = None,
) -> RateCheck:
    """Build a lab whose links have a rate, and measure: the median of 3 all-reduces, or 5 of NCCL's."""
    if hosts < 2:
        raise ValueError(f"hosts: got {hosts}; one host sends nothing: give 2 or more")
    if nbytes is not None and nbytes < LEAST_BYTES:
        raise ValueError(f"--mb: got {nbytes / 1e6:g} megabytes to reduce; give {LEAST_BYTES / 1e6:g} or more")
    rate = parse_rate(text)
    values = (nbytes or (GPU_BYTES if gpu else _nbytes(hosts, rate))) // 4
    rounds, backend = rounds or (5 if gpu else 3), "nccl" if gpu else "gloo"
    expected = all_reduce_seconds(4 * values, hosts, rate)
    waits = 4 * hosts * parse_delay(delay)
    with Lab(hosts, text, gpu=gpu, delay=delay) as lab:
        command = [sys.executable, "-m", __name__, str(values), str(rounds), backend]
        done = lab.run(command, capture=True, timeout=60 + 4 * (rounds + 1) * (expected + waits)).check()
    seconds, round_trip = done.json_lines()[0]
    return RateCheck(hosts, text, 4 * values, expected, tuple(seconds), backend, delay, round_trip)


def check_rates(
    hosts: int,
    rates: Sequence[str],
    nbytes: int | None,
    rounds: int | None,
    gpu: bool = False,
    delay: str | None = None,
) -> Iterator[RateCheck]:
    return (check_rate(hosts, rate, nbytes, rounds, gpu, delay) for rate in rates)


def main() -> None:
    # a rank needs torch; whoever builds a lab need not wait for it
    import torch
    import torch.distributed as dist

    from narrowcast.measure import DeviceClock, from_barrier, run_rank, slowest

    values, rounds, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = torch.device("cuda" if backend == "nccl" else "cpu")

    def round_trip() -> float:
        byte, rank, times = torch.zeros(1, dtype=torch.uint8), dist.get_rank(), []
        for _ in range(PINGS if rank < 2 else 0):
            began = time.perf_counter()
            for sends in (rank == 0, rank == 1):
                dist.send(byte, 1 - rank) if sends else dist.recv(byte, 1 - rank)
            times.append(time.perf_counter() - began)
        return min(times, default=0.0)

    def measure() -> Iterator[tuple[list[float], float]]:
        group = dist.new_group(backend=backend)  # Gloo brings the ranks together and compares their clocks

        def seconds(x: torch.Tensor) -> float:
            return slowest([from_barrier(lambda: dist.all_reduce(x, group=group), DeviceClock(device))])[0]

        x = torch.zeros(values, device=device)
        seconds(x[: max(1, values // 8)])  # connections are made at the first use
        yield [seconds(x) for _ in range(rounds)], round_trip()

    run_rank(measure)


if __name__ == "__main__":
    main()
