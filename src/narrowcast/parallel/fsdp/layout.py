"""What FSDP2 keeps in one collective call.

`fully_shard` makes a parameter group of a module. Its reduce-scatter gets, for each rank, the r-th part of every tensor
that has a gradient, one after another, each padded to equal parts; its all-gather gets this rank's part of all tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from narrowcast.parallel.fsdp.torch_parts import (
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    Parameter,
    ParameterGroup,
    param_groups,
)


@dataclass(frozen=True)
class Sharded:
    """One parameter of a unit."""

    name: str
    shape: tuple[int, ...]
    dim: int
    private: Parameter

    @property
    def trainable(self) -> bool:
        return bool(self.private.sharded_param.requires_grad)

    @property
    def dtype(self) -> torch.dtype:
        return self.private.sharded_param.dtype

    def part(self, world: int) -> int:
        """Values in a rank's part, padding included."""
        if self.dim:
            return math.prod(self.shape) // world
        return -(-self.shape[0] // world) * math.prod(self.shape[1:])

    def rows(self, whole: Tensor, world: int) -> Tensor:
        """A tensor of the parameter's shape as [world, part]: what lies in the rows of a reduce-scatter."""
        parts = torch.cat(torch.chunk(whole, world, dim=self.dim)) if self.dim else whole
        flat = parts.reshape(-1)
        return nn.functional.pad(flat, (0, world * self.part(world) - flat.numel())).view(world, -1)

    def whole(self, rows: Tensor) -> Tensor:
        """The way back from `rows`."""
        world = len(rows)
        if not self.dim:
            return rows.reshape(-1)[: math.prod(self.shape)].view(self.shape)
        part = [n // world if d == self.dim else n for d, n in enumerate(self.shape)]
        return torch.cat([row.view(part) for row in rows], dim=self.dim)


class Unit:
    """A module that `fully_shard` was called on, with the parameters that travel together."""

    def __init__(self, number: int, name: str, module: FSDPModule, names: dict[nn.Module, str]) -> None:
        self.number, self.name, self.module = number, name, module
        self.private: ParameterGroup = param_groups(module)[0]
        self.tensors = [_sharded_parameter(private, names) for private in self.private.parameters]
        self.divisor = 1.0
        """What FSDP had divided the gradients by, when they last came to the reduce-scatter."""
        self.gain = 1.0
        """What that reduce-scatter made of the mean of the gradients: 1 for AVG, the number of ranks for SUM."""
        self._touched: set[int] = set()
        self._hooked: set[int] = set()
        self._removable: list[Any] = []

    @property
    def mesh(self) -> Any:
        return self.private.mesh

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The type of the gradients when they travel."""
        return self.private.reduce_dtype

    def wholes(self, world: int) -> list[Tensor]:
        """The parameters while they are gathered; one rank has them anyway."""
        private = [tensor.private for tensor in self.tensors]
        return [p.unsharded_param if world > 1 else p.sharded_param for p in private]

    def watch(self, forward: Callable[[], None]) -> None:
        """Note which parameters get a gradient: where some do not, the buffer alone does not say which.

        forward: called whenever a forward pass comes by.
        """

        def before_forward(*_: object) -> None:
            forward()
            self._hook()

        for module in self.private.modules:
            self._removable.append(module.register_forward_pre_hook(before_forward))

    def unwatch(self) -> None:
        for hook in self._removable:
            hook.remove()
        self._removable.clear()
        self._hooked.clear()

    def _hook(self) -> None:
        for index, tensor in enumerate(self.tensors):
            unsharded = tensor.private.unsharded_if_made
            if index not in self._hooked and unsharded is not None and unsharded.requires_grad:
                self._removable.append(unsharded.register_post_accumulate_grad_hook(self._toucher(index)))
                self._hooked.add(index)

    def _toucher(self, index: int) -> Callable[[Tensor], None]:
        # autograd keeps this where the garbage collector cannot see it: it must not hold the module
        touched = self._touched
        return lambda _: touched.add(index)

    def tensors_in(self, numel: int, world: int) -> list[Sharded]:
        """The tensors in a reduce-scatter of `numel` values, in their order."""
        touched = frozenset(self._touched)
        self._touched.clear()
        in_order = [(index, self.tensors[index]) for index in self.private.order]
        trainable = [t for _, t in in_order if t.trainable]
        if sum(t.part(world) for t in trainable) * world == numel:
            return trainable
        some = [t for index, t in in_order if index in touched]
        if sum(t.part(world) for t in some) * world == numel:
            return some
        raise RuntimeError(
            f"attach: FSDP reduces {numel} values of {self.name or 'the root module'}, whose trainable parameters do "
            "not add up to that; attach after the model is complete, and call it by its forward()"
        )

    def gathered_lengths(self, world: int, full_world: int) -> list[int]:
        """The lengths of a rank's parts in an all-gather over `world` ranks, of a model sharded over `full_world`."""
        return [t.part(full_world) * full_world // world for t in self.tensors]


def _sharded_parameter(private: Parameter, names: dict[nn.Module, str]) -> Sharded:
    module, name = private.place
    return Sharded(f"{names[module]}.{name}".removeprefix("."), private.shape, private.dim, private)


def units(model: nn.Module) -> list[Unit]:
    """Every unit of a model, outermost first; refuses what the hooks of FSDP2 cannot serve."""
    names = {module: name for name, module in model.named_modules()}
    every: list[Unit] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = param_groups(module)
        if not groups or id(groups[0].private) in seen:
            continue
        seen.add(id(groups[0].private))
        _check(name, groups)
        every.append(Unit(len(every), name, module, names))
    return every


def _check(name: str, groups: Sequence[ParameterGroup]) -> None:
    place = name or "the root module"
    if len(groups) > 1:
        raise ValueError(
            f"attach: {place} shards its parameters over several meshes, and FSDP2 takes no custom collectives there; "
            "give such parameters a fully_shard of their own"
        )
    if not isinstance(groups[0].mesh, FSDPMeshInfo):
        raise ValueError(
            f"attach: {place} is replicated over a mesh {tuple(groups[0].mesh.mesh.shape)} and not sharded; "
            "use DistributedDataParallel, or a mesh with a dimension to shard over"
        )


def is_hsdp(mesh: DDPMeshInfo | FSDPMeshInfo) -> bool:
    return isinstance(mesh, HSDPMeshInfo)


def groups_of(every: Sequence[Unit]) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """The shard group, and that of the replicas, which all units must share."""
    shard = {_ranks(unit.mesh.shard_process_group): unit.mesh.shard_process_group for unit in every}
    if len(shard) > 1:
        raise ValueError(
            f"attach: the modules are sharded over different ranks, {', '.join(map(str, shard))}; attach takes one "
            "mesh for a model, so attach to each part by itself"
        )
    replicas = {_ranks(unit.mesh.replicate_process_group) if is_hsdp(unit.mesh) else (): unit.mesh for unit in every}
    if len(replicas) > 1:
        raise ValueError("attach: some modules have replicas (a 2-D mesh) and some have not; use one mesh for all")
    mesh = every[0].mesh
    return mesh.shard_process_group, mesh.replicate_process_group if is_hsdp(mesh) else None


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def unsharded_parameters(model: nn.Module, every: Sequence[Unit]) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters that no unit holds: FSDP neither shards them nor reduces their gradients."""
    held = {tensor.name for unit in every for tensor in unit.tensors}
    for name, parameter in model.named_parameters():
        if name not in held and parameter.requires_grad:
            yield name, parameter
