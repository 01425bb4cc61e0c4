"""Do the links hold their rate? Gloo's float32 all-reduce against arithmetic, or NCCL's on this machine's GPUs.

A rank, as a lab starts it: python -m narrowcast.lab.check VALUES ROUNDS gloo|nccl
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
GPU_BYTES = 100 << 20
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
    backend: str = "gloo"

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
        return abs(self.ratio - 1) <= TOLERANCE

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
    hosts: int, text: str, nbytes: int | None = None, rounds: int | None = None, gpu: bool = False
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
    with Lab(hosts, text, gpu=gpu) as lab:
        command = [sys.executable, "-m", __name__, str(values), str(rounds), backend]
        done = lab.run(command, capture=True, timeout=60 + 4 * (rounds + 1) * expected).check()
    return RateCheck(hosts, text, 4 * values, expected, tuple(done.json_lines()[0]), backend)


def check_rates(
    hosts: int, rates: Sequence[str], nbytes: int | None, rounds: int | None, gpu: bool = False
) -> Iterator[RateCheck]:
    return (check_rate(hosts, rate, nbytes, rounds, gpu) for rate in rates)


def main() -> None:
    # a rank needs torch; whoever builds a lab need not wait for it
    import torch
    import torch.distributed as dist

    from narrowcast.measure import DeviceClock, from_barrier, run_rank, slowest

    values, rounds, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = torch.device("cuda" if backend == "nccl" else "cpu")

    def measure() -> Iterator[list[float]]:
        group = dist.new_group(backend=backend)  # Gloo brings the ranks together and compares their clocks

        def seconds(x: torch.Tensor) -> float:
            return slowest([from_barrier(lambda: dist.all_reduce(x, group=group), DeviceClock(device))])[0]

        x = torch.zeros(values, device=device)
        seconds(x[: max(1, values // 8)])  # connections are made at the first use
        yield [seconds(x) for _ in range(rounds)]

    run_rank(measure)


if __name__ == "__main__":
    main()
