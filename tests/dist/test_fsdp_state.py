"""FSDP2: residuals, checkpoints, loss scalers, HSDP's replicas, and faults."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist.emulation import summed
from dist.models import batch, error_of, local_gradients, mlp, same
from dist.pool import Crew, Pool
from dist.shards import full, loss, mesh_of, replicated_mesh, rows_of, sharded, tensors_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.collectives.segments import Coder
from narrowcast.kernels import ops
from narrowcast.parallel.fsdp import comm

# ---- error feedback --------------------------------------------------------------------------------------------------


def by_hand(group: dist.ProcessGroup) -> None:
    """Each rank's rows through nc.ErrorFeedback: the same bits, over several steps."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model = sharded(mesh_of(group), nn.Linear(24, 40), nested=False)
    twin = nn.Linear(24, 40)
    with torch.no_grad():
        for p, value in zip(twin.parameters(), full(model, "parameters"), strict=True):
            p.copy_(value)
    handle = nc.attach(model, "int4/64+ef", min_values=1)
    memories = [[nc.ErrorFeedback(nc.codec("int4/64")) for _ in range(world)] for _ in range(world)]
    for step in range(3):
        model.zero_grad()
        loss(model, rank, step).backward()
        total = None
        for r, gradients in enumerate(local_gradients(twin, world, step, loss)):
            rows = rows_of(gradients, world)
            sent = torch.stack(
                [nc.codec("int4/64").decode(memories[r][i].encode(row), row.numel()) for i, row in enumerate(rows)]
            )
            total = sent if total is None else total + sent
        assert same(full(model), tensors_of(total / world, list(twin.parameters()))), step
    # the mean residual, from the state and from the residuals of both
    residuals = [v.full_tensor() for v in handle.state_dict().values()]
    rows = sum(torch.stack([memory.residual for memory in ranks]) for ranks in memories) / world
    for ours, theirs in zip(residuals, tensors_of(rows, list(twin.parameters())), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9)
    handle.detach()


def test_error_feedback_is_that_of_each_rank_and_row(pool: Pool) -> None:
    pool.run(3, by_hand)


def nothing_lost(model: nn.Module, rank: int, world: int, **options: object) -> None:
    """Over some steps: the mean that was expected, less what arrived, is the residual in the state."""
    handle = nc.attach(model, min_values=1, **options)
    twin = mlp()
    expected = [torch.zeros_like(p, dtype=torch.float64) for p in twin.parameters()]
    arrived = [torch.zeros_like(p, dtype=torch.float64) for p in twin.parameters()]
    for step in range(5):
        model.zero_grad()
        loss(model, rank, step).backward()
        for i, gradient in enumerate(full(model)):
            arrived[i] += gradient
            expected[i] += sum(g[i].double() for g in local_gradients(twin, world, step, loss)) / world
    residuals = [value.full_tensor() for value in handle.state_dict().values()]
    for total, there, left in zip(expected, arrived, residuals, strict=True):
        assert left.abs().max() > 0
        # an ulp a step of sums of this size
        assert (total - there - left).abs().max() <= 5 * 2.0**-22 * total.abs().max()
    handle.detach()


def sharded_law(group: dist.ProcessGroup, spec: str) -> None:
    mesh = mesh_of(group)
    nothing_lost(sharded(mesh), dist.get_rank(group), dist.get_world_size(group), gradients=spec)


@pytest.mark.parametrize("spec", ["int4/128+ef", "onebit/64+ef", "e5m2+aps+ef"])
def test_error_feedback_loses_nothing(pool: Pool, spec: str) -> None:
    pool.run(3, sharded_law, spec)


def scaled(group: dist.ProcessGroup) -> list[bytes]:
    """With a loss scale that changes, and a step that is skipped: the bits of a run without either."""
    rank, found = dist.get_rank(group), []
    for with_scaler in (False, True):
        model = sharded(mesh_of(group))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=with_scaler)
        handle = nc.attach(model, "int4/128+ef", min_values=1, scaler=scaler if with_scaler else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            skipped = step == 2
            if skipped and not with_scaler:
                continue
            optimizer.zero_grad()
            factor = float("inf") if skipped and rank == 1 else 1.0
            scaler.scale(loss(model, rank, step) * factor).backward()
            if with_scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        found.append(b"".join(p.numpy().tobytes() for p in full(model, "parameters")))
        handle.detach()
    return found


def test_residuals_do_not_depend_on_the_loss_scale_and_skipped_steps_are_undone(pool: Pool) -> None:
    for plain, with_scaler in pool.run(2, scaled):
        assert plain == with_scaler


def saved(group: dist.ProcessGroup, folder: str) -> dict[str, Tensor]:
    rank = dist.get_rank(group)
    model = sharded(mesh_of(group))
    handle = nc.attach(model, "int4/128+ef", min_values=1)
    for step in range(3):
        model.zero_grad()
        loss(model, rank, step).backward()
    dcp.save({"model": model.state_dict(), "narrowcast": handle}, checkpoint_id=folder, process_group=group)
    found = {name: value.full_tensor() for name, value in handle.state_dict().items()}
    handle.detach()
    return found


def loaded(group: dist.ProcessGroup, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Into another model, with other values and owing nothing yet; then a step without a gradient pays."""
    model = sharded(mesh_of(group), mlp(seed=9))
    handle = nc.attach(model, "int4/128+ef", min_values=1)
    state = {"model": model.state_dict(), "narrowcast": handle}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    model.load_state_dict(state["model"])
    assert same(full(model, "parameters"), [p.detach() for p in mlp().parameters()])
    residuals = {name: value.full_tensor() for name, value in handle.state_dict().items()}
    (model(batch(0, 0)) * 0).sum().backward()
    paid = dict(zip(residuals, full(model), strict=True))
    handle.detach()
    return residuals, paid


@pytest.mark.parametrize("world", [2, 3])
def test_a_checkpoint_keeps_residuals_for_any_number_of_ranks(pool: Pool, tmp_path: Path, world: int) -> None:
    before = pool.run(2, saved, str(tmp_path))[0]
    for after, paid in pool.run(world, loaded, str(tmp_path)):
        assert list(after) == list(before)
        for name, value in before.items():
            assert torch.allclose(after[name], value, rtol=1e-6, atol=1e-10), name
            assert torch.dot(paid[name].flatten(), value.flatten()) > 0, name


# ---- HSDP ------------------------------------------------------------------------------------------------------------


def replicated(group: dist.ProcessGroup, replicas: int) -> None:
    """As it is: the mean over the shards' ranks, in order, then over the replicas, in order."""
    rank, twin = dist.get_rank(group), mlp()
    mesh, shards = replicated_mesh(replicas, 8 // replicas), 8 // replicas
    model = sharded(mesh)
    handle = nc.attach(model, "as-is", parameters="as-is")
    for step in range(2):
        model.zero_grad()
        loss(model, rank, step).backward()
        local = local_gradients(twin, 8, step, loss)
        expected = []
        for i in range(6):
            inside = [summed([local[r + s][i] for s in range(shards)]) / shards for r in range(0, 8, shards)]
            expected.append(summed(inside) / replicas)
        assert same(full(model), expected)
    handle.check_ranks()
    handle.detach()


@pytest.mark.parametrize("replicas", [4, 8])
def test_replicas_give_the_mean_in_order(pool: Pool, replicas: int) -> None:
    pool.run(8, replicated, replicas)


def few_bits_between(group: dist.ProcessGroup) -> tuple[str, dict[str, float]]:
    """Lossless inside, few bits between, with what FSDP can be told; beside plain HSDP."""
    rank, mesh = dist.get_rank(group), replicated_mesh(2, 4)
    summing = sharded(mesh)
    for module in [m for m in summing.modules() if isinstance(m, FSDPModule)]:
        module.set_force_sum_reduction_for_comms(True)
    for model in (sharded(mesh), summing):
        nothing_lost(model, rank, 8, gradients="int8/64+ef", between="int4/64+ef")
    plain, ours = sharded(mesh), sharded(mesh)
    handle = nc.attach(ours, gradients="as-is", between={"*.weight": "int4/64", "*": "as-is"}, min_values=1)
    for how in ("plain", "factor", "sums", "later"):
        for model in (plain, ours):
            for module in [m for m in model.modules() if isinstance(m, FSDPModule)]:
                module.set_gradient_divide_factor(2.0 if how == "factor" else None)
                module.set_force_sum_reduction_for_comms(how == "sums" or (how == "factor" and model is plain))
            model.zero_grad()
            for step in range(2):
                model.set_requires_all_reduce(how != "later" or step == 1)
                loss(model, rank, step).backward()
        a, b = (torch.cat([g.flatten() for g in full(m)]) for m in (ours, plain))
        assert 0 < float((a - b).norm() / b.norm()) < 0.15, how
    text, stats = handle.explain(), handle.stats()
    handle.check_ranks()
    handle.detach()
    for model in (plain, ours):
        model.zero_grad()
        loss(model, rank, 0).backward()
    assert same(full(plain), full(ours)), "detached is not plain HSDP"
    return text, stats


def test_another_spec_between_replicas_than_inside(pool: Pool) -> None:
    for text, stats in pool.run(8, few_bits_between):
        assert "between" in text
        assert stats["gradient_plain_bytes"] == stats["gradient_sent_bytes"]
        assert 1.5 < stats["between_plain_bytes"] / stats["between_sent_bytes"] < 32 / 4.5


def noises(group: dist.ProcessGroup) -> tuple[dict[str, list[tuple[int, ...]]], bytes]:
    """Seed, stream and place of every encoding of two steps, by role; and the gradients."""
    model = sharded(replicated_mesh(2, 4))
    handle = nc.attach(model, gradients="int4/64+sr", between="int4/64+sr", parameters="int8/64+sr", min_values=1)
    used: dict[str, list[tuple[int, ...]]] = {"int4/64+sr": [], "int8/64+sr": []}

    specs = {id(nc.codec(spec).plan_for(torch.float32)): spec for spec in used}

    def noting(name: str, place: int) -> Any:
        original = getattr(ops, name)

        def noted(plan: Any, *args: Any) -> Any:
            used[specs[id(plan)]].append(args[place])
            return original(plan, *args)

        return mock.patch.object(ops, name, noted)

    with noting("encode", 2), noting("reduce", 3):
        for step in range(2):
            model.zero_grad()
            loss(model, 0, step).backward()  # the same on every rank
    found = b"".join(g.numpy().tobytes() for g in full(model))
    handle.check_ranks()
    handle.detach()
    return used, found


def test_no_two_encodings_of_gradients_share_their_noise(pool: Pool) -> None:
    """Not of two ranks, replicas, units, or of the two ways a gradient goes; parameters do, between replicas."""
    ranks = pool.run(8, noises)
    gradients = [one for used, _ in ranks for one in used["int4/64+sr"]]
    assert len(set(gradients)) == len(gradients) > 8 * 2 * 3 * 4
    parameters = [set(used["int8/64+sr"]) for used, _ in ranks]
    assert len(set.union(*parameters)) == sum(map(len, parameters[:4]))
    assert parameters[:4] == parameters[4:]
    assert len({found for _, found in ranks}) == 1, "all ranks end with the same bits"


# ---- faults ----------------------------------------------------------------------------------------------------------


class Own(ReduceScatter):
    """Somebody else's collective."""

    def allocate(self, size: object, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: object, **kwargs: object) -> None: ...


def refused(group: dist.ProcessGroup) -> list[str]:
    mesh = mesh_of(group)
    twice, custom = sharded(mesh), sharded(mesh)
    handle = nc.attach(twice, "int8/256")
    custom[0].set_custom_reduce_scatter(Own())
    several = nn.Sequential(sharded(mesh, nn.Linear(4, 4), nested=False), nn.Linear(4, 4))
    attempts = [
        lambda: nc.attach(mlp(), "int8/256"),
        lambda: nc.attach(twice, "int8/256"),
        lambda: nc.attach(twice[0], "int8/256"),
        lambda: nc.attach(custom, "int8/256"),
        lambda: nc.attach(sharded(mesh), "int8/256", between="int4/128"),
        lambda: nc.attach(sharded(mesh), "int8/256", nodes=[[0], [1]]),
        lambda: nc.attach(sharded(mesh), "int8/256", algorithm="ring"),
        lambda: nc.attach(sharded(mesh), "int8/256", group=group),
        lambda: nc.attach(sharded(mesh), "int8/256", parameters="int8/256+ef", min_values=1),
        lambda: nc.attach(sharded(mesh), "int8/255"),
        lambda: nc.attach(sharded(mesh), "int8/256", parameters=8),
        lambda: nc.attach(sharded(mesh), "int8/256", strict=True),
        lambda: nc.attach(DDP(mlp(), process_group=group), "int8/256", parameters="int8/256"),
        lambda: handle.load_state_dict({"0.weight": torch.zeros(3)}),
        lambda: stale_optimizer(mesh),
        lambda: stale_optimizer(mesh, frozen=True),
    ]
    found = [error_of(attempt) for attempt in attempts]
    handle.detach()
    part = nc.attach(several, "int8/256", min_values=1)
    found.append(part.explain())
    part.detach()
    nc.attach(twice, "int8/256", parameters="e4m3fn/128", min_values=1, strict=True).detach()
    return found


def stale_optimizer(mesh: DeviceMesh, frozen: bool = False) -> None:
    module = mlp()
    module[0].requires_grad_(not frozen)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    model = sharded(mesh, module)
    handle = nc.attach(model, "int8/256")
    try:
        loss(model, 0, 0).backward()
        optimizer.step()
    finally:
        handle.detach()


def test_attach_says_why_it_refuses(pool: Pool) -> None:
    expected = [
        "TypeError: attach: got a plain Sequential in one of 8 processes; wrap the model in Distributed",
        "RuntimeError: attach: the model is attached already; call detach()",
        "RuntimeError: attach: the model is attached already; call detach()",
        "RuntimeError: attach: the model has custom collectives or an all-reduce hook already",
        "ValueError: attach: between= is the wire between replicas, and the model has none: its mesh is (2,)",
        "ValueError: attach: nodes=[[0], [1]] is for DDP; with FSDP2 shard over a 2-D mesh",
        "ValueError: attach: algorithm='ring' is for DDP",
        "is for DDP; with FSDP2 the groups are those of its mesh",
        "ValueError: attach: parameters of 0.weight have int8/256+ef; parameters travel anew",
        "ValueError: codec spec 'int8/255'",
        "TypeError: attach: 8 is no policy",
        "ValueError: attach with strict=True: 0.weight stays as it is: it has 960 values, under 10000",
        "ValueError: attach: parameters= and between= are for FSDP2",
        "ValueError: load_state_dict: the model keeps no residual of a parameter '0.weight'",
        "RuntimeError: attach: this optimizer holds the parameters that the model had before fully_shard",
        "RuntimeError: attach: this optimizer holds the parameters that the model had before fully_shard",
        "1.weight: not sharded by FSDP, which leaves its gradient alone",
    ]
    for messages in pool.run(2, refused):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start) or start in message


def several_meshes(group: dist.ProcessGroup) -> list[str]:
    """Modules over different meshes, and one that is replicated only."""
    both, flat = replicated_mesh(2, 4), replicated_mesh(4, 2)
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(mixed[0], mesh=both)
    fully_shard(mixed[1], mesh=flat)
    partly = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(partly[0], mesh=both)
    fully_shard(partly[1], mesh=both["shard"])
    return [error_of(lambda of=of: nc.attach(of, "int8/256")) for of in (mixed, partly)]


def test_meshes_that_do_not_fit_together_are_refused(pool: Pool) -> None:
    for different, some in pool.run(8, several_meshes):
        assert "ValueError: attach: the modules are sharded over different ranks" in different
        assert "ValueError: attach: some modules have replicas (a 2-D mesh) and some have not" in some


def disagreeing(group: dist.ProcessGroup) -> tuple[str, str]:
    """A rank with another spec, and one whose policy fails: all ranks hear of it in their own step."""
    rank = dist.get_rank(group)
    model = sharded(mesh_of(group))
    handle = nc.attach(model, lambda info, step: "int8/256" if step == 0 else ("int4/128" if rank == 1 else "int6/128"))
    loss(model, rank, 0).backward()
    first = error_of(lambda: loss(model, rank, 1).backward())
    handle.detach()
    model = usable_again(model, group)

    def failing(info: object, step: int) -> str:
        if rank == 1 and step == 1:
            raise ValueError("no codec today")
        return "int8/256"

    handle = nc.attach(model, failing)
    loss(model, rank, 0).backward()
    second = error_of(lambda: loss(model, rank, 1).backward())
    handle.detach()
    model = usable_again(model, group)
    model.zero_grad()
    loss(model, rank, 2).backward()
    return first, second


def usable_again(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """After a pass that failed: the same, or before torch 2.13 another one."""
    if not hasattr(model, "reset_iter_state"):
        return sharded(mesh_of(group))
    model.reset_iter_state()
    return model


def test_ranks_that_disagree_find_out_and_the_model_lives(pool: Pool) -> None:
    for outcome in pool.outcomes(2, disagreeing):
        assert not outcome.error, outcome.traceback
        assert outcome.seconds < 15
        first, second = outcome.value
        assert "ranks disagree about this call, so nothing was sent" in first
        assert "no codec today" in second


def failing_between(group: dist.ProcessGroup, how: str) -> str:
    """Between replicas one rank's policy fails, or differs, or its all-reduce does not begin; in the second step."""
    rank = dist.get_rank(group)
    model = sharded(replicated_mesh(2, 4))

    def failing(info: object, step: int) -> str:
        if how == "differs" and step == 1:
            return "int4/64" if rank == 5 else "int6/64"
        if how == "fails" and step == 1 and rank == 5:
            raise ValueError("no codec today")
        return "int8/64"

    def broken(*_: object, **__: object) -> None:
        raise ValueError("no way today")

    # with parameters of our own, so that nobody waits in an all-gather of FSDP's
    handle = nc.attach(model, "as-is", between=failing, parameters="as-is" if how == "breaks" else None, min_values=1)
    loss(model, rank, 0).backward()
    original = comm.all_reduce
    try:
        comm.all_reduce = broken if how == "breaks" and rank == 5 else original
        found = error_of(lambda: loss(model, rank, 1).backward())
        # nobody hears of it by a connection that is closed here
        dist.barrier(group)
        return found
    finally:
        comm.all_reduce = original
        handle.detach()


def failing_attach(group: dist.ProcessGroup) -> list[str]:
    """One rank's policy fails at once: for gradients, and for parameters, which are asked about first."""
    rank, model = dist.get_rank(group), sharded(mesh_of(group))

    def failing(info: object, step: int) -> str:
        if rank == 1:
            raise ValueError("no codec at all")
        return "int8/64"

    found = [
        error_of(lambda: nc.attach(model, failing, min_values=1)),
        error_of(lambda: nc.attach(model, "int8/64", parameters=failing, min_values=1)),
    ]
    handle = nc.attach(model, "int8/64", min_values=1)
    loss(model, rank, 0).backward()
    handle.detach()
    return found


def test_a_policy_that_fails_on_one_rank_is_an_error_on_all_of_them_at_once(pool: Pool) -> None:
    # whoever had a gather under way may hear of the broken connection alone
    said_of = {"fails": "no codec today", "differs": "ranks disagree about this call", "breaks": "Error: "}
    for how, said in said_of.items():
        for outcome in pool.outcomes(8, failing_between, how):
            assert said in outcome.value, outcome
            assert outcome.seconds < 15
    for outcome in pool.outcomes(3, failing_attach):
        assert all("no codec at all" in message for message in outcome.value), outcome
        assert outcome.seconds < 15


def dying(group: dist.ProcessGroup) -> str:
    """Rank 1 dies in the middle of its second backward pass."""
    rank = dist.get_rank(group)
    model = sharded(DeviceMesh.from_group(group, "cpu"))
    nc.attach(model, "int8/64", parameters="int8/64", min_values=1)
    loss(model, rank, 0).backward()
    if rank == 1:
        encode, count = Coder.encode, [0]

        def counting(self: Coder, *args: object, **kwargs: object) -> None:
            count[0] += 1
            if count[0] == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            encode(self, *args, **kwargs)

        Coder.encode = counting
    return error_of(lambda: loss(model, rank, 1).backward())


def test_a_rank_that_dies_is_an_error_on_the_others_at_once() -> None:
    with Crew(3, dying, timeout=90) as crew:
        for rank in (0, 2):
            outcome = crew.outcome(rank)
            assert outcome is not None
            assert outcome.value.startswith(("TransportError", "BrokenChannelError")), outcome
            assert outcome.seconds < 30


def not_finite(group: dist.ProcessGroup) -> tuple[bool, bool]:
    """A NaN on one rank arrives, and the residuals are not poisoned."""
    rank = dist.get_rank(group)
    model = sharded(mesh_of(group))
    handle = nc.attach(model, "int4/128+ef", min_values=1)
    loss(model, rank, 0).backward()
    model.zero_grad()
    (loss(model, rank, 1) * (float("nan") if rank == 1 else 1.0)).backward()
    arrived = any(bool(g.isnan().any()) for g in full(model))
    finite = all(bool(v.full_tensor().isfinite().all()) for v in handle.state_dict().values())
    handle.detach()
    return arrived, finite


def test_a_nan_arrives_and_leaves_no_residual(pool: Pool) -> None:
    assert pool.run(2, not_finite) == [(True, True)] * 2
