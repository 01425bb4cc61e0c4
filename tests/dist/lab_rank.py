"""A rank of the lab's fault tests: sums in a loop, says where it is, and ends with a hash or with what it saw."""

from __future__ import annotations

import hashlib
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import narrowcast as nc

CUT_AFTER = 3
"""After this step ranks wait for a file: by then the link is cut, so that the next one begins on a cut one."""


def values(rank: int, step: int) -> torch.Tensor:
    return torch.randn(200_000, generator=torch.Generator().manual_seed(rank)) + step


def main(timeout: float, steps: int, go: Path) -> None:
    torch.set_num_threads(1)
    # on a busy machine one rank may start much later than another: the short timeout is for the sums alone
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    dist.barrier()
    rank = dist.get_rank()
    digest = hashlib.sha256()
    began = time.monotonic()
    try:
        for step in range(steps):
            began = time.monotonic()
            print(f"begin {step}", flush=True)
            y = values(rank, step)
            nc.all_reduce(y, "int8/256", group=group)
            digest.update(y.numpy().tobytes())
            print(f"step {step}", flush=True)
            while step == CUT_AFTER and not go.exists():
                time.sleep(0.01)
    except RuntimeError as error:
        print(
            f"raised after {time.monotonic() - began:.2f} {type(error).__name__}: {error}".replace("\n", " "),
            flush=True,
        )
        began = time.monotonic()
    else:
        print(f"hash {digest.hexdigest()}", flush=True)
    dist.destroy_process_group()
    print(f"ended {time.monotonic() - began:.2f}", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
