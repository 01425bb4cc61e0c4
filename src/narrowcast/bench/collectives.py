"""All-reduces through codecs, in turn with the backend's own: its float32 sum, its bf16 sum, and what it needs to move
the bytes of each wire once there and once back, which is the limit of a compressed sum.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.bench import ranks
from narrowcast.bench.ranks import Ranks, Row
from narrowcast.codecs import Codec, refuse_differences, refuse_low_rank
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Times
from narrowcast.measure import DeviceClock, Timing, WireSum, interleaved, rank_device, tell_progress, until_all_done

MEGABYTES = {False: (100.0,), True: (1.0, 4.0, 16.0, 64.0, 256.0)}
SPECS = {
    False: ("bf16", "int8/256", "e5m2+aps", "int4/128", "int2/64"),
    True: ("bf16", "int8/256", "e4m3fn/256", "int4/128", "int2/64"),
}
ROUNDS = {False: 3, True: 7}
"""By default on processors, and on GPUs."""
SMALL = (1, 1_000, 100_000)
"""Values of calls that are mostly overhead."""
SMALL_CALLS, WARM_UP_CALLS = 10, 2
FLOAT, HALF = "fp32 sum", "bf16 sum"
"""The backend's own."""

TARGETS: dict[tuple[int, str], dict[str, float]] = {
    (2, "1gbit"): {"bf16": 1.9, "int8/256": 3.6, "e5m2+aps": 3.5, "int4/128": 6.3, "int2/64": 10.0},
    (4, "1gbit"): {"bf16": 1.85, "int8/256": 3.3, "e5m2+aps": 3.2, "int4/128": 5.8, "int2/64": 9.0},
    (4, "200mbit"): {"bf16": 1.95, "int8/256": 3.5, "e5m2+aps": 3.4, "int4/128": 6.6, "int2/64": 11.0},
    (2, "10gbit"): {"int8/256": 1.5, "int4/128": 1.5},
}
"""The speedups that we promise on processors, by hosts and rate, for 100 MB and one thread a rank."""
TARGET_VALUES = 25_000_000


def run(
    at: Ranks,
    specs: Sequence[str] | None = None,
    megabytes: Sequence[float] | None = None,
    rounds: int | None = None,
    small: bool = False,
) -> Iterator[Row]:
    """The machine, then a row for each wire and size, those of a size together."""
    chosen = chosen_specs(specs or SPECS[at.gpu])
    sizes = [max(1, round(mb * 1e6) // 4) for mb in megabytes or MEGABYTES[at.gpu]]
    options = {"specs": chosen, "sizes": sizes, "small": SMALL if small else ()}
    for row in ranks.rows(at, __name__, measure, {**options, "rounds": rounds or ROUNDS[at.gpu]}):
        yield row if "machine" in row else {**at.as_dict(), **row, **judged(at, row)}


def chosen_specs(specs: Sequence[str]) -> list[str]:
    """As they are written in full; what `all_reduce` refuses is refused before a lab is built."""
    codecs = [codec_named(spec) for spec in specs]
    for codec in codecs:
        refuse_low_rank("bench collectives", codec)
        refuse_differences("bench collectives", codec)
    return list(map(str, codecs))


def judged(at: Ranks, row: Row) -> Row:
    """What was promised for a row, and whether it was kept."""
    promised = {} if at.gpu or row["values"] != TARGET_VALUES else TARGETS.get((at.count, at.rate), {})
    target = promised.get(row["wire"])
    return {"target": target, "met": None if target is None else row["over_fp32"] >= target}


def measure(specs: Sequence[str], sizes: Sequence[int], small: Sequence[int], rounds: int, gpu: bool) -> Iterator[Row]:
    """On a rank."""
    device = rank_device(gpu)
    for values in sizes:
        tell_progress(f"{values} values")
        yield from measure_size(values, specs, rounds, device)
    for values in small:
        tell_progress(f"{values} values, {SMALL_CALLS} calls in a row")
        yield from (row | {"small": True} for row in measure_size(values, specs, rounds, device, SMALL_CALLS))


class HostTimed:
    """A call, and the seconds that it keeps the host each time: the device may still be at work."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self.seconds = call, list[float]()

    def __call__(self) -> None:
        begin = time.perf_counter()
        self._call()
        self.seconds.append(time.perf_counter() - begin)


def moved_bytes(codec: Codec, values: int, device: torch.device) -> Callable[[], None]:
    """The backend's own all_to_all and all_gather of the bytes of a wire: what a sum in two shots cannot beat."""
    world, block = dist.get_world_size(), max(1, codec.block)
    part = -(-values // (world * block)) * block
    nbytes = codec.nbytes(part)
    leaving, arriving = torch.zeros(2, world * nbytes, dtype=torch.uint8, device=device)

    def move() -> None:
        dist.all_to_all_single(arriving, leaving)
        dist.all_gather_into_tensor(leaving, arriving[:nbytes])

    return move


def measure_size(values: int, specs: Sequence[str], rounds: int, device: torch.device, calls: int = 1) -> Iterator[Row]:
    """All sums of so many values, in turn. Collective."""
    x = torch.randn(values, device=device, generator=torch.Generator(device).manual_seed(dist.get_rank()))
    total, half, clock = x.clone(), x.bfloat16(), DeviceClock(device)
    sums = {spec: WireSum(total, spec) for spec in specs}
    work: dict[str, Callable[[], object]] = {FLOAT: partial(dist.all_reduce, total)}
    work[HALF] = partial(dist.all_reduce, half)
    for spec, add in sums.items():
        work |= {spec: add, f"limit {spec}": moved_bytes(add.codec, values, device)}
    host = {name: HostTimed(call) for name, call in work.items()}

    def timed(call: Callable[[], object], count: int) -> float:
        total.copy_(x)
        half.copy_(x)
        return until_all_done(call, clock, count)

    took = interleaved(host, rounds, calls, first_calls=WARM_UP_CALLS, timed=timed)
    counted = calls * rounds
    for name in (FLOAT, HALF, *specs):
        kept_host = Timing(tuple(host[name].seconds[-counted:])).median
        row = {"values": values, "mb": 4 * values / 1e6, **compared(name, took), "host_ms": 1e3 * kept_host}
        row |= bandwidths(values, took[name].median)
        yield row | (_facts(x, total, sums[name]) if name in sums else {})


def compared(name: str, took: dict[str, Timing]) -> Row:
    """Milliseconds of a wire beside those of the backend's own sums and moved bytes."""
    seconds, limit = took[name].median, took.get(f"limit {name}")
    ratios = {f"over_{key}": took[base].median / seconds for key, base in (("fp32", FLOAT), ("bf16", HALF))}
    share = {"limit_ms": 1e3 * limit.median, "share_of_limit": limit.median / seconds} if limit else {}
    beyond = {"beyond_ms": 1e3 * (seconds - took[FLOAT].median)}
    return {"wire": name, "ms": 1e3 * seconds, **ratios, **share, **beyond, "rounds_ms": _rounds(took[name])}


def bandwidths(values: int, seconds: float) -> Row:
    """As nccl-tests reckons: bytes of float32 a second, and times 2 (W - 1) / W what each link would carry of them."""
    world, gigabytes = dist.get_world_size(), 4 * values / seconds / 1e9
    return {"size": 4 * values, "us": 1e6 * seconds, "algbw": gigabytes, "busbw": 2 * (world - 1) / world * gigabytes}


def _rounds(timing: Timing) -> list[float]:
    return [1e3 * seconds for seconds in timing.seconds]


def _facts(x: Tensor, total: Tensor, add: WireSum) -> dict[str, Any]:
    """One more call, not timed: its error against the float32 sum, and the host's seconds in the codec."""
    times, expected = Times(), x.clone()
    total.copy_(x)
    add(times=times)
    dist.all_reduce(expected)
    return {
        "error": float((total - expected).norm() / expected.norm()),
        "bits": add.codec.bits_per_value,
        "bytes_allow": 32 / add.codec.bits_per_value,
        "encode_ms": 1e3 * times.encode,
        "decode_ms": 1e3 * times.decode,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    ranks.main(measure)
