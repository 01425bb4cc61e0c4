"""The state of `LocalSGD`: looking at it changes nothing, and going on from it is as if nobody had stopped."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.models import bits, error_of
from dist.pool import Pool, soon
from dist.shards import mesh_of, sharded
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import narrowcast as nc

NOT_OUTER = {
    "LBFGS": "its step needs a closure",
    "SparseAdam": "it takes sparse gradients alone",
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True}],
    "RMSprop": [{"momentum": 0.5, "centered": True}],
    "Adam": [{}, {"amsgrad": True}, {"lr": "tensor", "capturable": False, "foreach": False}],
    "ASGD": [{"t0": 1.0}],
}
"""Beside the defaults, where an optimizer's first step differs from the others."""


def outers() -> list[tuple[str, dict[str, Any]]]:
    """Every optimizer of torch."""
    found = [name for name, kind in vars(torch.optim).items() if inspect.isclass(kind) and issubclass(kind, Optimizer)]
    names = sorted(set(found) - {"Optimizer"} - set(NOT_OUTER))
    return [(name, options) for name in names for options in OPTIONS.get(name, [{}])]


def outer_of(name: str, options: dict[str, Any]) -> Callable[[list[Tensor]], Optimizer]:
    rate = {"lr": torch.tensor(0.05)} if options.get("lr") == "tensor" else {"lr": 0.05}
    return lambda anchors: getattr(torch.optim, name)(anchors, **{**options, **rate})


class Few(nn.Module):
    """Tensors of several shapes, one of a single value; all matrices, since Muon takes nothing else."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"a": (24, 16), "b": (16, 7), "c": (1, 1)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size).to(dtype)))

    @torch.no_grad()
    def walk(self, rank: int, step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + rank)
        for p in self.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=generator).to(p.dtype))


def made(group: dist.ProcessGroup, model: Few, outer: Any, spec: str = "int8/64") -> nc.LocalSGD:
    return nc.LocalSGD(model, every=2, spec=spec, outer=outer_of(*outer), group=group, min_values=1)


def filled(place: Any, value: Any) -> Any:
    """As checkpoint libraries do: tensors are written into those that are there, the rest is replaced."""
    if isinstance(place, dict):
        assert place.keys() == value.keys()
        return {key: filled(place[key], value[key]) for key in place}
    if isinstance(place, list):
        return [filled(p, v) for p, v in zip(place, value, strict=True)]
    return place.copy_(value) if isinstance(place, Tensor) else value


def trained(
    group: dist.ProcessGroup, outer: Any, way: str, dtype: torch.dtype, stops: tuple[int, ...], spec: str = "int8/64"
) -> bytes:
    """Nine steps, four exchanges; at the stops somebody looks at the state, or goes on from it elsewhere."""
    model = Few(dtype)
    local = made(group, model, outer, spec)
    for step in range(9):
        if step in stops and way != "straight":
            state = local.state_dict()
            kept = copy.deepcopy(state)
        if step in stops and way in ("loaded", "filled"):
            local.close()
            own, model = model.state_dict(), Few(dtype)
            local = made(group, model, outer, spec)
            local.load_state_dict(filled(local.state_dict(), kept) if way == "filled" else kept)
            model.load_state_dict(own)
        model.walk(dist.get_rank(group), step)
        local.step()
        if step in stops and way != "straight":
            # what was saved stays what it was
            assert all(torch.equal(x, y) for x, y in zip(leaves(state), leaves(kept), strict=True))
    local.check_ranks()
    local.close()
    return bits(model)


def leaves(state: Any) -> list[Tensor]:
    if isinstance(state, (dict, list)):
        return [leaf for value in (state.values() if isinstance(state, dict) else state) for leaf in leaves(value)]
    return [state] if isinstance(state, Tensor) else []


WAYS = {"looked": tuple(range(9)), "loaded": (0, 3), "filled": (0, 3)}
"""Before the first exchange, and in the middle of a round."""


def compared(group: dist.ProcessGroup, outer: Any) -> list[str]:
    wrong = []
    for dtype, ways in ((torch.float32, WAYS), (torch.bfloat16, ("loaded",))):
        straight = trained(group, outer, "straight", dtype, ())
        wrong += [f"{way} in {dtype}" for way in ways if trained(group, outer, way, dtype, WAYS[way]) != straight]
    return wrong


@pytest.mark.parametrize("outer", outers(), ids=str)
def test_looking_at_the_state_or_going_on_from_it_changes_no_bit(pool: Pool, outer: Any) -> None:
    assert pool.run(2, compared, outer) == [[], []]


def by_low_rank(group: dist.ProcessGroup, spec: str) -> list[str]:
    """As `compared`; residuals are loaded as their mean over the workers, so a stop is where nothing is owed yet."""
    outer, wrong = ("SGD", {"momentum": 0.9}), []
    for way, stops in {"looked": tuple(range(9)), "loaded": (0, 3), "filled": (0, 3)}.items():
        kept = stops if "ef" not in spec or way == "looked" else (0,)
        straight = trained(group, outer, "straight", torch.float32, (), spec)
        wrong += [way] * (trained(group, outer, way, torch.float32, kept, spec) != straight)
    return wrong


@pytest.mark.parametrize("spec", ["bf16+rank2", "fp32+acp2", "fp32+rank2+ef", "bf16+acp1+ef"])
def test_going_on_with_low_rank_changes_no_bit(pool: Pool, spec: str) -> None:
    assert pool.run(2, by_low_rank, spec) == [[], []]


def unheard(group: dist.ProcessGroup) -> tuple[int, int, int]:
    """How many steps hooks and the optimizer itself saw while somebody looked; and its states then."""
    steps: list[object] = []
    local = made(group, Few(torch.float32), ("SGD", {"momentum": 0.9}))
    outer, heard = local._own.outer, register_optimizer_step_post_hook(lambda *_: steps.append(0))
    outer.register_step_post_hook(lambda *_: steps.append(1))
    local.state_dict()
    local.check_ranks()
    heard.remove()
    local.close()
    return len(steps), len(outer.state), sum(a.grad is not None for a in local._own.anchors.values())


def test_nobody_hears_of_a_look_at_the_state(pool: Pool) -> None:
    assert pool.run(2, unheard) == [(0, 0, 0)] * 2


def moved_by_halves(group: dist.ProcessGroup, dtype: torch.dtype, rate: float) -> list[float]:
    """One of two workers moves by a unit of its type each round, the other stands: how far the anchors are off."""
    model, unit = nn.ParameterDict({"a": torch.ones(5, 3, dtype=dtype), "b": torch.ones(4)}), torch.finfo(dtype).eps
    local = nc.LocalSGD(
        model, every=1, spec="fp32", outer=lambda a: torch.optim.SGD(a, lr=rate), group=group, min_values=1
    )
    found = []
    for round_ in range(20):
        with torch.no_grad():
            for p in model.values():
                p.add_(unit * (dist.get_rank(group) == 0 and round_ % 2 == 0))
        local.step()
        wanted = (round_ // 2 + 1) * unit * rate / 2
        found += [float((anchor - 1 - wanted).abs().max()) for anchor in local._own.anchors.values()]
        assert all(torch.equal(p, local._own.anchors[n].to(p.dtype)) for n, p in model.items())
    local.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rate", [0.7, 1.0])
def test_anchors_move_by_what_the_workers_moved_and_nothing_else(pool: Pool, dtype: torch.dtype, rate: float) -> None:
    """A round in which nobody moves, every second one, changes nothing, whatever an anchor holds below its type."""
    for found in pool.run(2, moved_by_halves, dtype, rate):
        # float32's own rounding of values near 1: an addition a round
        assert max(found) <= 20 * 2.0**-24


def gone(weak: weakref.ref[object]) -> bool:
    gc.collect()
    return weak() is None


def dropped(group: dist.ProcessGroup) -> tuple[int, int, int]:
    """Models of which nobody closed the LocalSGD: those alive, and threads before and after."""
    alive, before = [], threading.active_count()
    for counted in (True, False) * 2:
        model = Few(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = nc.LocalSGD(model, optimizer if counted else None, every=1, spec="int8/64", group=group, min_values=1)
        alive.append(weakref.ref(kept))
        del kept
        # an optimizer keeps its own one alive: the line that makes it need not keep anything
        assert counted or soon(lambda: gone(alive[-1]))
        gc.collect()
        assert (alive[-1]() is not None) == counted
        model.a.sum().backward()
        optimizer.step()
        assert alive[-1]() is None or alive[-1]().exchanges == 1
        del model, optimizer
        gc.collect()
    soon(lambda: all(map(gone, alive)) and threading.active_count() <= before)
    return sum(each() is not None for each in alive), before, threading.active_count()


def test_what_is_dropped_goes_with_its_threads(pool: Pool) -> None:
    for alive, before, after in pool.run(2, dropped):
        assert alive == 0
        assert after <= before


def copied(group: dist.ProcessGroup) -> tuple[int, int]:
    """The steps that are counted of an optimizer, and of its copy."""
    model = Few(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = nc.LocalSGD(model, optimizer, every=5, spec="int8/64", group=group, min_values=1)
    optimizer.step()
    copy.deepcopy(optimizer).step()
    steps = local.steps
    local.close()
    optimizer.step()
    return steps, local.steps


def test_a_copy_of_the_optimizer_counts_for_nobody(pool: Pool) -> None:
    assert pool.run(2, copied) == [(1, 1)] * 2


def thawed(group: dist.ProcessGroup) -> tuple[bytes, str]:
    """A parameter that is frozen later takes part as before; one that is trained later was never agreed on."""
    model = Few(torch.float32)
    model.b.requires_grad_(False)
    local = made(group, model, ("SGD", {}))
    model.a.requires_grad_(False)
    with torch.no_grad():
        model.a.add_(dist.get_rank(group))
    local.exchange()
    same = bits(model)
    model.b.requires_grad_(True)
    found = error_of(local.exchange)
    local.close()
    return same, found


def test_a_parameter_that_is_trained_later_is_an_error(pool: Pool) -> None:
    found = pool.run(2, thawed)
    assert len({same for same, _ in found}) == 1
    assert all("b is trained now and was not when LocalSGD was made" in error for _, error in found)


def scaled(group: dist.ProcessGroup, fused: bool) -> int:
    """The steps that are counted where a scaler skips one of three, on one worker."""
    model, scaler = Few(torch.float32), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    local = nc.LocalSGD(model, optimizer, every=10, spec="int8/64", group=group, min_values=1)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model.a.sum() * (float("inf") if step == 1 and dist.get_rank(group) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    local.close()
    return local.steps


def test_skipped_steps_are_counted_where_the_optimizer_itself_skips_them(pool: Pool) -> None:
    """Why the docs ask for `step()` by hand with a scaler; a fused optimizer is called for a skipped step, too."""
    assert pool.run(2, scaled, True) == [3, 3]
    assert pool.run(2, scaled, False) == [3, 2]


def sharded_statistics(group: dist.ProcessGroup) -> str:
    model = sharded(mesh_of(group), nn.Sequential(nn.Linear(16, 16, bias=False)))
    one = dist.new_subgroups(1)[0]
    local = nc.LocalSGD(model, every=1, spec="fp32", outer=torch.optim.Adafactor, group=one)
    found = error_of(local.state_dict)
    local.close()
    return found


def test_a_state_that_cannot_be_put_together_again_is_refused(pool: Pool) -> None:
    for found in pool.run(8, sharded_statistics):
        assert "the outer optimizer keeps row_var of shape" in found
