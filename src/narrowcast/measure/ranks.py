"""Measuring with several ranks: a common start, the slowest of them, and a rank as a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from narrowcast.measure.clock import CPU, DeviceClock

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others, as torch does where nobody says otherwise."""
GPU_BACKEND = "cpu:gloo,cuda:nccl"
PROGRESS = "narrowcast: "
"""What a line of progress begins with."""


def slowest(values: Sequence[float]) -> list[float]:
    """The largest of each value over all ranks. Collective."""
    mine = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return [float(value) for value in mine]


def mean(values: Sequence[float]) -> list[float]:
    """The mean of each value over all ranks. Collective."""
    mine = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mine)
    return [float(value) / dist.get_world_size() for value in mine]


def first_decides(yes: bool) -> bool:
    """What rank 0 says, on every rank: clocks differ, and ranks must not. Collective."""
    mine = torch.tensor([yes], dtype=torch.uint8)
    dist.broadcast(mine, 0)
    return bool(mine.item())


def from_barrier(
    call: Callable[[], object],
    clock: DeviceClock | None = None,
    group: dist.ProcessGroup | None = None,
    calls: int = 1,
) -> float:
    """This rank's seconds a call; all ranks of the group begin the first one together. Collective."""
    dist.barrier(group)
    return (clock or DeviceClock()).timed(call, calls)


def until_all_done(call: Callable[[], object], clock: DeviceClock | None = None, calls: int = 1) -> float:
    """Seconds a call on the slowest rank; all begin the first one together. Collective."""
    return slowest([from_barrier(call, clock, calls=calls)])[0]


def need_cuda() -> None:
    """Ranks open the GPU, not we; but a torch without CUDA can be told at once."""
    if not torch.backends.cuda.is_built() or not dist.is_nccl_available():
        raise ValueError(
            f"--gpu: needs torch with CUDA and NCCL, and an NVIDIA GPU; got torch {torch.__version__}, which is built "
            "without; install torch for CUDA, or leave --gpu out: then Gloo runs on the processors"
        )


def rank_device(gpu: bool) -> torch.device:
    """The processor, or this rank's GPU: the one of its number on its machine. Ranks of a lab with GPUs share them."""
    if not gpu:
        return CPU
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        raise ValueError(f"torch {torch.__version__} has no CUDA device or no NCCL here; use a machine with a GPU")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count and "NCCL_HOSTID" not in os.environ:
        raise ValueError(f"rank {local} of this machine has no GPU; there are {count}: start as many ranks")
    return torch.device("cuda", local % count)


@contextmanager
def process_group(gpu: bool = False, timeout: timedelta = TIMEOUT) -> Iterator[None]:
    """The group that the environment describes, with one thread a rank; ranks leave it together.

    gpu: with NCCL for CUDA tensors, beside Gloo, and this rank's GPU as the current one.
    After an error nobody waits for the others: they may be waiting for this rank.
    """
    torch.set_num_threads(1)
    if gpu:
        torch.cuda.set_device(rank_device(gpu))
    dist.init_process_group(GPU_BACKEND if gpu else "gloo", timeout=timeout)
    yield
    dist.barrier()
    dist.destroy_process_group()


def run_rank(measure: Callable[[], Iterable[object]], gpu: bool = False) -> None:
    """The main function of a rank: rank 0 prints what `measure` gives, a line of JSON each, as it comes."""
    with process_group(gpu):
        for result in measure():
            if dist.get_rank() == 0:
                sys.stdout.write(json.dumps(result) + "\n")
                sys.stdout.flush()


def tell_progress(text: str) -> None:
    """Rank 0 says how far it is, on standard error: never a result."""
    if dist.get_rank() == 0:
        sys.stderr.write(f"{PROGRESS}{text}\n")
        sys.stderr.flush()
