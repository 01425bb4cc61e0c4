"""One rank of `narrowcast bench collectives`: times all-reduces beside Gloo's own; rank 0 prints a JSON line for each.

Started by the lab (or torchrun): python -m narrowcast.bench.collectives_worker VALUES ROUNDS SPEC...
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Residuals, all_reduce
from narrowcast.collectives.segments import Times


def timed(call: Callable[[], object]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start


def report(**facts: object) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(facts), flush=True)


def exact_mean_error(x: Tensor, result: Tensor) -> float:
    """Relative L2 error against the float32 sum."""
    wanted = x.clone()
    dist.all_reduce(wanted)
    return float((result - wanted).norm() / wanted.norm())


def measure(spec: str, x: Tensor, rounds: int) -> None:
    """Alternate with Gloo's float32 all-reduce, so that both see the same machine."""
    codec, times = codec_named(spec), Times()
    residuals = Residuals.zeros(x.numel()) if codec.feedback else None
    ours, plain = x.clone(), x.clone()
    work = x.clone()
    all_reduce(work, codec, step=0, residuals=residuals)
    error = exact_mean_error(x, work)
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    for step in range(rounds + 1):
        plain.copy_(x)
        first = timed(lambda: dist.all_reduce(plain))
        ours.copy_(x)
        second = timed(lambda step=step: all_reduce(ours, codec, step=step, residuals=residuals, times=times))  # type: ignore[misc]
        if step:
            seconds["plain"].append(first)
            seconds["ours"].append(second)
    report(
        spec=spec,
        error=error,
        bits=codec.bits_per_value,
        scale_per_tensor=codec.takes_scale,
        encode_ms=1e3 * times.encode / (rounds + 1),
        decode_ms=1e3 * times.decode / (rounds + 1),
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **seconds,
    )


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    values, rounds, specs = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    x = torch.randn(values, generator=torch.Generator().manual_seed(dist.get_rank()))
    for spec in specs:
        measure(spec, x, rounds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
