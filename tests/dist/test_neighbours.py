"""Averaging with neighbours: the graphs, the formula, and that the mean over all workers stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.models import bits, error_of, mlp
from dist.pool import Pool
from dist.test_local import average
from dist.test_local_state import Few, leaves
from dist.test_streaming import through_stops
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.collectives import as_seen, noise_of
from narrowcast.parallel import LocalUpdates
from narrowcast.parallel.local_sgd import Copies, consensus_of, seat, seen, to_send
from narrowcast.parallel.local_sgd.graph import KINDS, Neighbourhood, sets
from narrowcast.parallel.local_sgd.settings import nesterov

GOSSIP = KINDS[1:]
SIZES = (1, 2, 3, 4, 5, 8, 16, 63)


def weights(kind: str, round_: int, world: int) -> Tensor:
    """Row w: what worker w's new value is made of."""
    matrix = torch.zeros(world, world, dtype=torch.float64)
    for worker in range(world):
        at = seat(kind, round_, worker, world, 7)
        assert set(at.sources) == {
            peer for peer in range(world) if worker in seat(kind, round_, peer, world, 7).targets
        }
        assert worker not in at.sources
        for peer in at.sources:
            matrix[worker, peer] += at.weight
        matrix[worker, worker] += 1 - at.weight * len(at.sources)
    return matrix


@pytest.mark.parametrize("kind", GOSSIP)
def test_what_workers_give_and_get_adds_up_to_one_and_all_hear_of_all(kind: str) -> None:
    for world in SIZES:
        total = torch.eye(world, dtype=torch.float64)
        for round_ in range(max(sets(kind, world), 1)):
            matrix = weights(kind, round_, world)
            assert torch.allclose(matrix.sum(0), torch.ones(world, dtype=torch.float64))
            assert torch.allclose(matrix.sum(1), torch.ones(world, dtype=torch.float64))
            total = matrix @ total
        far = torch.linalg.matrix_power(total, 4 * world)
        assert (far > 0).all(), world
        if kind == "exponential" and world & (world - 1) == 0:
            assert torch.allclose(total, torch.full_like(total, 1 / world))


def test_pairs_are_those_of_the_seed() -> None:
    found = {seat("pairs", 0, 0, 64, seed) for seed in range(8)}
    assert len(found) > 4
    assert seat("pairs", 0, 5, 64, 3) == seat("pairs", sets("pairs", 64), 5, 64, 3)
    assert seat("ring", 4, 0, 2, 0) == Neighbourhood(("ring", 0), (1,), (1,))


def values(rank: int, round_: int) -> Tensor:
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(100 * round_ + rank))


def by_formula(group: dist.ProcessGroup, kind: str) -> None:
    """Each worker moves, then takes the weighted mean of what its neighbours have: written down with a matrix."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model = Few(torch.float32)
    how = {"every": 1, "mixing": kind, "outer": average, "group": group, "min_values": 1, "seed": 7}
    local = nc.LocalSGD(model, spec="fp32", **how)
    state = torch.stack([model.a.detach().double()] * world)
    for round_ in range(6):
        with torch.no_grad():
            model.a.add_(values(rank, round_))
        local.step()
        state += torch.stack([values(peer, round_) for peer in range(world)]).double()
        state = torch.einsum("wv,vij->wij", weights(kind, round_, world), state)
        assert torch.allclose(model.a.detach().double(), state[rank], atol=1e-5), round_
    local.check_ranks()
    assert local.stats()["variance"] > 0
    local.exchange()
    assert torch.allclose(model.a.detach().double(), state.mean(0), atol=1e-5)
    local.close()


@pytest.mark.parametrize("kind", GOSSIP)
def test_a_round_is_the_weighted_mean_of_the_neighbours(pool: Pool, kind: str) -> None:
    pool.run(4, by_formula, kind)


def agreeing(
    group: dist.ProcessGroup, kind: str, spec: str, consensus: float | None
) -> tuple[Tensor, list[float], bytes]:
    """Workers that stand still, far apart: few bits bring them together, and their mean does not move."""
    rank, model = dist.get_rank(group), Few(torch.float32)
    updates = nc.simulate.LocalUpdates(1, mixing=kind, consensus=consensus, variance_every=8, outer=average)
    local = nc.LocalSGD(model, spec=spec, local=updates, group=group, min_values=1)
    with torch.no_grad():
        model.a.add_(values(rank, 0))
    before, looks = model.a.detach().clone(), []
    dist.all_reduce(before, group=group)
    for _ in range(33):
        local.step()
        looks.append(local.stats()["variance"])
    after = model.a.detach().clone()
    dist.all_reduce(after, group=group)
    local.exchange()
    local.close()
    return (after - before).abs().max(), looks[::8], bits(model)


@pytest.mark.parametrize(
    "kind, spec, consensus",
    [("ring", "int4/64", 1.0), ("exponential", "e3m0/64+ef", 0.5), ("pairs", "int2/64+top16+ef95", None)],
)
def test_few_bits_bring_workers_together_and_keep_their_mean(
    pool: Pool, kind: str, spec: str, consensus: float | None
) -> None:
    found = pool.run(4, agreeing, kind, spec, consensus)
    assert len({same for _, _, same in found}) == 1
    for moved, looks, _ in found:
        assert float(moved) < 1e-4
        assert looks[-1] < 0.1 * looks[0]
        assert looks == found[0][1]


def test_what_a_message_left_out_is_in_the_next_and_nothing_spoils_what_is_known() -> None:
    copies, codec, place = Copies(), nc.codec("int2/64"), (("ring", 0), 3)
    x = torch.randn(128, generator=torch.Generator().manual_seed(0))
    copies.meet({"a": torch.zeros(128)})
    gaps = []
    for _ in range(12):
        difference = to_send(x, codec, copies, place, ["a"])
        gaps.append(float(difference.abs().max()))
        known = seen(codec.decode(codec.encode(difference), 128), codec, copies, place, ["a"])
        assert torch.allclose(known + to_send(x, codec, copies, place, ["a"]), x, atol=1e-6)
    assert gaps[-1] < 0.01 * gaps[0]
    broken = seen(torch.full((128,), math.nan), codec, copies, place, ["a"])
    assert broken.isnan().all()
    assert copies.flat(place, ["a"]).isfinite().all()


def stopped(group: dist.ProcessGroup) -> tuple[list[Tensor], list[Tensor], str]:
    """A state is the mean of the workers; a worker that goes on from it has that, whoever it was."""
    rank, model = dist.get_rank(group), Few(torch.float32)
    how = {"every": 2, "mixing": "ring", "spec": "int8/64", "group": group, "min_values": 1}
    local = nc.LocalSGD(model, **how)
    for step in range(5):
        model.walk(rank, step)
        local.step()
    state, anchors = local.state_dict(), [a.clone() for a in local._own.anchors.values()]
    local.load_state_dict(state)
    same = [torch.equal(a, state["anchors"][n]) for n, a in local._own.anchors.items()]
    model.walk(rank, 5)
    assert local.step()
    local.close()
    low_rank = error_of(lambda: nc.LocalSGD(mlp(), **{**how, "spec": "bf16+rank2+ef"}))
    assert all(same)
    return anchors, [*state["anchors"].values()], low_rank


def test_a_state_is_the_mean_of_all_workers(pool: Pool) -> None:
    found = pool.run(3, stopped)
    for number, mean in enumerate(found[0][1]):
        assert torch.allclose(torch.stack([own[number] for own, _, _ in found]).mean(0), mean, atol=1e-6)
    assert all("whose factors are a sum over all workers" in error for _, _, error in found)


class Odd(nn.Module):
    """A single value, none at all, and running statistics in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.tensor(1.0))
        self.c = nn.Parameter(torch.empty(0))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.bfloat16))


def states(group: dist.ProcessGroup, kind: str) -> list[str]:
    """The outer optimizers and delays with which workers save different states."""
    rank, wrong = dist.get_rank(group), []
    for outer, delay in ((nesterov, 0), (nesterov, 1), (lambda a: torch.optim.Adam(a, lr=0.1), 1)):
        model, updates = Odd(), LocalUpdates(2, delay=delay, mixing=kind, outer=outer)
        local = nc.LocalSGD(model, spec="int4/64", local=updates, group=group, min_values=1)
        for step in range(6):
            with torch.no_grad():
                for x in (*model.parameters(), model.get_buffer("mean")):
                    x.add_(rank + step / 8)
            local.step()
        found = [x.reshape(-1).double() for x in leaves(local.state_dict())]
        ours = torch.cat(found).view(torch.uint8)
        everyones = [torch.empty_like(ours) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyones, ours, group=group)
        wrong += [f"{outer} {delay}"] * any(not torch.equal(own, ours) for own in everyones)
        local.close()
    return wrong


@pytest.mark.parametrize("kind", GOSSIP)
def test_all_workers_save_the_same_state(pool: Pool, kind: str) -> None:
    assert pool.run(3, states, kind) == [[]] * 3


def landing_badly(group: dist.ProcessGroup, plan: dict[str, Any]) -> str:
    """One worker's outer optimizer fails, and it closes nothing until the others have heard of it."""
    local = nc.LocalSGD(Few(torch.float32), spec="int8/64", group=group, min_values=1, **plan)
    if dist.get_rank(group) == 1:
        local._own.outer.register_step_pre_hook(lambda *_: int("boom"))  # type: ignore[arg-type]
    found = error_of(lambda: [local.step() for _ in range(9)])
    dist.barrier(group)
    local.close()
    return found


@pytest.mark.parametrize(
    "plan", [{"every": 2}, {"every": 4, "fragments": 2, "delay": 1}, {"every": 2, "mixing": "ring"}]
)
def test_a_worker_whose_landing_fails_tells_the_others(pool: Pool, plan: dict[str, Any]) -> None:
    for rank, found in enumerate(pool.run(3, landing_badly, plan)):
        assert ("ValueError" if rank == 1 else "rank 1 failed with ValueError") in found, found


def test_a_look_at_the_state_changes_no_bit(pool: Pool) -> None:
    straight = pool.run(3, through_stops, "straight", "ring")
    assert pool.run(3, through_stops, "looked", "ring") == straight


def test_how_far_workers_go_is_what_the_wire_bears() -> None:
    found = {spec: consensus_of(None, nc.codec(spec)) for spec in ("fp32", "int8/256", "int4/128", "e3m0/64")}
    assert set(found.values()) == {1.0}
    few = [consensus_of(None, nc.codec(spec)) for spec in ("int2/64", "int2/512+top64", "int2/4096+top64")]
    assert few == sorted(few, reverse=True)
    assert 0.01 < few[2] < few[0] < 0.6
    assert consensus_of(0.25, nc.codec("int2/64")) == 0.25


def test_each_sender_draws_by_itself() -> None:
    x, codec = torch.randn(256, generator=torch.Generator().manual_seed(0)), nc.codec("int4/64+sr")
    one, same, other = (as_seen(x, codec, [256], noise_of("test", codec, 5, (0, 0)), rank) for rank in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
