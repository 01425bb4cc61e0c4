"""Compressed all-reduces on real, rate-limited links, as a ratio to Gloo's float32 all-reduce in the same run."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from narrowcast.codecs import codec as codec_named
from narrowcast.lab import Lab

VALUES = 25_000_000
ROUNDS = 3
SPECS = ("bf16", "int8/256", "e5m2+aps", "int4/128", "int2/64")
WORKER = "narrowcast.bench.collectives_worker"

TARGETS: dict[tuple[int, str], dict[str, float]] = {
    (2, "1gbit"): {"bf16": 1.9, "int8/256": 3.6, "e5m2+aps": 3.5, "int4/128": 6.3, "int2/64": 10.0},
    (4, "1gbit"): {"bf16": 1.85, "int8/256": 3.3, "e5m2+aps": 3.2, "int4/128": 5.8, "int2/64": 9.0},
    (4, "200mbit"): {"bf16": 1.95, "int8/256": 3.5, "e5m2+aps": 3.4, "int4/128": 6.6, "int2/64": 11.0},
    (2, "10gbit"): {"int8/256": 1.5, "int4/128": 1.5},
}
"""The speedups that we promise, by hosts and rate, for 100 MB and one thread a rank."""


@dataclass(frozen=True)
class Row:
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
) -> Iterator[Row]:
    """Build a lab, time every codec in it beside the plain all-reduce."""
    for spec in specs:
        codec_named(spec)
    with Lab(hosts, rate) as lab:
        words = [sys.executable, "-m", WORKER, str(values), str(rounds), *specs]
        done = lab.run(words, capture=True, timeout=1800).check()
    for line in done.lines:
        if line.rank == 0 and line.stream == "stdout" and line.text.startswith("{"):
            yield _row(hosts, rate, json.loads(line.text))


def _row(hosts: int, rate: str, facts: dict[str, Any]) -> Row:
    return Row(
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
