"""Compressed all-reduces on real, rate-limited links, as a ratio to Gloo's float32 all-reduce in the same run.

A rank, as the lab (or torchrun) starts it: python -m narrowcast.bench.collectives VALUES ROUNDS SPEC...
"""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Times
from narrowcast.lab import Lab
from narrowcast.measure import WireSum, run_rank, until_all_done

VALUES = 25_000_000
ROUNDS = 3
SPECS = ("bf16", "int8/256", "e5m2+aps", "int4/128", "int2/64")

TARGETS: dict[tuple[int, str], dict[str, float]] = {
    (2, "1gbit"): {"bf16": 1.9, "int8/256": 3.6, "e5m2+aps": 3.5, "int4/128": 6.3, "int2/64": 10.0},
    (4, "1gbit"): {"bf16": 1.85, "int8/256": 3.3, "e5m2+aps": 3.2, "int4/128": 5.8, "int2/64": 9.0},
    (4, "200mbit"): {"bf16": 1.95, "int8/256": 3.5, "e5m2+aps": 3.4, "int4/128": 6.6, "int2/64": 11.0},
    (2, "10gbit"): {"int8/256": 1.5, "int4/128": 1.5},
}
"""The speedups that we promise, by hosts and rate, for 100 MB and one thread a rank."""


@dataclass(frozen=True)
class CollectiveRow:
    """One codec on one lab."""

    hosts: int
    rate: str
    spec: str
    plain_seconds: float
    seconds: float
    error: float
    encode_ms: float
    decode_ms: float
    peak_mib: float
    """The rank's peak memory so far: buffers of this and earlier codecs, and the tensors themselves."""

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds

    @property
    def limit(self) -> float:
        """What the bytes alone would allow."""
        return 32 / codec_named(self.spec).bits_per_value

    @property
    def target(self) -> float | None:
        return TARGETS.get((self.hosts, self.rate), {}).get(self.spec)

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.speedup >= self.target

    def as_dict(self) -> dict[str, Any]:
        derived = {"speedup": self.speedup, "limit": self.limit, "target": self.target, "met": self.met}
        return asdict(self) | derived


def run(
    hosts: int, rate: str, specs: Sequence[str] = SPECS, values: int = VALUES, rounds: int = ROUNDS
) -> Iterator[CollectiveRow]:
    """Build a lab, time every codec in it beside the plain all-reduce."""
    for spec in specs:
        codec_named(spec)
    with Lab(hosts, rate) as lab:
        command = [sys.executable, "-m", __name__, str(values), str(rounds), *specs]
        done = lab.run(command, capture=True, timeout=1800).check()
    for facts in done.json_lines():
        yield _row(hosts, rate, facts)


def _row(hosts: int, rate: str, facts: dict[str, Any]) -> CollectiveRow:
    return CollectiveRow(
        hosts,
        rate,
        facts["spec"],
        plain_seconds=statistics.median(facts["plain"]),
        seconds=statistics.median(facts["ours"]),
        error=facts["error"],
        encode_ms=facts["encode_ms"],
        decode_ms=facts["decode_ms"],
        peak_mib=facts["peak_mib"],
    )


def exact_mean_error(x: Tensor, result: Tensor) -> float:
    """Relative L2 error against the float32 sum."""
    expected = x.clone()
    dist.all_reduce(expected)
    return float((result - expected).norm() / expected.norm())


def measure(spec: str, x: Tensor, rounds: int) -> dict[str, object]:
    """Alternate with Gloo's float32 all-reduce, so that both see the same machine."""
    times = Times()
    ours, plain = x.clone(), x.clone()
    through_codec = WireSum(ours, spec)
    through_codec()
    error = exact_mean_error(x, ours)
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    for step in range(rounds + 1):
        plain.copy_(x)
        first = until_all_done(lambda: dist.all_reduce(plain))
        ours.copy_(x)
        second = until_all_done(lambda step=step: through_codec(step, times=times))  # type: ignore[misc]
        if step:
            seconds["plain"].append(first)
            seconds["ours"].append(second)
    codec = through_codec.codec
    return {
        "spec": spec,
        "error": error,
        "bits": codec.bits_per_value,
        "scale_per_tensor": codec.takes_scale,
        "encode_ms": 1e3 * times.encode / (rounds + 1),
        "decode_ms": 1e3 * times.decode / (rounds + 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **seconds,
    }


def measure_all() -> Iterator[dict[str, object]]:
    values, rounds, specs = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    x = torch.randn(values, generator=torch.Generator().manual_seed(dist.get_rank()))
    return (measure(spec, x, rounds) for spec in specs)


if __name__ == "__main__":
    run_rank(measure_all)
