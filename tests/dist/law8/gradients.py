"""Law 8 in DDP, FSDP2 and HSDP: an optimizer writes down what it is given."""

from __future__ import annotations

import fnmatch
import functools
import random
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from dist.law8.cases import Case
from dist.law8.ledger import Ledger
from dist.law8.toy import Toy, short, uses, values
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.parallel.autopilot import Decided, Replay
from narrowcast.parallel.policy import TensorInfo, choose

State = dict[str, Tensor]


GROUPS = ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 2), (1, 3), (2, 3))
"""Of ranks that train together; the last three are replicas and shards of HSDP."""


@functools.lru_cache
def make_groups(_: object = None) -> None:
    """On all ranks of the pool, once."""
    for ranks in GROUPS:
        _MADE[ranks] = dist.new_group(ranks)


_MADE: dict[tuple[int, ...], dist.ProcessGroup] = {}


def group_of(*ranks: int) -> dist.ProcessGroup:
    return _MADE[ranks]


@functools.lru_cache
def mesh_of(kind: str, world: int) -> DeviceMesh:
    if kind == "fsdp":
        return DeviceMesh.from_group(group_of(*range(world)), "cpu", mesh_dim_names=("shard",))
    row, column = divmod(dist.get_rank(), 2)
    groups = [group_of(column, column + 2), group_of(2 * row, 2 * row + 1)]
    return DeviceMesh.from_group(groups, "cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))


def wrapped(case: Case, world: int, first: int) -> nn.Module:
    model = Toy(case)
    if case.kind == "ddp":
        options = {"find_unused_parameters": case.unused > 0, "gradient_as_bucket_view": case.bucket_view}
        return DDP(model, process_group=group_of(*range(world)), bucket_cap_mb=0.002, **options)
    mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if case.dtypes == "mixed" else {}
    if case.reduce:
        mixed["reduce_dtype"] = getattr(torch, case.reduce[-1 if first else 0])
    options = {"mesh": mesh_of(case.kind, world), "mp_policy": MixedPrecisionPolicy(**mixed)}
    fully_shard(model.part, **options)
    return fully_shard(model, **options)


def schedule(case: Case, first: int, every: int, names: Iterable[str] = ()) -> object:
    """The plan of a case as a policy, for a run that begins at iteration `first` and counts `every` steps in each."""
    entries: dict[int, object] = {max(0, start - first) * every: dict(wires) for start, wires in case.plan}
    if case.piloted:
        return Replay([_decided(step, wires, names) for step, wires in sorted(entries.items())])
    # a policy that never asks for feedback again has no use for what is owed, and FSDP2 says so
    return nc.schedule({**entries, 10**6: "int8/64+ef"})


def _decided(step: int, wires: object, names: Iterable[str]) -> Decided:
    """What an autopilot would have noted."""
    infos = [TensorInfo(name, (1,), torch.float32) for name in names]
    found = {info.name: choose(wires, info, 0, 0).codec.spec for info in infos}
    return Decided(step, "plain" if set(found.values()) <= {"as-is"} else "wires", found)


def wire_of(case: Case, name: str, iteration: int) -> nc.Codec:
    wires = [wires for start, wires in case.plan if start <= iteration][-1]
    return nc.codec(next(wire for pattern, wire in wires if fnmatch.fnmatchcase(name, pattern)))


def counts(case: Case, name: str, like: Tensor, iteration: int) -> bool:
    """Whether nothing may be lost: with feedback, or where nothing is rounded but by float32."""
    codec, _ = wire_of(case, name, iteration).for_shape(like.shape)
    return codec.feedback or (codec.lossless and like.dtype == torch.float32 and not case.reduce)


class Recorder(torch.optim.Optimizer):
    """Steps that change nothing and keep what they were given."""

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        super().__init__(named.values(), {})
        self.named, self.given = named, {}

    def step(self, closure: object = None) -> None:
        self.given = {name: local(p.grad).double() for name, p in self.named.items() if p.grad is not None}
        self.given |= {name: torch.zeros_like(local(p)).double() for name, p in self.named.items() if p.grad is None}


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class Training:
    """One part of a case: a model, attached, from one checkpoint to the next."""

    def __init__(self, case: Case, world: int, first: int, state: State) -> None:
        self.case, self.world, self.rank = case, world, dist.get_rank()
        self.model = wrapped(case, world, first)
        module = self.model.module if case.kind == "ddp" else self.model
        self.named = dict(module.named_parameters())
        scale = 2.0 ** random.Random(case.seed).randint(0, 10)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3, enabled=case.scaler)
        policy = schedule(case, first, case.passes if case.sync == "every" else 1, self.named)
        options = {"algorithm": case.algorithm} if case.kind == "ddp" else {}
        if case.inner is not None:
            options = {"nodes": 1 + (world % 2 == 0), "inner": case.inner}
        if case.between is not None:
            options["between"] = case.between
        scaler = self.scaler if case.scaler else None
        self.handle = nc.attach(self.model, policy, scaler=scaler, min_values=1, seed=case.seed, **options)
        if state:
            self.handle.load_state_dict(state)
        members = [list(self.named)[number :: case.optimizers] for number in range(case.optimizers)]
        self.optimizers = [Recorder({name: self.named[name] for name in names}) for names in members]
        self.pending: State = {}

    def iterate(self, iteration: int, ledger: Ledger, settle: bool) -> None:
        """settle: every optimizer steps, since somebody is going to compare."""
        case = self.case
        self._freeze(iteration)
        sums: State = {name: torch.zeros(p.shape, dtype=torch.double) for name, p in self.named.items()}
        for number in range(case.passes):
            gradients = self._gradients(iteration, number)
            with self._pass(number):
                loss = self.model({short(name): g for name, g in gradients.items()})
                self.scaler.scale(loss).backward()
            for name, gradient in gradients.items():
                if self.named[name].requires_grad:
                    sums[name] += gradient
        self._want(sums, ledger)
        for optimizer in self.optimizers:
            if settle or not (case.lazy and optimizer is self.optimizers[1] and iteration % 2):
                self._step(optimizer, iteration, ledger)
        if case.scaler:
            self.scaler.update(self.scaler.get_scale() / 2 if iteration in case.lowered else None)
        ledger.steps += case.passes
        ledger.world = max(ledger.world, self.world)

    def _freeze(self, iteration: int) -> None:
        if self.case.frozen is not None and iteration >= self.case.frozen:
            parameter = list(self.named.values())[-1]
            parameter.requires_grad_(False)

    def _pass(self, number: int) -> Any:
        """A pass that communicates or does not."""
        talks = self.case.sync == "every" or number == self.case.passes - 1
        if self.case.kind == "ddp":
            return nullcontext() if talks else self.model.no_sync()
        self.model.set_requires_gradient_sync(talks)
        return nullcontext()

    def _gradients(self, iteration: int, number: int) -> State:
        case, found = self.case, {}
        for place, (name, parameter) in enumerate(self.named.items()):
            # FSDP2 would go on computing gradients of what is frozen later
            if uses(case, iteration, number, self.rank, place) and (case.kind == "ddp" or parameter.requires_grad):
                narrow = case.reduce or (case.kind != "ddp" and case.dtypes == "mixed")
                dtype = torch.bfloat16 if narrow else parameter.dtype
                found[name] = values(case, (iteration, number, self.rank, place), tuple(parameter.shape), dtype)
        bad = random.Random(hash((case.seed, iteration)))
        if iteration in case.skips and number == bad.randrange(case.passes) and self.rank == bad.randrange(self.world):
            found[bad.choice([name for name, g in found.items() if g.numel()])].view(-1)[0] = torch.inf
        return found

    def _want(self, sums: State, ledger: Ledger) -> None:
        flat = torch.cat([value.flatten() for value in sums.values()])
        ledger.saw(flat)
        dist.all_reduce(flat, group=group_of(*range(self.world)))
        for (name, value), mean in zip(sums.items(), flat.split([v.numel() for v in sums.values()]), strict=True):
            part = self.part(name, mean.view(value.shape) / self.world)
            self.pending[name] = self.pending.get(name, torch.zeros_like(part)) + part

    def _step(self, optimizer: Recorder, iteration: int, ledger: Ledger) -> None:
        optimizer.given = {}
        if not self.case.scaler:
            optimizer.step()
        elif any(p.grad is not None for p in optimizer.named.values()):
            # a scaler refuses an optimizer that has nothing to do
            self.scaler.step(optimizer)
        for name, given in optimizer.given.items():
            if counts(self.case, name, self.named[name], iteration):
                ledger.count(name, self.pending[name], given)
        for name in optimizer.named:
            self.pending.pop(name, None)
        optimizer.zero_grad(self.case.set_to_none)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank holds of a tensor."""
        if self.case.kind == "ddp":
            return whole
        rank, count = (self.rank, self.world) if self.case.kind == "fsdp" else (self.rank % 2, 2)
        parts = torch.chunk(whole, count)
        return parts[rank] if rank < len(parts) else whole[:0]

    def whole(self, name: str, part: Tensor) -> Tensor:
        like = self.named[name]
        if not isinstance(like, DTensor):
            return part
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        ).full_tensor()

    def residuals(self) -> State:
        """This rank's part."""
        return {name: local(value) for name, value in self.handle.state_dict().items() if name in self.named}

    def state(self) -> State:
        """For a checkpoint."""
        return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in self.handle.state_dict().items()}

    def close(self) -> None:
        self.handle.detach()
