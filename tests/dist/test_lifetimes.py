"""Models that are copied, dropped, compiled or joined: what a plain DDP model bears, an attached one bears."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dist.links import FAST, SLOW, made_up
from dist.models import error_of, gradients, loss, mlp, wrapped
from dist.pool import Crew, soon
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.parallel.autopilot import pilot
from narrowcast.parallel.autopilot.times import PLAIN, WIRES
from narrowcast.parallel.integrations.hooks import HookState


def values_of(crew: Crew, world: int = 2) -> list[Any]:
    found = [crew.outcome(rank, within=100) for rank in range(world)]
    for outcome in found:
        assert outcome is not None, "a rank died"
        assert not outcome.error, outcome.traceback
    return [outcome.value for outcome in found]


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "AveragedModel": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}
STAGES = ["plain", "attached", "detached", "attached again", "auto", "hook"]


def at_stage(model: DDP, stage: str) -> nc.Handle | None:
    if stage == "plain":
        return None
    if stage == "hook":
        model.register_comm_hook(nc.DDPState(model, "int8/256", min_values=1), nc.ddp_hook)
        return None
    handle = nc.attach(model, "auto" if stage == "auto" else "int8/256", min_values=1)
    if stage in ("detached", "attached again"):
        handle.detach()
    return nc.attach(model, "int8/256", min_values=1) if stage == "attached again" else handle


def copied(group: dist.ProcessGroup) -> dict[tuple[str, str], str]:
    """What became of each copy at each stage; its training is compared with that of a copy of a plain model."""
    rank, found = dist.get_rank(group), {}
    for stage in STAGES:
        model = wrapped(group)
        handle = at_stage(model, stage)
        loss(model, rank, 0).backward()
        for name, way in COPIES.items():
            found[stage, name] = error_of(lambda way=way, m=model, s=stage: _train_copy(way(m), rank, s))
        if handle is not None:
            loss(model, rank, 1).backward()
            handle.detach()
    return found


def _train_copy(made: nn.Module, rank: int, stage: str) -> None:
    """A copy is a plain model: it adds as DDP does, and can be attached to. Nothing of ours is in it."""
    assert isinstance(made, DDP)
    reference = wrapped(dist.group.WORLD)
    for model in (made, reference):
        model.zero_grad()
        loss(model, rank, 3).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(made), gradients(reference), strict=True)), "not plain"
    if stage == "hook":  # DDP itself copies the list of hooks, and attach takes them for registered
        return
    handle = nc.attach(made, "int2/16", min_values=1)
    made.zero_grad()
    loss(made, rank, 3).backward()
    assert not all(torch.equal(a, b) for a, b in zip(gradients(made), gradients(reference), strict=True)), "no codec"
    handle.check_ranks()
    handle.detach()


def test_copies_of_a_model_at_every_stage_are_plain_models_that_can_be_attached_to() -> None:
    with Crew(2, copied, timeout=60) as crew:
        for found in values_of(crew):
            assert set(found) == {(stage, name) for stage in STAGES for name in COPIES}
            assert {case: error for case, error in found.items() if error} == {}


def one_line(model: DDP) -> object:
    nc.attach(model, "int8/256", min_values=1)


def keeping_the_handle(model: DDP) -> object:
    return nc.attach(model, "int4/128+ef", min_values=1)


def choosing_by_itself(model: DDP) -> object:
    pilot.BEAT = 1
    return nc.attach(model, "auto", min_values=1)


def watching(model: DDP) -> object:
    pilot.BEAT = 100
    nc.attach(model, "auto", min_values=1)


def by_a_policy_that_holds_the_model(model: DDP) -> object:
    nc.attach(model, lambda info, step: "int8/256" if model.training else "as-is")


def with_a_hook(model: DDP) -> object:
    model.register_comm_hook(nc.DDPState(model, "int8/256", min_values=1), nc.ddp_hook)


def with_a_hook_state(model: DDP) -> object:
    model.register_comm_hook(HookState(model.module, "int8/256", min_values=1), nc.ddp_hook)


def detached(model: DDP) -> object:
    nc.attach(model, "int8/256", min_values=1).detach()


WAYS: dict[str, Callable[[DDP], object]] = {
    way.__name__: way
    for way in (
        one_line,
        keeping_the_handle,
        choosing_by_itself,
        watching,
        by_a_policy_that_holds_the_model,
        with_a_hook,
        with_a_hook_state,
        detached,
    )
}


def counted() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def drop_some(group: dist.ProcessGroup, way: str, count: int) -> tuple[list[Any], list[Any]]:
    """Models that were trained and let go, weakly; and the handles that were kept."""
    models, kept = list[Any](), list[Any]()
    for _ in range(count):
        model = wrapped(group)
        kept.append(WAYS[way](model))
        for step in range(3):
            loss(model, dist.get_rank(group), step).backward()
        models.append(weakref.ref(model))
        del model
        gc.collect()
    return models, [one for one in kept if one is not None]


def dropped(group: dist.ProcessGroup) -> dict[str, tuple[int, bool, list[object]]]:
    """For each way: how many models live, whether threads and files went, what the handles that were kept say."""
    gc.freeze()  # torch's own objects, which take a second to look at
    drop_some(group, "detached", 1)  # connections to the store stay, one of each kind
    found = {}
    for way in WAYS:
        before = counted()
        models, handles = drop_some(group, way, 3)

        def left(before: tuple[int, int] = before, models: list[Any] = models) -> bool:
            gc.collect()  # again: a channel's thread may have been in the last lines of a call
            return any(model() for model in models) or any(b > a for a, b in zip(before, counted(), strict=True))

        gone = soon(lambda left=left: not left())
        told = [error_of(one.state_dict) for one in handles] + [one.stats().get("steps") for one in handles]
        found[way] = sum(model() is not None for model in models), gone, told
    return found


def test_a_model_that_is_dropped_goes_with_its_threads_and_files() -> None:
    with Crew(2, dropped, timeout=60) as crew:
        for found in values_of(crew):
            assert {way: alive for way, (alive, _, _) in found.items() if alive} == {}
            assert [way for way, (_, gone, _) in found.items() if not gone] == []
            *told, one, two, three = found["keeping_the_handle"][2]
            assert [one, two, three] == [3] * 3, "the counters outlive the model"
            assert all("its model is gone" in str(text) for text in told)


def dropped_elsewhere(group: dist.ProcessGroup) -> list[str]:
    """The last reference goes in a thread of the model's own channel; what that had to send arrives."""
    from narrowcast.collectives.runtime.channel import Channel
    from narrowcast.collectives.transports.torch import TorchTransport

    x, seen = torch.ones(10), list[str]()
    channel: Channel | None = Channel(TorchTransport(group))
    work = nc.all_reduce(x, "fp32", channel=channel, async_op=True)
    assert work is not None
    holder = [channel]
    channel = None
    work.then(lambda _: (holder.clear(), seen.append(threading.current_thread().name)))
    work.wait()
    dist.barrier(group=group)
    return [*seen, str(x[0].item())]


def test_a_channel_may_go_in_its_own_thread() -> None:
    with Crew(2, dropped_elsewhere, timeout=60) as crew:
        for name, value in values_of(crew):
            assert name in ("narrowcast-channel", "MainThread")
            assert value == "2.0"


def compiled(group: dist.ProcessGroup) -> tuple[float, str]:
    torch.compiler.set_stance("force_eager")  # wrapped as ever, and quick
    model: Any = torch.compile(DDP(mlp()), backend="eager")
    handle = nc.attach(model, "int8/256", min_values=1)
    loss(model, dist.get_rank(group), 0).backward()
    told = error_of(lambda: nc.attach(model._orig_mod, "int8/256"))
    handle.detach()
    nc.attach(model._orig_mod, "int8/256").detach()
    return handle.stats()["ratio"], told


def test_a_compiled_ddp_model_is_the_model_that_was_compiled() -> None:
    with Crew(2, compiled, timeout=60) as crew:
        for ratio, told in values_of(crew):
            assert ratio > 2
            assert "attached already" in told


def join(group: dist.ProcessGroup, counts: tuple[int, int]) -> tuple[list[str], float]:
    rank, model = dist.get_rank(group), wrapped(group, mlp())
    handle = nc.attach(model, "auto", min_values=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(counts[rank]):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
    handle.check_ranks()
    found = [entry["road"] for entry in handle.history()], handle.stats()["steps"]
    handle.detach()
    return found


COUNTS = [(22, 3), (12, 7), (1, 9), (12, 0)]


def joined(group: dist.ProcessGroup) -> dict[tuple[tuple[int, int], bool], tuple[list[str], float]]:
    """Uneven inputs with "auto", on links whose times are made up."""
    found = {}
    for slow in (False, True):
        with made_up(lambda step, slow=slow: SLOW if slow else FAST):
            found |= {(counts, slow): join(group, counts) for counts in COUNTS}
    return found


def test_auto_decides_alike_on_ranks_that_have_run_out_of_inputs() -> None:
    with Crew(2, joined, timeout=60) as crew:
        one, two = values_of(crew)
    assert one == two
    for (counts, slow), (told, steps) in one.items():
        assert steps == max(counts)
        assert told == [WIRES if slow else PLAIN]
