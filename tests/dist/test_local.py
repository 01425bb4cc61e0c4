"""`LocalSGD`: workers on their own for many steps, exchanges in few bits, and a restart that loses nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist.models import bits, error_of, mlp, wrapped
from dist.models import loss as loss_of
from dist.pool import Pool
from dist.shards import full, replicated_mesh, sharded
from torch import Tensor, nn
from torchrun import torchrun

import narrowcast as nc
from narrowcast.parallel.local_sgd.settings import nesterov

EXAMPLE = Path(__file__).parents[2] / "examples" / "local_sgd.py"


def average(anchors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(anchors, lr=1.0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def alone(rank: int, start: list[Tensor], first: int, steps: int) -> list[Tensor]:
    """Where a worker gets to by itself."""
    model = mlp()
    with torch.no_grad():
        for p, value in zip(model.parameters(), start, strict=True):
            p.copy_(value)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, first, steps)
    return [p.detach().clone() for p in model.parameters()]


def against_formula(group: dist.ProcessGroup) -> None:
    """Nesterov on the mean of what the workers moved, written down again, for three rounds; bit for bit."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = nc.LocalSGD(model, optimizer, every=5, spec="as-is", group=group)
    start = [p.detach().clone() for p in model.parameters()]
    speed = [torch.zeros_like(p) for p in start]
    for round_ in range(3):
        train(model, optimizer, rank, 5 * round_, 4)
        assert local.exchanges == round_
        assert len({bits(model)}) == 1
        train(model, optimizer, rank, 5 * round_ + 4, 1)
        ends = [alone(r, start, 5 * round_, 5) for r in range(world)]
        for i in range(len(start)):
            moved = [start[i] - end[i] for end in ends]
            total = moved[0]
            for other in moved[1:]:
                total = total + other
            mean = total / world
            speed[i] = speed[i] * 0.9 + mean
            start[i] = start[i] - 0.7 * (mean + 0.9 * speed[i])
        for ours, theirs in zip(model.parameters(), start, strict=True):
            assert torch.allclose(ours.detach(), theirs, rtol=1e-6, atol=1e-8), round_
        start = [p.detach().clone() for p in model.parameters()]
    local.check_ranks()
    local.close()


def test_exchanges_are_nesterov_on_the_mean_of_what_the_workers_moved(pool: Pool) -> None:
    pool.run(3, against_formula)


def averaged(group: dist.ProcessGroup) -> bytes:
    """At a rate of 1 and without momentum: the mean of the parameters, nearly; and the same bits everywhere."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model = mlp()
    start = [p.detach().clone() for p in model.parameters()]
    local = nc.LocalSGD(model, every=4, spec="fp32", outer=average, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        train(model, optimizer, rank, step, 1)
        assert local.step() == (step == 3)
    for i, p in enumerate(model.parameters()):
        mean = torch.stack([alone(r, start, 0, 4)[i] for r in range(world)]).mean(0)
        assert torch.allclose(p.detach(), mean, atol=1e-6)
    local.close()
    return bits(model)


def test_plain_averaging_is_a_rate_of_one(pool: Pool) -> None:
    assert len(set(pool.run(2, averaged))) == 1


def nothing_lost(group: dist.ProcessGroup) -> bytes:
    """What the mean should move, less what it moved, is the residual."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model = mlp()
    local = nc.LocalSGD(model, every=3, spec="int4/64+ef", outer=average, group=group, min_values=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    first = [p.detach().double() for p in model.parameters()]
    for round_ in range(4):
        start = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, rank, 3 * round_, 3)
        moved = torch.cat([(s - p.detach()).double().flatten() for s, p in zip(start, model.parameters(), strict=True)])
        dist.all_reduce(moved, group=group)
        for i, part in enumerate((moved / world).split([p.numel() for p in expected])):
            expected[i] += part.view_as(expected[i])
        local.exchange()
    residuals = local.state_dict()["owed"]
    assert {row.wire for row in local.rows()} == {"int4/64+ef"}
    for p, was, total, left in zip(model.parameters(), first, expected, residuals.values(), strict=True):
        assert left.abs().max() > 0
        assert (total - (was - p.detach()) - left).abs().max() < 2e-6 * max(1.0, float(was.abs().max()))
    local.close()
    return bits(model)


def test_error_feedback_loses_nothing_between_exchanges(pool: Pool) -> None:
    assert len(set(pool.run(3, nothing_lost))) == 1


def inside_ddp(group: dist.ProcessGroup) -> tuple[bytes, dict[str, float]]:
    """Two workers of two ranks each: gradients by attach inside, local updates between."""
    rank = dist.get_rank()
    insides = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    acrosses = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    if rank > 3:
        return b"", {}
    inside, across = insides[rank // 2], acrosses[rank % 2]
    model = wrapped(inside)
    handle = nc.attach(model, "int8/256", min_values=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = nc.LocalSGD(model, optimizer, every=4, spec={"*.bias": "as-is", "*": "int4/64"}, group=across, min_values=1)
    train(model, optimizer, rank, 0, 6)
    one = bits(model.module)
    handle.check_ranks()
    train(model, optimizer, rank, 6, 2)
    stats = local.stats()
    local.close()
    handle.detach()
    return bits(model.module), {**stats, "differs": float(one != bits(model.module))}


def test_local_updates_between_workers_of_several_ranks_with_attach_inside(pool: Pool) -> None:
    found = pool.run(8, inside_ddp)[:4]
    assert len({whole for whole, _ in found}) == 1
    assert all(stats["steps"] == 2 and stats["ratio"] > 3 for _, stats in found)


def inside_fsdp(group: dist.ProcessGroup, folder: str) -> None:
    """Two workers of four ranks, each sharding its model; the state through torch.distributed.checkpoint."""
    rank, mesh = dist.get_rank(group), replicated_mesh(2, 4)
    model = sharded(mesh["shard"])
    handle = nc.attach(model, "int8/64", parameters="e4m3fn/128", min_values=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    across = mesh["replicate"].get_group()
    local = nc.LocalSGD(model, optimizer, every=3, spec="int4/64+ef", group=across, min_values=1)
    train(model, optimizer, rank, 0, 3)
    mine = [p.flatten() for p in full(model, "parameters")]
    theirs = torch.cat(mine).clone()
    dist.broadcast(theirs, 0, group=group)
    assert torch.equal(torch.cat(mine), theirs)
    dcp.save({"model": model.state_dict(), "local": local}, checkpoint_id=folder)

    again = sharded(mesh["shard"], mlp(seed=4))
    other = torch.optim.SGD(again.parameters(), lr=0.1)
    resumed = nc.LocalSGD(again, other, every=3, spec="int4/64+ef", group=across, min_values=1)
    state = {"model": again.state_dict(), "local": resumed}
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    assert (resumed.steps, resumed.exchanges) == (3, 1)
    for kind in ("anchors", "owed"):
        ours, theirs = local.state_dict()[kind], resumed.state_dict()[kind]
        assert all(torch.allclose(ours[n].full_tensor(), theirs[n].full_tensor(), atol=1e-9) for n in ours)
    speed, kept = local.state_dict()["outer"], resumed.state_dict()["outer"]
    for name, state_ in speed.items():
        assert torch.equal(state_["momentum_buffer"].full_tensor(), kept[name]["momentum_buffer"].full_tensor())
    for closing in (local, resumed):
        closing.close()
    handle.detach()


def test_workers_that_shard_their_model(pool: Pool, tmp_path: Path) -> None:
    pool.run(8, inside_fsdp, str(tmp_path))


def refused(group: dist.ProcessGroup) -> list[str]:
    rank = dist.get_rank(group)
    model = mlp()
    strange = torch.optim.SGD(mlp().parameters(), lr=0.1)
    wide = nn.Linear(3, 3).double()
    local = nc.LocalSGD(model, every=2, spec="int8/256", group=group)
    counted, free = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    other = nc.LocalSGD(model, counted, every=2, spec="int8/256", group=group)
    attempts = [
        lambda: nc.LocalSGD(model, every=0, spec="int8/256", group=group),
        lambda: nc.LocalSGD(model, every=2, spec="int8/255", group=group),
        lambda: nc.LocalSGD(model, strange, every=2, spec="int8/256", group=group),
        lambda: nc.LocalSGD(wide, every=2, spec="int8/256", group=group),
        lambda: nc.LocalSGD(nn.Tanh(), every=2, spec="int8/256", group=group),
        lambda: nc.LocalSGD(mlp(seed=rank), every=2, spec="int8/256", group=group),
        lambda: local.load_state_dict({**local.state_dict(), "anchors": {}}),
        lambda: nc.LocalSGD(model, counted, every=2, spec="int8/256", group=group),
        lambda: nc.LocalSGD(model, free, every=2, spec="int8/256", group=group, outer=no_outer),
    ]
    found = [error_of(attempt) for attempt in attempts]
    local.close()
    other.close()
    # what was refused counts nothing, and what was closed is free again
    assert not free._optimizer_step_post_hooks
    nc.LocalSGD(model, counted, every=2, spec="int8/256", group=group).close()
    return found


def no_outer(anchors: list[Tensor]) -> torch.optim.Optimizer:
    raise ValueError("no outer optimizer today")


def test_what_cannot_work_is_refused(pool: Pool) -> None:
    expected = [
        "ValueError: LocalSGD: every=0; give the number of steps",
        "ValueError: codec spec 'int8/255'",
        "ValueError: LocalSGD: the optimizer holds none of the model's parameters",
        "TypeError: LocalSGD: weight is torch.float64",
        "ValueError: LocalSGD: the model has no parameter that is trained",
        "RuntimeError: LocalSGD: the parameters of workers [1] differ from those of worker 0",
        "ValueError: load_state_dict: the state and the model do not share '0.bias'",
        "RuntimeError: LocalSGD: another one counts the steps of this optimizer already",
        "ValueError: no outer optimizer today",
    ]
    for messages in pool.run(2, refused):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start)


def failing(group: dist.ProcessGroup) -> str:
    """The policy of one worker fails at the second exchange."""
    rank, model = dist.get_rank(group), mlp()

    def policy(info: object, step: int) -> str:
        if rank == 1 and step == 1:
            raise ValueError("no codec today")
        return "int8/64"

    local = nc.LocalSGD(model, every=1, spec=policy, group=group, min_values=1)
    local.exchange()
    found = error_of(local.exchange)
    local.close()
    return found


def test_a_policy_that_fails_on_one_worker_is_an_error_on_all_of_them_at_once(pool: Pool) -> None:
    for outcome in pool.outcomes(3, failing):
        assert "no codec today" in outcome.value, outcome
        assert outcome.seconds < 15


def resumed(group: dist.ProcessGroup) -> tuple[bytes, bytes]:
    """In the middle of a round, each worker from its own model: the bits of a run that was not interrupted."""
    rank, found = dist.get_rank(group), []
    for interrupted in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = nc.LocalSGD(model, optimizer, every=4, spec="int8/64", group=group, min_values=1)
        train(model, optimizer, rank, 0, 6)
        if interrupted:
            state, own = local.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
            local.close()
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            local = nc.LocalSGD(model, optimizer, every=4, spec="int8/64", group=group, min_values=1)
            model.load_state_dict(own)
            local.load_state_dict(state)
        train(model, optimizer, rank, 6, 6)
        assert (local.steps, local.exchanges) == (12, 3)
        found.append(bits(model))
        local.close()
    return found[0], found[1]


def test_a_state_from_the_middle_of_a_round_goes_on_with_the_same_bits(pool: Pool) -> None:
    for whole, parts in pool.run(2, resumed):
        assert whole == parts


def run_example(folder: Path, *more: str) -> dict[str, object]:
    """Under torchrun, two workers, one restart allowed."""
    words = ["--max-restarts=1", "--monitor-interval=0.1", str(EXAMPLE), "--steps=12", "--every=4", "--batch=2"]
    done = torchrun(*words, "--spec=int4/128", f"--checkpoint={folder / 'local.pt'}", *more)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("beside_a_whole_run", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_worker_is_started_again_by_torchrun_and_goes_on_from_the_last_exchange(
    tmp_path: Path, beside_a_whole_run: bool
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    killed = run_example(tmp_path / "killed", "--die-at=10")
    assert (killed["resumed_at"], killed["exchanges"]) == (8, 3)
    assert 0 < float(killed["loss"]) < math.log(256)
    if beside_a_whole_run:
        whole = run_example(tmp_path / "whole")
        assert (whole["resumed_at"], whole["exchanges"]) == (0, 3)
        # rank 0's moments are both workers' after a restart: the second worker's were lost with it
        assert abs(float(whole["loss"]) - float(killed["loss"])) < 0.5


def hundreds(group: dist.ProcessGroup) -> tuple[float, float, int, int]:
    """600 steps, three exchanges: each worker sees its own half of the data, together they fit all of it."""
    rank = dist.get_rank(group)
    torch.manual_seed(1)
    truth, x = nn.Linear(16, 4), torch.randn(512, 16)
    y = truth(x).detach()
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    with torch.no_grad():
        before = float((model(x) - y).square().mean())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    local = nc.LocalSGD(model, optimizer, every=200, spec="int4/64+ef", group=group, min_values=1)
    own = slice(256 * rank, 256 * rank + 256)
    for _ in range(600):
        optimizer.zero_grad()
        (model(x[own]) - y[own]).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        after = float((model(x) - y).square().mean())
    sent, exchanges = int(local.stats()["sent_bytes"]), local.exchanges
    local.close()
    return before, after, sent, exchanges


def test_hundreds_of_steps_between_exchanges(pool: Pool) -> None:
    found = pool.run(2, hundreds)
    assert len({after for _, after, _, _ in found}) == 1
    for before, after, sent, exchanges in found:
        assert exchanges == 3
        assert after < 0.2 * before
        assert sent < 3 * (16 * 32 + 32 + 32 * 4 + 4)


def test_the_default_is_that_of_diloco() -> None:
    (group,) = nesterov([torch.zeros(1)]).param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.7, 0.9, True)
