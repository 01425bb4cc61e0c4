"""FSDP2: what is left of a model that goes without detach(), and several models side by side."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from dist.models import error_of, mlp
from dist.pool import Pool, soon
from dist.shards import loss, mesh_of, replicated_mesh, sharded
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

import narrowcast as nc
from narrowcast.parallel.fsdp import optimizer_check
from narrowcast.parallel.handle import GONE


def resources() -> tuple[int, int]:
    """Threads and open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def grown_since(before: tuple[int, int]) -> list[tuple[int, int]]:
    """What there is more of, after a moment for threads that were told to end."""

    def grown() -> list[tuple[int, int]]:
        return [(now, then) for now, then in zip(resources(), before, strict=True) if now > then]

    soon(lambda: not grown())
    return grown()


def trained(mesh: DeviceMesh, rank: int, steps: int) -> tuple[weakref.ref[object], nc.Handle]:
    """A model that is dropped after so many steps, and its handle."""
    model = sharded(mesh)
    handle = nc.attach(model, "int8/64+ef", parameters="int8/64", min_values=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss(model, rank, step).backward()
        optimizer.step()
    return weakref.ref(model), handle


def dropped(group: dist.ProcessGroup, replicas: int, steps: int) -> list[str]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    mesh = replicated_mesh(replicas, world // replicas) if replicas > 1 else mesh_of(group)
    trained(mesh, rank, steps)
    gc.collect()
    before, watched = resources(), len(optimizer_check._watched)
    kept = [trained(mesh, rank, steps) for _ in range(3)]

    def left() -> int:
        gc.collect()
        return sum(model() is not None for model, _ in kept)

    assert soon(lambda: not left())
    assert grown_since(before) == []
    assert len(optimizer_check._watched) <= watched
    for _, handle in kept:
        assert handle.step == steps
        assert handle.stats()["calls"] == handle.stats()["gradient_calls"] + sum(
            handle.stats()[f"{role}_calls"] for role in ("parameter", "between")
        )
        handle.detach()
    return [error_of(kept[0][1].explain), error_of(kept[0][1].state_dict)]


@pytest.mark.parametrize("replicas, steps", [(1, 2), (2, 0), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_a_model_that_is_dropped_without_detach_is_freed_with_its_channels(
    pool: Pool, replicas: int, steps: int
) -> None:
    for errors in pool.run(2 if replicas == 1 else 8, dropped, replicas, steps):
        assert errors == [f"RuntimeError: {GONE}"] * 2


def detached(group: dist.ProcessGroup) -> bool:
    """A handle says after detach() what it said before."""
    model = sharded(mesh_of(group))
    handle = nc.attach(model, "int8/64", min_values=1)
    loss(model, dist.get_rank(group), 0).backward()
    said = handle.explain(), handle.step
    handle.detach()
    return (handle.explain(), handle.step) == said and handle.step == 1


def test_a_handle_can_be_read_after_detach(pool: Pool) -> None:
    assert pool.run(2, detached) == [True] * 2


def side_by_side(group: dist.ProcessGroup, count: int, foreign: bool) -> int:
    """Models that step one after another, with a hook of somebody else's between ours."""
    mesh, rank, others = mesh_of(group), dist.get_rank(group), []
    models = [sharded(mesh) for _ in range(count)]
    handles = [nc.attach(model, "int8/64", min_values=1) for model in models]
    hook = register_optimizer_step_pre_hook(lambda *_: others.append(1)) if foreign else None
    for model in models:
        loss(model, rank, 0).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    if hook is not None:
        hook.remove()
    found = len(optimizer_check._watched)
    for handle in handles:
        handle.detach()
    assert len(others) == (count if foreign else 0)
    return found


@pytest.mark.parametrize("count, foreign", [(1, True), (2, False), (3, True)])
def test_several_models_step_side_by_side(pool: Pool, count: int, foreign: bool) -> None:
    assert pool.run(2, side_by_side, count, foreign) == [0, 0]


def of_another(group: dist.ProcessGroup) -> list[str]:
    """Optimizers that step without a gradient, of another sharded model of the same shapes and of the old tensors."""
    mesh, module = mesh_of(group), mlp()
    old = torch.optim.SGD(module.parameters(), lr=0.1)
    model, other = sharded(mesh, module), sharded(mesh)
    handle = nc.attach(model, "int8/64", min_values=1)
    found = [error_of(torch.optim.SGD(other.parameters(), lr=0.1).step), error_of(old.step)]
    handle.detach()
    found.append(error_of(old.step))
    return found


def test_the_optimizer_of_another_model_is_not_taken_for_an_old_one(pool: Pool) -> None:
    for other, old, afterwards in pool.run(2, of_another):
        assert (other, afterwards) == ("", "")
        assert old.startswith("RuntimeError: attach: this optimizer holds the parameters that the model had before")
