"""`LocalSGD` in fragments that travel while steps go on, against the formula, and through stops and faults."""

from __future__ import annotations

import itertools
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist.models import bits, error_of, mlp
from dist.pool import Pool
from dist.shards import full, replicated_mesh, sharded
from dist.test_local import alone, average, train
from dist.test_local_state import Few, filled, leaves
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.parallel import LocalUpdates
from narrowcast.parallel.local_sgd.fragments import Clock, fragments_of, layer_of
from narrowcast.parallel.local_sgd.replica import Replica, WirePlan
from narrowcast.parallel.local_sgd.times import MOST_MARKS, ExchangeTimes


def named(sizes: dict[str, int]) -> dict[str, Tensor]:
    return {name: torch.empty(size) for name, size in sizes.items()}


def test_layers_of_one_size_are_dealt_out_in_strides() -> None:
    sizes = {f"h.{i}.{part}": 10 for i in range(7) for part in ("a.weight", "b.weight")}
    found = fragments_of(named(sizes), [], 3)
    assert [one.layers for one in found] == [("h.0", "h.3", "h.6"), ("h.1", "h.4"), ("h.2", "h.5")]
    assert {layer_of(n) for n in ("norm.weight", "w", "a.b.12.c.weight")} == {"norm", "w", "a.b.12"}


def test_fragments_are_as_even_as_layers_allow() -> None:
    sizes = {"wte.weight": 50, **{f"h.{i}.w": 10 for i in range(8)}, "head.weight": 48}
    found = fragments_of(named(sizes), ["h.1.mean", "norm.mean"], 3)
    assert sorted(one.values for one in found) == [58, 60, 60]
    assert sorted(name for one in found for name in one.names) == sorted(sizes)
    holding = [[one.holds(buffer) for one in found] for buffer in ("h.1.mean", "norm.mean")]
    assert [sum(row) for row in holding] == [1, 1]
    with pytest.raises(ValueError, match="fragments=11, and the model has 10 layers that train"):
        fragments_of(named(sizes), [], 11)


@pytest.mark.parametrize("every, fragments", [(6, 3), (7, 3), (5, 5), (4, 1)])
def test_each_fragment_travels_once_in_every_steps(every: int, fragments: int) -> None:
    clock = Clock(LocalUpdates(every, fragments))
    due = []
    for clock.steps in range(1, 2 * every + 1):
        due.append(clock.due())
    assert due[:every] == due[every:]
    assert [number for step in due[:every] for number in step] == list(range(fragments))
    assert due[every - 1] == [fragments - 1]


def by_formula(group: dist.ProcessGroup) -> None:
    """Streaming DiLoCo written down again: two fragments, a delay, a merge; and the numbers of one who waits."""
    every, delay, kept, world = 4, 3, 0.25, dist.get_world_size(group)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = {"fragments": 2, "delay": delay, "merge": kept, "min_values": 1}
    local = nc.LocalSGD(model, optimizer, every=every, spec="fp32", group=group, **made)
    names = [name for name, _ in model.named_parameters()]
    parts = [[names.index(name) for name in fragment.names] for fragment in local._own.fragments]
    start = [p.detach().clone() for p in model.parameters()]
    workers, anchors = [start for _ in range(world)], [p.clone() for p in start]
    speed, flying = [torch.zeros_like(p) for p in start], dict[int, tuple[int, list[Tensor]]]()
    for step in range(1, 15):
        train(model, optimizer, dist.get_rank(group), step - 1, 1)
        workers = [alone(rank, values, step - 1, 1) for rank, values in enumerate(workers)]
        for number in [n for n in flying if flying[n][0] == step]:
            for i, mean in zip(parts[number], flying.pop(number)[1], strict=True):
                speed[i] = 0.9 * speed[i] + mean
                anchors[i] = anchors[i] - 0.7 * (mean + 0.9 * speed[i])
                for values in workers:
                    values[i] = kept * values[i] + (1 - kept) * anchors[i]
        for number in range(2):
            if step % every == (number + 1) * 2 % every:
                moved = [torch.stack([anchors[i] - values[i] for values in workers]).mean(0) for i in parts[number]]
                flying[number] = step + delay, moved
        for ours, theirs in zip(model.parameters(), workers[dist.get_rank(group)], strict=True):
            assert torch.allclose(ours.detach(), theirs, rtol=1e-5, atol=1e-7), step
    assert (local.exchanges, len(local._flights), len(flying)) == (5, 2, 2)
    local.check_ranks()
    local.exchange()
    same = bits(model)
    local.close()
    assert same == bits(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.5, 1.0])
def test_a_merge_has_the_bits_of_its_formula(kept: float, dtype: torch.dtype) -> None:
    """In place too, for whatever values."""
    model = nn.Linear(97, 101, bias=False, dtype=dtype)
    hard = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 0.0, 1e-45, 3e38])
    own = torch.cat([hard, torch.randn(97 * 101 - 7) * torch.logspace(-40, 37, 97 * 101 - 7)]).to(dtype)
    updates = LocalUpdates(10)
    replica = Replica(model, updates, WirePlan("fp32", 1, updates))
    with torch.no_grad():
        model.weight.copy_(own.view_as(model.weight))
        anchor = replica.anchors["weight"].copy_(own.roll(5).view_as(model.weight).float() * 1.7)
        expected = own.view_as(model.weight).clone()
        expected.copy_(anchor if kept == 0.0 else anchor + kept * (expected.float() - anchor))
        replica.merge(["weight"], {}, kept)
    assert torch.equal(model.weight.detach().view(torch.uint8), expected.view(torch.uint8))


def test_a_streamed_training_is_that_of_the_formula(pool: Pool) -> None:
    pool.run(3, by_formula)


class Kept(torch.optim.SGD):
    """Adds up what it is given."""

    def __init__(self, anchors: list[Tensor]) -> None:
        super().__init__(anchors, lr=1.0)
        self.sums = [torch.zeros_like(a, dtype=torch.float64) for a in anchors]

    def step(self, closure: Any = None) -> None:
        for total, anchor in zip(self.sums, self.param_groups[0]["params"], strict=True):
            total += 0.0 if anchor.grad is None else anchor.grad.double()
        super().step()


def nothing_lost(group: dist.ProcessGroup, spec: str) -> float:
    """What the workers moved on average, less what outer optimizers got, is the mean residual; the largest gap."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
    made: list[Kept] = []
    local = nc.LocalSGD(
        *(model, None),
        local=LocalUpdates(3, fragments=3, delay=1, outer=lambda a: made.append(Kept(a)) or made[0]),
        spec=spec,
        group=group,
        min_values=1,
    )
    wanted = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    real = local._own.moved

    def noted(names: Any) -> dict[str, Tensor]:
        found = real(names)
        for name, moved in found.items():
            wanted[name] += moved.double()
        return found

    local._own.moved = noted  # type: ignore[method-assign]
    for step in range(13):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank(group))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * torch.randn(p.shape, generator=generator))
        local.step()
    state = local.state_dict()
    gap = 0.0
    for (name, total), given in zip(wanted.items(), made[0].sums, strict=True):
        dist.all_reduce(total, group=group)
        flying = state["under way"][name].double() if state["due"][name] >= 0 else 0.0
        left = total / dist.get_world_size(group) - given - flying - state["owed"][name].double().view(total.shape)
        gap = max(gap, float(left.abs().max()))
    assert any(step >= 0 for step in state["due"].values())
    assert max(float(owed.abs().max()) for owed in state["owed"].values()) > 1e-4
    local.close()
    return gap


@pytest.mark.parametrize("spec", ["int4/64+ef", "int2/64+top16+ef", "e3m0/64+ef"])
def test_error_feedback_loses_nothing_in_fragments_under_way(pool: Pool, spec: str) -> None:
    assert max(pool.run(2, nothing_lost, spec)) < 1e-6


class Normed(Few):
    """With running statistics and several layers."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.register_buffer("mean", torch.zeros(5))

    @torch.no_grad()
    def walk(self, rank: int, step: int) -> None:
        super().walk(rank, step)
        self.mean += 0.1 * (rank + 1)


def through_stops(group: dist.ProcessGroup, way: str, mixing: str) -> tuple[bytes, bytes]:
    """Somebody looks at the state, or goes on from it elsewhere, with exchanges under way."""

    def made(model: nn.Module) -> nc.LocalSGD:
        how = {"every": 4, "fragments": 3, "delay": 2, "mixing": mixing, "group": group, "min_values": 1}
        return nc.LocalSGD(model, spec="int8/64", **how)

    model = Normed()
    local, rank = made(model), dist.get_rank(group)
    for step in range(13):
        if way != "straight" and step in (2, 7):
            state = local.state_dict()
            assert any(due >= 0 for due in state["due"].values())
            if way != "looked":
                local.close()
                own, model = model.state_dict(), Normed()
                local = made(model)
                local.load_state_dict(filled(local.state_dict(), state) if way == "filled" else state)
                model.load_state_dict(own)
        model.walk(rank, step)
        local.step()
    if mixing == "all":
        local.check_ranks()
    found = bits(model), b"".join(leaf.numpy().tobytes() for leaf in leaves(local.state_dict()))
    local.close()
    return found


def test_a_stop_with_exchanges_under_way_changes_no_bit(pool: Pool) -> None:
    straight = pool.run(2, through_stops, "straight", "all")
    for way in ("looked", "loaded", "filled"):
        assert pool.run(2, through_stops, way, "all") == straight, way


PLANS: list[dict[str, int]] = [
    {"every": 8, "delay": 7},
    {"every": 8, "delay": 7, "fragments": 2},
    {"every": 12, "delay": 11, "fragments": 4},
    {"every": 1},
    {"every": 3, "delay": 1},
    {"every": 4, "fragments": 4},
]


def on_another_plan(group: dist.ProcessGroup) -> list[str]:
    """Each step moves by 1; what anchors went in all after a stop, more of which was never there."""
    wrong = []
    for before, after in itertools.product(PLANS, PLANS):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        nn.utils.vector_to_parameters(torch.zeros(24), model.parameters())
        how = {"spec": "fp32", "outer": average, "merge": 0.0, "group": group, "min_values": 1}
        local = nc.LocalSGD(model, **before, **how)
        for step in range(1, before["every"] + 14):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1.0)
            local.step()
            if step == before["every"] + 1:
                state = local.state_dict()
                local.close()
                local = nc.LocalSGD(model, **after, **how)
                local.load_state_dict(state)
            went = [float(a.max()) for a in local._own.anchors.values()]
            wrong += [f"{before} {after} {step}"] * (max(went) > step or any(f.due < step for f in local._flights))
        local.close()
    return wrong


def test_what_is_under_way_counts_once_whatever_the_plan_that_goes_on(pool: Pool) -> None:
    assert pool.run(2, on_another_plan) == [[], []]


class Marks:
    """A device's clock, as far as it is asked."""

    cuda, waits = True, 0

    def mark(self) -> float:
        return 0.0

    def wait(self) -> None:
        self.waits += 1

    def seconds(self, begin: float, end: float) -> float:
        return 1e-3 + end - begin


def test_a_long_training_on_a_device_keeps_few_marks_and_rarely_waits_for_it() -> None:
    clock = Marks()
    times = ExchangeTimes(clock)  # type: ignore[arg-type]
    for _ in range(5 * MOST_MARKS):
        times.begin()
        times.end()
        assert len(times._marks) < MOST_MARKS
    assert clock.waits == 5
    assert times.as_dict()["exchange_ms"] == pytest.approx(5 * MOST_MARKS)


def failing(group: dist.ProcessGroup) -> str:
    """The wire of one worker fails at its second fragment: the others hear of it where they wait, steps later."""
    rank, model = dist.get_rank(group), mlp()

    def policy(info: nc.parallel.TensorInfo, step: int) -> str:
        if rank == 1 and step == 1:
            raise ValueError("no codec today")
        return "int8/64"

    how = {"every": 4, "fragments": 2, "delay": 3, "group": group, "min_values": 1}
    local = nc.LocalSGD(model, spec=policy, **how)
    found = ""
    while not found:
        found = error_of(local.step)
        assert local.steps < 20
    at = local.steps
    local.close()
    return f"{at} {found}"


def test_an_error_of_one_worker_comes_to_the_others_at_the_step_that_waits(pool: Pool) -> None:
    for rank, outcome in enumerate(pool.outcomes(3, failing)):
        assert "no codec today" in outcome.value
        # where the others had not come to the exchange before, which is due at 7, that one is broken off, too
        assert outcome.value.split()[0] in (("6",) if rank == 1 else ("7", "9")), outcome


def closed(group: dist.ProcessGroup) -> float:
    """With an exchange under way that the others are late for; and how long a step stood still that had to wait."""
    rank, model = dist.get_rank(group), mlp()
    local = nc.LocalSGD(model, every=2, delay=1, spec="int8/64", group=group, min_values=1)
    local.step()
    if rank:
        time.sleep(1.0)
    local.step()
    local.step()
    stats = local.stats()
    assert 0.0 < stats["wait_ms"] <= stats["exchange_ms"]
    assert 0.0 <= stats["computing_share"] <= 1.0
    local.step()
    before = bits(model)
    local.close()
    assert bits(model) == before
    return float(stats["wait_ms"]) if rank == 0 else 300.0


def test_waiting_is_counted_and_closing_drops_what_is_under_way(pool: Pool) -> None:
    assert min(pool.run(2, closed)) > 100.0


def disagreeing(group: dist.ProcessGroup) -> str:
    delay = dist.get_rank(group)
    return error_of(lambda: nc.LocalSGD(mlp(), every=4, delay=delay, spec="int8/64", group=group))


def test_workers_with_other_settings_find_out_when_they_are_made(pool: Pool) -> None:
    for found in pool.run(2, disagreeing):
        assert found.startswith("DisagreementError")
        assert "delay=1" in found


def test_what_has_no_meaning_is_refused() -> None:
    layer = nn.Linear(4, 4)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"every": 3, "fragments": 4}, "fragments=4 with every=3; one fragment is exchanged at a step"),
        ({"every": 3, "delay": 3}, "delay=3 with every=3; an exchange ends before the next"),
        ({"every": 3, "merge": 1.5}, "merge=1.5; give the part of its own"),
        ({"every": 3, "mixing": "star"}, "mixing='star'; take all, ring, exponential, pairs"),
        ({"every": 3, "mixing": {0: "ring", 5: "all"}}, "'all' comes first or not at all"),
        ({"every": 3, "mixing": {1: "ring"}}, "the first round must be 0"),
        *(
            ({"every": 3, "mixing": mixing}, "a mapping from rounds")
            for mixing in (None, ["ring"], {0: "all", "3": "ring"})
        ),
        ({"every": 3, "mixing": {0: "all", 1.5: "ring"}}, "a mapping from rounds"),
        ({"every": 3, "merge": "half"}, "merge=half; give the part of its own"),
        ({}, "every is missing"),
        ({"local": LocalUpdates(3), "delay": 1}, "local= and delay= say the same thing"),
        ({"every": 3, "delay": 1, "spec": "auto"}, 'spec="auto" weighs the time of whole exchanges'),
        ({"every": 3, "mixing": "ring", "spec": "auto"}, 'spec="auto" weighs the time of whole exchanges'),
    ]
    for given, text in cases:
        with pytest.raises(ValueError, match=re.escape(text)):
            nc.LocalSGD(layer, **{"spec": "int8/64", **given})
    assert LocalUpdates(3).own_part == 0.0
    assert LocalUpdates(3, delay=1).own_part == 0.5
    assert LocalUpdates(3, outer=average).blocks
    rounds = {4: "ring", 0: "all"}, {0: "all", 4: "ring"}
    assert len({LocalUpdates(3, mixing=mixing).spelled for mixing in rounds}) == 1


def inside_fsdp(group: dist.ProcessGroup, folder: str, mixing: str) -> tuple[bool, bool, float]:
    """Two sites that shard the model: streamed between them, stopped under way, and gone on from a checkpoint."""
    rank, mesh = dist.get_rank(group), replicated_mesh(2, 4)
    how = {"every": 4, "fragments": 2, "delay": 1, "mixing": mixing, "spec": "int4/64+ef", "min_values": 1}
    model = sharded(mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    across = mesh["replicate"].get_group()
    local = nc.LocalSGD(model, optimizer, group=across, **how)
    train(model, optimizer, rank, 0, 6)
    assert len(local._flights) == 1
    dcp.save({"model": model.state_dict(), "local": local}, checkpoint_id=folder)

    again = sharded(mesh["shard"], mlp(seed=0))
    resumed = nc.LocalSGD(again, group=across, **how)
    state = {"model": again.state_dict(), "local": resumed}
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    (ours,), (theirs,) = local._flights, resumed._flights
    same = all(torch.equal(mean, theirs.gradients[name]) for name, mean in ours.gradients.items())
    train(model, optimizer, rank, 6, 3)
    local.exchange()
    mine = torch.cat([p.flatten() for p in full(model, "parameters")])
    first = mine.clone()
    dist.broadcast(first, 0, group=group)
    sent = local.stats()["ratio"]
    for closing in (local, resumed):
        closing.close()
    return same or mixing != "all", torch.equal(mine, first), sent


@pytest.mark.parametrize("mixing", ["all", "ring"])
def test_sites_that_shard_their_model_stream_between_them(pool: Pool, tmp_path: Path, mixing: str) -> None:
    for same, together, ratio in pool.run(8, inside_fsdp, str(tmp_path), mixing):
        assert same
        assert together
        assert ratio > 2
