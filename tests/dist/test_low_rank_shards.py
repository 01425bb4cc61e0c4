"""Low rank in LocalSGD and in FSDP2, on real processes: bit for bit what the simulator makes of the same values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist.models import error_of
from dist.pool import Pool
from dist.shards import mesh_of, replicated_mesh
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import narrowcast as nc
from narrowcast.codecs import low_rank_specs
from narrowcast.simulate import World

ROUNDS = 4


class Average(torch.optim.SGD):
    """Keeps what it was given."""

    def __init__(self, anchors: list[Tensor]) -> None:
        super().__init__(anchors, lr=1.0)
        self.given: list[list[Tensor]] = []

    def step(self, closure: object = None) -> None:
        self.given.append([anchor.grad.clone() for group in self.param_groups for anchor in group["params"]])
        super().step()


class Shapes(nn.Module):
    """A matrix, a convolution, another matrix, and a vector; strided: channels last and transposed."""

    def __init__(self, strided: bool = False) -> None:
        super().__init__()
        conv, flat = torch.zeros(20, 6, 5, 5), torch.zeros(50, 40)
        if strided:
            conv, flat = conv.to(memory_format=torch.channels_last), flat.t().contiguous().t()
        for name, value in (("a", torch.zeros(60, 45)), ("b", conv), ("c", flat)):
            self.register_parameter(name, nn.Parameter(value))
        self.d = nn.Parameter(torch.zeros(333))

    @torch.no_grad()
    def walk(self, rank: int, step: int) -> list[Tensor]:
        """By how much the parameters went down."""
        draw, before = torch.Generator().manual_seed(10 * step + rank), [p.clone() for p in self.parameters()]
        for p in self.parameters():
            p.sub_(torch.randn(p.shape, generator=draw))
        return [old - p for old, p in zip(before, self.parameters(), strict=True)]

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        """Of which the gradients are those given."""
        return sum((getattr(self, name) * given[name]).sum() for name in "abcd")


def exchanged(group: dist.ProcessGroup, spec: str) -> tuple[list[list[Tensor]], list[list[Tensor]], dict[str, Tensor]]:
    """What this worker moved by in each round, what all got, and the state of the first three."""
    model, made, moved = Shapes(strided=True), list[Average](), []
    local = nc.LocalSGD(
        model, every=1, spec=spec, outer=lambda a: made.append(Average(a)) or made[0], group=group, min_values=1, seed=3
    )
    for step in range(ROUNDS):
        moved.append(model.walk(dist.get_rank(group), step))
        local.step()
    local.check_ranks()
    state = local.state_dict()
    local.close()
    kept = {name: value for name, value in state["owed"].items() if name in "abc"}
    return moved, made[0].given, {**kept, **{key: value for key, value in state["factors"].items() if value.any()}}


@pytest.mark.parametrize("spec", low_rank_specs())
def test_local_updates_by_low_rank_are_those_of_the_simulator(pool: Pool, spec: str) -> None:
    found, names = pool.run(3, exchanged, spec), ("a", "b", "c")
    world = World(3, "auto", spec, seed=3)
    for step in range(ROUNDS):
        own = [[tensor.contiguous() for tensor in moved[step][:3]] for moved, _, _ in found]
        expected = world.all_reduce(own, "avg", step=(step, 0), names=names)[0]
        for _, given, _ in found:
            assert all(torch.equal(x, y) for x, y in zip(given[step][:3], expected, strict=True))
    for _, _, state in found:
        for name, value in world.state_dict().items():
            assert torch.allclose(state[name].flatten(), value.flatten(), atol=1e-6), name


def trained_shards(group: dist.ProcessGroup, spec: str, folder: str) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Gradients of a model in two units, one of them sharded by columns; from a checkpoint after the second step."""

    def attached() -> tuple[nn.Module, nc.Handle]:
        model = Shapes()
        model.e = nn.Linear(48, 40, bias=False)
        nn.init.zeros_(model.e.weight)
        fully_shard(model.e, mesh=mesh_of(group), shard_placement_fn=lambda p: Shard(1))
        fully_shard(model, mesh=mesh_of(group))
        return model, nc.attach(model, spec, min_values=1, seed=3)

    (model, handle), arrived = attached(), []
    for step in range(ROUNDS):
        model.zero_grad()
        given = given_gradients(dist.get_rank(group), step)
        (model(given) + model.e(given["e"]).diagonal().sum()).backward()
        arrived.append([p.grad.full_tensor() for p in model.parameters()])
        if step == 1 and "+ef" not in spec:
            dcp.save({"narrowcast": handle}, checkpoint_id=folder, process_group=group)
            handle.detach()
            model, handle = attached()
            dcp.load({"narrowcast": handle}, checkpoint_id=folder, process_group=group)
    handle.check_ranks()
    state = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in handle.state_dict().items()}
    handle.detach()
    return arrived, state


def given_gradients(rank: int, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    shapes = {name: tuple(p.shape) for name, p in Shapes().named_parameters()} | {"e": (40, 48)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.mark.parametrize("spec", low_rank_specs())
def test_gradients_of_shards_are_those_of_the_simulator(pool: Pool, spec: str, tmp_path: Path) -> None:
    found = pool.run(3, trained_shards, spec, str(tmp_path))
    world, units = World(3, "auto", spec, seed=3), (("a", "b", "c"), ("e",))
    for step in range(ROUNDS):
        given = [given_gradients(rank, step) for rank in range(3)]
        for names in units:
            own = [[one[name] for name in names] for one in given]
            keys = [name.replace("e", "e.weight") for name in names]
            expected = world.all_reduce(own, "avg", step=(step, 0), names=keys)[0]
            for arrived, _ in found:
                got = dict(zip(("a", "b", "c", "d", "e"), arrived[step], strict=True))
                assert all(torch.equal(got[name], whole) for name, whole in zip(names, expected, strict=True))
    for _, state in found:
        for name, value in world.state_dict().items():
            assert torch.allclose(state[name].flatten(), value.flatten(), atol=1e-6), name


def owed(group: dist.ProcessGroup, op: str, spec: str) -> tuple[float, float]:
    """What has not arrived after some steps, at its largest; and what of that is not in the residual."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    model = fully_shard(nn.Linear(48, 40, bias=False), mesh=mesh_of(group))
    if op == "divided":
        model.set_gradient_divide_factor(8.0)
    model.set_force_sum_reduction_for_comms(op == "sum")
    share = 1 / 8 if op == "divided" else 1 / world
    handle, missing = nc.attach(model, spec, min_values=1), torch.zeros(40, 48, dtype=torch.double)
    for step in range(ROUNDS):
        given = given_gradients(rank, step)["e"]
        model.zero_grad()
        model(given).diagonal().sum().backward()
        total = given.double()
        dist.all_reduce(total, group=group)
        missing += total * share - model.weight.grad.full_tensor().double()
    left = handle.state_dict()["weight"].full_tensor().double() * world * share
    handle.detach()
    return float(missing.abs().max()), float((missing - left).abs().max())


@pytest.mark.parametrize("op", ["mean", "sum", "divided"])
@pytest.mark.parametrize("spec", ["fp32+rank2+ef", "int8/64+acp2+ef"])
def test_nothing_is_lost_whatever_fsdp_asks_for(pool: Pool, op: str, spec: str) -> None:
    for missing, lost in pool.run(3, owed, op, spec):
        assert missing > 0.1
        assert lost < 2e-6


def replicas(group: dist.ProcessGroup) -> str:
    model = fully_shard(Shapes(), mesh=replicated_mesh(2, 4))
    dist.barrier(group)  # a rank that is refused and leaves must not cut off one that still connects
    return error_of(lambda: nc.attach(model, "bf16+rank2+ef", min_values=1))


def test_replicas_have_shards_of_matrices_alone(pool: Pool) -> None:
    for text in pool.run(8, replicas):
        assert "between replicas there are shards of them; shard over a 1-D mesh, or take bf16" in text


def sharded_local(group: dist.ProcessGroup) -> str:
    model = fully_shard(Shapes(), mesh=mesh_of(group))
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return error_of(lambda: nc.LocalSGD(model, every=500, spec="bf16+rank2+ef", group=alone, min_values=1))


def test_local_updates_of_shards_have_no_whole_matrices(pool: Pool) -> None:
    for text in pool.run(8, sharded_local):
        assert "is sharded, and low rank sums whole matrices; take bf16" in text
