"""What arrived in `.grad` and the residuals are what was expected: where DDP leaves parameters out, in any layout."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from dist.models import error_of
from dist.pool import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.parallel.integrations import HookState

SPEC, VALUES, STEPS = "int2/64+ef", 600, 6
WIRE = {"min_values": 1, "algorithm": "two_shot"}
Grads = list[Tensor | None]


class Terms(nn.Module):
    """Three parameters; the gradient of each is what it is multiplied by, or none where that is None."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            setattr(self, name, nn.Parameter(torch.zeros(VALUES)))

    def forward(self, grads: Grads) -> Tensor:
        parts = [(p * g).sum() for p, g in zip((self.a, self.b, self.c), grads, strict=True) if g is not None]
        return torch.stack(parts).sum()


def drawn(seed: int, rank: int) -> Grads:
    """`a` is used always; `b` and `c` on some ranks, on all, or on none."""
    choose, values = (torch.Generator().manual_seed(seed * 10 + r) for r in (9, rank))
    uses = torch.rand(2, 2, generator=choose) < 0.5
    uses &= torch.rand(2, 1, generator=choose) < 0.6
    grads = torch.randn(3, VALUES, generator=values)
    return [g if i == 0 or uses[i - 1, rank % 2] else None for i, g in enumerate(grads)]


def mean_of(group: dist.ProcessGroup, grads: Grads) -> Tensor:
    local = torch.stack([torch.zeros(VALUES) if g is None else g for g in grads]).double()
    dist.all_reduce(local, group=group)
    return local / dist.get_world_size(group)


def residual_of(handle: nc.Handle) -> Tensor:
    state = handle.state_dict()
    return torch.stack([state[name].double() if name in state else torch.zeros(VALUES).double() for name in "abc"])


def arrived(model: DDP) -> Tensor:
    grads = [getattr(model.module, name).grad for name in "abc"]
    return torch.stack([torch.zeros(VALUES).double() if g is None else g.double() for g in grads])


def misfit(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).abs().max() / expected.abs().max())


CASES = list(itertools.product([False, True], ["to None", "to zero", "never"], [1, 2], [True, False], [False, True]))
"""Gradients are views of buckets; when they are zeroed; passes a step; whether the last alone communicates; scaled."""


def leaves_out(group: dist.ProcessGroup, case: tuple[bool, str, int, bool, bool]) -> float:
    """Passes that leave out parameters, on some ranks or on all. How much is missing in the end."""
    are_views, zeroed, passes, only_last, is_scaled = case
    model = DDP(Terms(), process_group=group, find_unused_parameters=True, gradient_as_bucket_view=are_views)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if is_scaled else None
    handle = nc.attach(model, SPEC, scaler=scaler, **WIRE)
    expected, got, scale = torch.zeros(3, VALUES).double(), torch.zeros(3, VALUES).double(), 64.0 if is_scaled else 1.0
    for step in range(STEPS):
        if zeroed != "never":
            model.zero_grad(set_to_none=zeroed == "to None")
        for number in range(passes):
            grads = drawn(step * 2 + number, dist.get_rank(group))
            expected += mean_of(group, grads)
            model.require_backward_grad_sync = not only_last or number == passes - 1
            (model(grads) * scale).backward()
        got = got + arrived(model) / scale if zeroed != "never" else arrived(model) / scale
        error = misfit(expected, got + residual_of(handle))
        assert error < 1e-6, (step, error)
    handle.detach()
    return error


def each_case(group: dist.ProcessGroup) -> list[str]:
    found = []
    for case in CASES:
        error = error_of_assertion(lambda case=case: leaves_out(group, case))
        found += [f"{case}: {error}"] if error else []
    return found


def error_of_assertion(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except AssertionError as error:
        return f"AssertionError: {error}"
    return ""


def test_nothing_is_lost_where_passes_leave_parameters_out(pool: Pool) -> None:
    assert pool.run(2, each_case) == [[], []]


def two_heads(group: dist.ProcessGroup) -> float:
    """A head that is computed but is no part of the loss: its gradients are undefined, which DDP finds out late."""

    class Heads(Terms):
        def forward(self, grads: Grads) -> tuple[Tensor, Tensor]:
            return (self.a * grads[0]).sum() + (self.b * grads[1]).sum(), (self.c * grads[2]).sum()

    model, rank = DDP(Heads(), process_group=group, find_unused_parameters=True), dist.get_rank(group)
    handle = nc.attach(model, SPEC, **WIRE)
    expected, got = torch.zeros(3, VALUES).double(), torch.zeros(3, VALUES).double()
    for step in range(STEPS):
        grads = list(torch.randn(3, VALUES, generator=torch.Generator().manual_seed(step * 2 + rank)))
        model.zero_grad()
        one, two = model(grads)
        (one + two if step % 2 == 0 else one).backward()
        expected += mean_of(group, [*grads[:2], grads[2] if step % 2 == 0 else None])
        got += arrived(model)
    error = misfit(expected, got + residual_of(handle))
    handle.detach()
    return error


def frozen(group: dist.ProcessGroup, before: bool) -> float:
    """`b` is frozen in the middle: after the model was wrapped and before attach, or after some steps."""
    model, rank = DDP(Terms(), process_group=group, find_unused_parameters=True), dist.get_rank(group)
    model.module.b.requires_grad_(not before)
    handle = nc.attach(model, SPEC, **WIRE)
    expected, got = torch.zeros(3, VALUES).double(), torch.zeros(3, VALUES).double()
    for step in range(STEPS):
        if step == 3:
            model.module.b.requires_grad_(False)
        grads = list(torch.randn(3, VALUES, generator=torch.Generator().manual_seed(step * 2 + rank)))
        model.zero_grad()
        model(grads).backward()
        expected += mean_of(group, [grads[0], grads[1] if step < 3 and not before else None, grads[2]])
        got += arrived(model)
    error = misfit(expected, got + residual_of(handle))
    handle.detach()
    return error


def static(group: dist.ProcessGroup) -> tuple[float, bool]:
    """A static graph without `b`, of which a checkpoint has a residual. And one that uses all keeps no copy."""
    model, rank = DDP(Terms(), process_group=group, static_graph=True), dist.get_rank(group)
    handle = nc.attach(model, SPEC, **WIRE)
    expected, got = torch.ones(3, VALUES).double(), torch.zeros(3, VALUES).double()
    handle.load_state_dict({name: torch.ones(VALUES) for name in "abc"})
    for step in range(STEPS):
        grads: Grads = list(torch.randn(3, VALUES, generator=torch.Generator().manual_seed(step * 2 + rank)))
        grads[1] = None
        model.zero_grad()
        model(grads).backward()
        expected += mean_of(group, grads)
        got += arrived(model)
    error = misfit(expected, got + residual_of(handle))
    handle.detach()
    whole = DDP(Terms(), process_group=group, static_graph=True)
    handle = nc.attach(whole, SPEC, **WIRE)
    for _ in range(2):
        whole(list(torch.randn(3, VALUES))).backward()
    kept = handle._state.residuals._at_pass is not None
    handle.detach()
    return error, kept


def test_nothing_is_lost_with_heads_outside_the_loss_frozen_parameters_and_static_graphs(pool: Pool) -> None:
    assert max(pool.run(2, two_heads)) < 1e-6
    assert max(pool.run(2, frozen, False)) < 1e-6
    assert max(pool.run(2, frozen, True)) < 1e-6
    for error, kept in pool.run(2, static):
        assert error < 1e-6
        assert not kept


def by_hook_state(group: dist.ProcessGroup) -> float:
    """Whoever registers hooks gets the same care: the residual of `b` is still there after a pass without it."""
    module, rank = Terms(), dist.get_rank(group)
    state = HookState(module, SPEC, group=group, **WIRE)
    model = DDP(module, process_group=group, find_unused_parameters=True)
    model.register_comm_hook(state, nc.ddp_hook)
    expected, got = torch.zeros(3, VALUES).double(), torch.zeros(3, VALUES).double()
    for step in range(STEPS):
        grads: Grads = list(torch.randn(3, VALUES, generator=torch.Generator().manual_seed(step * 2 + rank)))
        grads[1] = None if step % 2 else grads[1]
        model.zero_grad()
        model(grads).backward()
        expected += mean_of(group, grads)
        got += arrived(model)
    mine = state.state.residuals.by_parameter()
    missing = expected - got - mean_of(group, [mine[name] for name in "abc"])
    state.close()
    return float(missing.abs().max() / expected.abs().max())


def test_nothing_is_lost_through_a_hook_that_a_framework_registers(pool: Pool) -> None:
    assert max(pool.run(2, by_hook_state)) < 1e-6


def joined(group: dist.ProcessGroup) -> float:
    """Uneven inputs, and passes without `b`: the ranks that have run out pay what they owe along with the others."""
    model, rank = DDP(Terms(), process_group=group, find_unused_parameters=True), dist.get_rank(group)
    handle = nc.attach(model, SPEC, **WIRE)
    all_wanted, got = [], torch.zeros(3, VALUES).double()
    with model.join():
        for step in range(4 + rank):
            grads: Grads = list(torch.randn(3, VALUES, generator=torch.Generator().manual_seed(step * 2 + rank)))
            grads[1] = None if step % 2 else grads[1]
            model.zero_grad()
            model(grads).backward()
            all_wanted.append(torch.stack([torch.zeros(VALUES) if g is None else g for g in grads]).double())
            got += arrived(model)
    total = sum(all_wanted)
    dist.all_reduce(total, group=group)
    expected = total / dist.get_world_size(group)
    # the rank with most inputs saw all that arrived
    dist.broadcast(got, group_src=dist.get_world_size(group) - 1, group=group)
    error = misfit(expected, got + residual_of(handle))
    handle.detach()
    return error


def test_nothing_is_lost_when_ranks_run_out_of_inputs(pool: Pool) -> None:
    assert max(pool.run(2, joined)) < 1e-6


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.zeros(6, 8, 5, 5),
    "channels last": lambda: torch.zeros(6, 8, 5, 5).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.zeros(30, 40).t(),
    "permuted": lambda: torch.zeros(4, 5, 6, 7).permute(2, 0, 3, 1),
    "with ones": lambda: torch.zeros(1, 40, 1, 30).permute(3, 2, 1, 0),
    "with gaps": lambda: torch.zeros(30, 80)[:, ::2],
    "one value": lambda: torch.zeros(()),
    "nothing": lambda: torch.zeros(0, 3),
}


class One(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.p = nn.Parameter(values)

    def forward(self, grad: Tensor) -> Tensor:
        return (self.p * grad).sum()


def laid_out(group: dist.ProcessGroup, layout: str) -> tuple[float, float, bool]:
    """What is missing by the state, each value in its place; and what of it a contiguous model pays on."""
    model, rank = DDP(One(LAYOUTS[layout]()), process_group=group), dist.get_rank(group)
    handle = nc.attach(model, "int2/16+ef", **{**WIRE, "min_values": 0})
    missing = torch.zeros(model.module.p.shape).double()
    for step in range(3):
        grad = torch.randn(missing.shape, generator=torch.Generator().manual_seed(step * 2 + rank))
        model.zero_grad()
        model(grad).backward()
        mean = grad.double()
        dist.all_reduce(mean, group=group)
        missing += mean / dist.get_world_size(group) - model.module.p.grad.double()
    state = handle.state_dict()
    off = float((state["p"].double() - missing).abs().sum())
    handle.load_state_dict(state)
    same = torch.equal(handle.state_dict()["p"], state["p"]) and state["p"].is_contiguous()
    handle.detach()
    other = DDP(One(torch.zeros(missing.shape)), process_group=group)
    handle = nc.attach(other, "int8/16+ef", **{**WIRE, "min_values": 0})
    handle.load_state_dict(state)
    other(torch.zeros(missing.shape)).backward()
    unpaid = (other.module.p.grad + handle.state_dict()["p"] - state["p"]).abs().sum()
    handle.detach()
    return off, float(unpaid), same


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_state_is_in_the_order_of_the_parameter_whatever_its_layout(pool: Pool, layout: str) -> None:
    for off, unpaid, same in pool.run(2, laid_out, layout):
        assert off < 1e-3
        assert unpaid < 1e-3
        assert same


def group_of(world: int) -> dist.ProcessGroup:
    """The pool's group of so many ranks; what torch gives to those that are not in it."""
    found = (g for g in dist.distributed_c10d._world.pg_map if dist.get_process_group_ranks(g) == list(range(world)))
    return next(found, dist.GroupMember.NON_GROUP_MEMBER)


def other_ranks(group: dist.ProcessGroup, kind: str, world: int) -> str:
    model, given = DDP(nn.Linear(64, 64), process_group=group), group_of(world)
    if kind == "by hand":
        return error_of(lambda: nc.DDPState(model, "int8/64", group=given))
    found = error_of(lambda: nc.attach(model, kind, group=given))
    nc.attach(model, "int8/64").detach()
    return found


@pytest.mark.parametrize("world", [2, 7])
@pytest.mark.parametrize("kind", ["int8/64", "auto", "by hand"])
def test_a_group_of_other_ranks_is_refused(pool: Pool, kind: str, world: int) -> None:
    for rank, found in enumerate(pool.run(4, other_ranks, kind, world)):
        assert found.startswith("ValueError: attach: group= ")
        assert (f"has the ranks {list(range(world))}" if rank < world else "not a member") in found
        assert "[0, 1, 2, 3]" in found


def other_order(group: dist.ProcessGroup) -> bytes:
    """The same ranks the other way round: a group as good as any."""
    options = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    backwards = dist.new_group(list(range(8))[::-1], **options)
    model = DDP(One(torch.zeros(VALUES)), process_group=group)
    handle = nc.attach(model, "int8/64", group=backwards, min_values=1)
    model(torch.randn(VALUES, generator=torch.Generator().manual_seed(dist.get_rank(group)))).backward()
    handle.detach()
    dist.destroy_process_group(backwards)
    return model.module.p.grad.numpy().tobytes()


def test_a_group_of_the_same_ranks_in_another_order_is_taken(pool: Pool) -> None:
    assert len(set(pool.run(8, other_order))) == 1
