"""Residuals, through a file that one rank writes and all read: what frameworks do with a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist.models import mlp, wrapped
from dist.pool import Pool
from dist.shards import loss, mesh_of, replicated_mesh, sharded
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import narrowcast as nc
from narrowcast.parallel.residuals import WholeResiduals

State = dict[str, Tensor]


def model_of(group: dist.ProcessGroup, kind: str) -> nn.Module:
    if kind == "ddp":
        return wrapped(group)
    return sharded(replicated_mesh(2, 4) if kind == "hsdp" else mesh_of(group))


def whole(state: State) -> State:
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}


def written(group: dist.ProcessGroup, kind: str, path: str) -> tuple[State, State]:
    """The residuals after some steps, by the handle; and this rank's share of the file's content."""
    rank, model = dist.get_rank(group), model_of(group, kind)
    handle = nc.attach(model, "int4/64+ef", min_values=1)
    for step in range(3):
        model.zero_grad()
        loss(model, rank, step).backward()
    expected, found = whole(handle.state_dict()), WholeResiduals(handle, writes=rank == 0).state_dict()
    if rank == 0:
        torch.save(found, path)
    handle.detach()
    return expected, found


def read(group: dist.ProcessGroup, kind: str, path: str) -> State:
    model = model_of(group, kind)
    handle = nc.attach(model, "int4/64+ef", min_values=1)
    # nothing but plain tensors: what a cautious torch.load takes
    WholeResiduals(handle, writes=False).load_state_dict(torch.load(path, weights_only=True))
    found = whole(handle.state_dict())
    handle.detach()
    return found


@pytest.mark.parametrize(
    "kind, world, then",
    [("ddp", 2, "ddp"), ("fsdp", 2, "fsdp"), ("fsdp", 3, "fsdp"), ("fsdp", 2, "ddp"), ("hsdp", 8, "fsdp")],
)
def test_one_rank_writes_the_residuals_of_all(pool: Pool, tmp_path: Path, kind: str, world: int, then: str) -> None:
    path = str(tmp_path / "residuals.pt")
    states = pool.run(world, written, kind, path)
    expected = states[0][0]
    assert {name: value.shape for name, value in expected.items()} == {n: p.shape for n, p in mlp().named_parameters()}
    assert all(value.abs().max() > 0 for value in expected.values())
    assert [bool(found) for _, found in states] == [True] + [False] * (world - 1)
    for found in pool.run(2, read, then, path):
        assert found.keys() == expected.keys()
        # two ranks start from the mean, and the mean of two equal numbers is exact
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def on_the_mesh(group: dist.ProcessGroup) -> set[str]:
    """Where the parts of the state lie, for a model whose collectives run on another device than its shards."""
    model = sharded(mesh_of(group))
    handle = nc.attach(model, "int4/64+ef", min_values=1)
    for _, tensor in handle._state.with_residuals():
        tensor.private.device = torch.device("meta")
    found = {value.to_local().device.type for value in handle.state_dict().values()}
    handle.detach()
    return found


def test_residuals_lie_where_the_mesh_can_gather_them(pool: Pool) -> None:
    assert pool.run(2, on_the_mesh) == [{"meta"}] * 2
