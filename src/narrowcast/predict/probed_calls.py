"""What `probe` times: calls of the backend and of ours, alone and in a thread beside something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.measure import MatrixSum, WireSum

Call = Callable[[Tensor, "dist.ProcessGroup | None"], object]


def backend_sum(x: Tensor, group: dist.ProcessGroup | None) -> object:
    return dist.all_reduce(x, group=group)


def gather(x: Tensor, group: dist.ProcessGroup | None) -> object:
    """Everybody's part of x, by all."""
    world = dist.get_world_size(group)
    # Gloo wants equal parts, and worlds need not be powers of two
    parts = [*x[: len(x) // world * world].view(world, -1)]
    return dist.all_gather(parts, parts[dist.get_rank(group)].clone(), group=group)


def swap(x: Tensor, group: dist.ProcessGroup | None) -> object:
    """Neighbours exchange x; of an odd number of ranks the last one waits."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    peer = rank ^ 1
    if peer >= world:
        return None
    other = peer if group is None else dist.get_global_rank(group, peer)
    # together: NCCL sends nothing before the peer's receive is asked for, and both ask for their own first
    both = [dist.P2POp(dist.isend, x, other, group), dist.P2POp(dist.irecv, torch.empty_like(x), other, group)]
    return [message.wait() for message in dist.batch_isend_irecv(both)]


def two_shot(wire: str) -> Call:
    codec = codec_named(wire)
    if codec.rank:
        return matrix_sums(codec)
    # as `attach` does where small tensors of a bucket travel apart: a list, which is gathered and written back
    parts = 1 if codec.lossless else 2

    def run(x: Tensor, group: dist.ProcessGroup | None) -> None:
        WireSum(x, codec, parts=parts, op=dist.ReduceOp.AVG, algorithm="two_shot", group=group)()

    return run


def matrix_sums(codec: Codec) -> Call:
    made: dict[object, MatrixSum] = {}

    def run(x: Tensor, group: dist.ProcessGroup | None) -> None:
        if group not in made:
            made[group] = MatrixSum(x, codec, op=dist.ReduceOp.AVG, algorithm="two_shot", group=group)
        made[group]()

    return run


class Background:
    """Inside the block a thread sums tensors with the other ranks, one after the other; on a stream of its own."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup, run: Call, values: int) -> None:
        self.seconds_each, self._device, self._group, self._call = 0.0, device, group, run
        self._values = values
        self._stop = torch.zeros(1)

    def __enter__(self) -> Background:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        if self._device.type == "cpu":
            self._sum(lambda: None)
            return
        # both are each thread's own
        torch.cuda.set_device(self._device)
        own = torch.cuda.Stream(self._device)
        with torch.cuda.stream(own):
            self._sum(own.synchronize)

    def _sum(self, wait: Callable[[], object]) -> None:
        x, stop = torch.linspace(-1, 1, self._values, dtype=torch.float32, device=self._device), torch.zeros(1)
        count, began = 0, time.perf_counter()
        while True:
            self._call(x, self._group)
            count += 1
            if count % 4 == 0:
                wait()
                stop.copy_(self._stop)
                dist.all_reduce(stop, group=self._group)
                if stop.item() >= dist.get_world_size():
                    break
        self.seconds_each = (time.perf_counter() - began) / count

    def __exit__(self, *error: object) -> None:
        self._stop.fill_(1.0)
        self._thread.join()
