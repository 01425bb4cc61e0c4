"""Training with one wire, step by step: data parallel over Gloo, MPI or NCCL. Plugins bring other ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from narrowcast import plugins
from narrowcast.collectives import Channel, mpi_channel
from narrowcast.measure import rank_device
from narrowcast.parallel import DDPState, attach, ddp_hook
from narrowcast.study import models
from narrowcast.study.cases import PLAIN, Case
from narrowcast.study.datasets import Examples
from narrowcast.study.spec_bits import NONE, Share, compressed_share

LR = 0.01


@dataclass
class Counted:
    """What one rank has sent and spent since the beginning."""

    sent: float = 0.0
    plain: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    """Seconds."""

    def __sub__(self, before: Counted) -> Counted:
        return Counted(*(getattr(self, key) - getattr(before, key) for key in vars(self)))


class Trainer(Protocol):
    """One wire."""

    def step(self, x: Tensor, y: Tensor) -> None: ...
    def counted(self) -> Counted: ...
    def compressed(self) -> Share: ...
    def close(self) -> None: ...


def plain_bytes(values: int) -> float:
    """What a rank sends to add up so many float32 values by a ring: no way is shorter."""
    world = dist.get_world_size()
    return 2 * (world - 1) / world * 4 * values


def counted_of(stats: dict[str, float], beside: float = 0.0) -> Counted:
    """`beside`: what travels as it is, whatever the wire."""
    seconds = (stats["encode_ms"] / 1e3, stats["decode_ms"] / 1e3)
    return Counted(stats["sent_bytes"] + beside, stats["plain_bytes"] + beside, *seconds)


class _DDPTrainer:
    """Steps of a network under DDP."""

    def __init__(self, case: Case, examples: Examples) -> None:
        self.device = device = device_of_rank(case.transport)
        ids = [device.index] if device.type == "cuda" else None
        self.model = DistributedDataParallel(models.build(case.model, examples).to(device), device_ids=ids)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class DataParallel(_DDPTrainer):
    """DDP: as it is for fp32, with `attach` for every other wire."""

    def __init__(self, case: Case, examples: Examples) -> None:
        super().__init__(case, examples)
        self._values, self._steps = models.parameters_of(self.model), 0
        # what DDP broadcasts before each forward pass (the statistics of batch norms), for each rank
        size = sum(buffer.numel() * buffer.element_size() for buffer in self.model.module.buffers())
        world = dist.get_world_size()
        self._buffers = size * (world - 1) / world if self.model.broadcast_buffers else 0.0
        self._handle = None
        if case.wire != PLAIN:
            nodes = case.layout.nodes if case.algorithm == "hierarchical" else None
            least = case.min_values
            self._handle = attach(self.model, case.wire, algorithm=case.algorithm, nodes=nodes, min_values=least)

    def step(self, x: Tensor, y: Tensor) -> None:
        super().step(x, y)
        self._steps += 1

    def counted(self) -> Counted:
        beside = self._steps * self._buffers
        if self._handle is None:
            sent = self._steps * plain_bytes(self._values) + beside
            return Counted(sent, sent)
        return counted_of(self._handle.stats(), beside)

    def compressed(self) -> Share:
        return NONE if self._handle is None else compressed_share(self._handle.rows())

    def close(self) -> None:
        if self._handle is not None:
            self._handle.detach()


class _MpiState(DDPState):
    """`attach`'s state with MPI underneath: one channel, since MPI is entered by one thread at a time."""

    def over(self, channel: Channel) -> _MpiState:
        self.close()
        self.channel = self._aside = channel
        return self


class MpiDataParallel(_DDPTrainer):
    """DDP whose gradients travel over MPI; fp32 is MPI's own Allreduce."""

    def __init__(self, case: Case, examples: Examples) -> None:
        super().__init__(case, examples)
        chosen = "native" if case.wire == PLAIN else case.algorithm
        state = _MpiState(self.model, case.wire, algorithm=chosen, min_values=case.min_values)
        self._state = state.over(mpi_ranks())
        self.model.register_comm_hook(self._state, ddp_hook)

    def counted(self) -> Counted:
        return counted_of(self._state.stats.as_dict())

    def compressed(self) -> Share:
        return compressed_share(self._state.rows())

    def close(self) -> None:
        self._state.close()


def make(case: Case, examples: Examples) -> Trainer:
    """What trains one wire of a setting."""
    if case.parallel != "data":
        return plugins.trainer(case.parallel)(case.model, examples, case.wire, case.algorithm)
    return (MpiDataParallel if case.transport == "mpi" else DataParallel)(case, examples)


def device_of_rank(transport: str) -> torch.device:
    """This rank's GPU for NCCL, the processor otherwise."""
    return rank_device(transport == "nccl")


def mpi_ranks() -> Channel:
    """A channel over MPI; RuntimeError where it was not mpirun that started the ranks."""
    channel = mpi_channel()
    if channel.world != dist.get_world_size():
        raise RuntimeError(
            f"transport mpi: MPI knows {channel.world} rank(s) of {dist.get_world_size()}; start them with mpirun"
        )
    return channel
