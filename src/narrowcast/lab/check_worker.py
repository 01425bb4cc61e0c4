"""A rank of `narrowcast lab check`, run as a script: time Gloo's float32 all-reduce. argv: values, rounds."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist


def slowest(seconds: float) -> float:
    """The longest of all ranks' times."""
    longest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


def timed_all_reduce(x: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(x)
    return slowest(time.perf_counter() - start)


def main() -> None:
    values, rounds = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.zeros(values)
    timed_all_reduce(x[: max(1, values // 8)])  # connections are made at the first use
    seconds = [timed_all_reduce(x) for _ in range(rounds)]
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(seconds) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
