"""The autopilot on models of every kind: watching changes no bits, ranks stay alike, and a repeat has the same bits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.links import FAST, SLOW, made_up
from dist.models import bits, error_of, loss, mlp, wrapped
from dist.pool import Pool
from dist.shards import mesh_of, sharded
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import narrowcast as nc
from narrowcast.parallel import seeds
from narrowcast.parallel.autopilot import Decided, Replay, lines
from narrowcast.parallel.autopilot.link import DescribedLink

STEPS = 26


def changing(step: int) -> DescribedLink:
    return FAST if step >= 12 else SLOW


class Changing(nn.Module):
    """A layer that every second step does without, on every second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.some, self.end = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 5)
        self.uses = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.begin(x))
        return self.end(self.some(x) if self.uses else x)


class Empty(nn.Module):
    """A parameter without values, one of a single value, one that nobody trains, one in double, one in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.one = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(1))
        self.layer, self.frozen = nn.Linear(24, 33), nn.Linear(33, 33).requires_grad_(False)
        self.wide, self.short = nn.Linear(33, 9).double(), nn.Linear(33, 7).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.one * self.layer(x))
        return self.wide(x.double()).sum() + self.short(x.bfloat16()).square().sum().float() + self.none.sum()


class Picture(nn.Module):
    """Convolutions whose weights lie in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 17, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :12].reshape(-1, 3, 4, 6).contiguous(memory_format=torch.channels_last))


@dataclass(frozen=True)
class Kind:
    """A model, how DDP has it, and what its training does."""

    make: Callable[[], nn.Module] = mlp
    options: dict[str, Any] = field(default_factory=dict)
    passes: int = 1
    bad: tuple[int, ...] = ()
    """Steps whose gradients are not finite on rank 1."""
    scaler: bool = False


KINDS = {
    "one tensor": Kind(lambda: nn.Linear(24, 5, bias=False)),
    "unused": Kind(Changing, {"find_unused_parameters": True}),
    "static": Kind(options={"static_graph": True}),
    "views": Kind(options={"gradient_as_bucket_view": True}),
    "all types": Kind(Empty),
    "channels last": Kind(Picture),
    "16 bits": Kind(lambda: mlp().bfloat16()),
    "accumulated": Kind(passes=3),
    "not finite": Kind(bad=(9, 14)),
    "scaled": Kind(bad=(3, 4, 5, 12, 13), scaler=True),
}


def trained(kind: Kind, group: dist.ProcessGroup, policy: object) -> tuple[bytes, list[dict[str, Any]]]:
    seeds._COUNTS.clear()
    torch.manual_seed(0)
    rank, model = dist.get_rank(group), wrapped(group, kind.make(), **kind.options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if kind.scaler else None
    with made_up(changing):
        handle = None if policy is None else nc.attach(model, policy, min_values=0, scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            step_of(kind, model, optimizer, scaler, rank, step)
        history = [] if handle is None else handle.history()
        if handle is not None:
            handle.check_ranks() if not kind.bad or kind.scaler else None
            handle.state_dict()
            assert handle.explain()
            handle.detach()
    return bits(model.module), history


def step_of(kind: Kind, model: Any, optimizer: Any, scaler: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    for number in range(kind.passes):
        generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
        x = torch.randn(6, 24, generator=generator).to(torch.float32 if kind.make is Empty else dtype)
        if kind.make is Changing:
            model.module.uses = (step + rank) % 2 == 0
        with nullcontext() if number == kind.passes - 1 else model.no_sync():
            found = model(x).square().mean()
            if step in kind.bad and rank == 1:
                found = found * math.inf
            (found if scaler is None else scaler.scale(found)).backward()
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    elif step not in kind.bad:
        optimizer.step()


def dry(group: dist.ProcessGroup, name: str) -> tuple[bytes, bytes, int]:
    kind = KINDS[name]
    found, history = trained(kind, group, nc.auto(dry_run=True))
    return trained(kind, group, None)[0], found, len(history)


@pytest.mark.parametrize("name", KINDS)
def test_a_dry_run_changes_no_bits(pool: Pool, name: str) -> None:
    for plain, watched, decisions in pool.run(3, dry, name):
        assert plain == watched
        assert decisions


def wet(group: dist.ProcessGroup, name: str, path: str) -> tuple[bytes, bytes, list[Any]]:
    kind, own = KINDS[name], Path(f"{path}.{dist.get_rank(group)}")
    policy = nc.auto(candidates=["int8/64", "int4/64+sr+ef", "bf16+rank1+ef"], min_bits=0, every=5)
    found, history = trained(kind, group, policy)
    own.write_text(lines(history))
    return found, trained(kind, group, nc.replay(own))[0], history


@pytest.mark.parametrize("name", KINDS)
def test_ranks_stay_alike_and_a_repeat_has_the_same_bits(pool: Pool, tmp_path: Path, name: str) -> None:
    found = pool.run(2, wet, name, str(tmp_path / "run"))
    for bits_, again, history in found:
        assert history == found[0][2]
        assert bits_ == found[0][0]
        assert again == bits_
        assert any(entry["road"] != "plain" for entry in history), history


def under_scales(group: dist.ProcessGroup, where: str) -> list[dict[str, Any]]:
    """What is found of the same gradients, by the loss scale."""
    found = []
    for scale in (1.0, 2.0**12):
        model: Any = wrapped(group) if where == "ddp" else sharded(mesh_of(group))
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=scale)
        if where == "fsdp":
            scaler = ShardedGradScaler("cpu", init_scale=scale, process_group=group)
        handle = nc.attach(model, nc.auto(every=5, dry_run=True), min_values=1, scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss(model, dist.get_rank(group), step)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(handle._pilot.known.errors)
        handle.detach()
    return found


@pytest.mark.parametrize("where", ["ddp", "fsdp"])
def test_what_is_found_does_not_depend_on_the_loss_scale(pool: Pool, where: str) -> None:
    """Or tensors that were looked at under a larger one would count for more than others."""
    for plain, scaled in pool.run(2, under_scales, where):
        assert plain
        assert plain == scaled


def skipping(group: dist.ProcessGroup, where: str, enabled: bool) -> bool:
    model: Any = wrapped(group) if where == "ddp" else sharded(mesh_of(group))
    scaler: Any = torch.amp.GradScaler("cpu", enabled=enabled)
    if where == "fsdp":
        scaler = ShardedGradScaler("cpu", enabled=enabled, process_group=group)
    handle = nc.attach(model, "auto", min_values=1, scaler=scaler)
    skips: bool = handle._pilot._road.skips
    handle.detach()
    return skips


@pytest.mark.parametrize("where", ["ddp", "fsdp"])
def test_only_a_scaler_that_scales_skips_what_is_not_finite(pool: Pool, where: str) -> None:
    """One that is switched off, as for bfloat16, does nothing about it."""
    for enabled in (True, False):
        assert pool.run(2, skipping, where, enabled) == [enabled, enabled]


FEEDING = ("int4/64+ef", "int4/64+rot+ef", "onebit/64+ef", "bf16+rank1+ef", "int2/64+top16+ef")
SIZES = {"a": (40, 30), "b": (64, 24), "c": (700,)}


class Shown(nn.Module):
    """Gradients are what the input says."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            setattr(self, name, nn.Parameter(torch.zeros(size)))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split([p.numel() for p in self.parameters()])
        return sum(
            ((p.flatten() * part).sum() for p, part in zip(self.parameters(), parts, strict=True)), x.new_zeros(())
        )


def history_of(seed: int, steps: int) -> list[Decided]:
    """Wires that change at random, as an autopilot may change them: what is owed is sent where feedback ends."""
    chance, found, before = random.Random(seed), list[Decided](), dict[str, str]()
    for step in range(2, steps, 3):
        now = {name: chance.choice(FEEDING) for name in SIZES if chance.random() < 0.6}
        now = {name: "int4/64+ef" if "rank" in wire and name == "c" else wire for name, wire in now.items()}
        if owed := dict.fromkeys(sorted(set(before) - set(now)), "fp32+ef"):
            found.append(Decided(step, "wires", {**now, **owed}))
        found.append(Decided(step + bool(owed), "wires" if now else "plain", now))
        before = now
    return found


def kept(group: dist.ProcessGroup, seed: int, scaled: bool) -> tuple[float, list[str]]:
    """How far what was sent and what is kept are off from what was wanted, and who keeps what its wire cannot send."""
    rank, world, steps = dist.get_rank(group), dist.get_world_size(group), 30
    model = wrapped(group, Shown())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6) if scaled else None
    handle = nc.attach(model, Replay(history_of(seed, steps)), min_values=1, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    numel, wanted = sum(p.numel() for p in model.parameters()), 0.0
    skipped = {4, 11, 19} if scaled else set[int]()
    for step in range(steps):
        rows = [torch.randn(numel, generator=torch.Generator().manual_seed(97 * step + r)) for r in range(world)]
        own = rows[rank].clone()
        if step in skipped:
            own[5] = math.inf if rank == 1 else own[5]
        else:
            wanted = wanted + torch.stack(rows).double().mean(0)
        found = model(own)
        optimizer.zero_grad()
        (found if scaler is None else scaler.scale(found)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    residuals = handle.state_dict()
    flat = [residuals.get(name, torch.zeros(size)).flatten().double() for name, size in SIZES.items()]
    sent = -torch.cat([p.detach().flatten().double() for p in model.module.parameters()])
    last = history_of(seed, steps)[-1].wires
    left = [name for name, x in zip(SIZES, flat, strict=True) if name not in last and x.any()]
    handle.detach()
    return float((wanted - sent - torch.cat(flat)).abs().max()), left


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_sent_twice_whatever_wires_follow_each_other(pool: Pool, seed: int, scaled: bool) -> None:
    """Law 8 through changes of wires: what was sent and what is kept are what was wanted."""
    for off, left in pool.run(3, kept, seed, scaled):
        assert off < 1e-3
        assert scaled or not left


def again(group: dist.ProcessGroup) -> tuple[str, str]:
    """A policy after an attach that failed, and one that has a model."""
    policy = nc.auto()
    failed = error_of(lambda: nc.attach(wrapped(group), policy, nodes="none"))
    handle = nc.attach(wrapped(group), policy)
    taken = error_of(lambda: nc.attach(wrapped(group), policy))
    handle.detach()
    return failed, taken


def test_a_policy_is_free_after_an_attach_that_failed(pool: Pool) -> None:
    for failed, taken in pool.run(2, again):
        assert "nodes='none'" in failed
        assert "auto: this policy has a model already" in taken
