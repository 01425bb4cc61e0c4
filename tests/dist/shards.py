"""FSDP2 models for the tests, and what their collectives must give, by hand."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from dist.emulation import noise_at
from dist.models import batch, mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowcast as nc


@functools.lru_cache
def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


@functools.lru_cache
def replicated_mesh(replicas: int, shards: int) -> DeviceMesh:
    """Over all ranks of the pool."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, module: nn.Module | None = None, nested: bool = True, **options: Any) -> nn.Module:
    """Every layer with parameters by itself, and the root with the rest."""
    model = module or mlp()
    for layer in [m for m in model.children() if nested and next(m.parameters(), None) is not None]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def full(model: nn.Module, of: str = "grad") -> list[Tensor]:
    """Gradients (or parameters) put together from the shards."""
    tensors = [p.grad if of == "grad" else p for p in model.parameters()]
    return [t.full_tensor().detach().clone() for t in tensors]


def rows_of(tensors: Sequence[Tensor], world: int) -> Tensor:
    """What FSDP hands to a reduce-scatter: row r has the r-th part of each tensor, padded with zeros."""
    parts = []
    for tensor in tensors:
        size = -(-tensor.shape[0] // world)
        padded = torch.zeros(size * world, *tensor.shape[1:], dtype=tensor.dtype)
        padded[: tensor.shape[0]] = tensor
        parts.append(padded.view(world, -1))
    return torch.cat(parts, dim=1)


def tensors_of(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The way back."""
    found, at = [], 0
    for tensor in like:
        size = -(-tensor.shape[0] // len(rows)) * tensor[0].numel()
        found.append(rows[:, at : at + size].reshape(-1)[: tensor.numel()].view(tensor.shape))
        at += size
    return found


def through(
    codec: nc.Codec, values: Tensor, offset: int = 0, seed: int = 0, path: tuple[int, int, int] = (0, 0, 0)
) -> Tensor:
    """What comes back of a run of values. path: step, rank and phase."""
    wire = codec.encode(values, **noise_at(offset, seed, *path))
    return codec.decode(wire, values.numel())


def seed_of(seed: int, role: str, unit: int = 0, group: int = 0) -> int:
    """Of the noise of a unit. group: a replica's number for gradients, a shard's between replicas."""
    return int.from_bytes(hashlib.sha256(f"FSDP {seed} {role} {unit} {group}".encode()).digest()[:8], "little")


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).float().square().mean()
