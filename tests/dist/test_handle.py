"""One handle for every kind of model: the same members, and the same word when its model is gone."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable

import pytest
import torch.distributed as dist
from dist.models import error_of, mlp, wrapped
from dist.pool import Pool
from dist.shards import loss, mesh_of, sharded
from torch import nn

import narrowcast as nc
from narrowcast.parallel.ddp.handle import DDPHandle
from narrowcast.parallel.fsdp.handle import FSDPHandle
from narrowcast.parallel.handle import GONE, Handle
from narrowcast.parallel.integrations import HookState
from narrowcast.parallel.stats import Stats

MODELS: dict[str, Callable[[dist.ProcessGroup], nn.Module]] = {
    "ddp": wrapped,
    "auto": wrapped,
    "fsdp": lambda group: sharded(mesh_of(group)),
}
NEED_THE_MODEL = ("rows", "link", "__str__", "explain", "check_ranks", "state_dict")


def attached(model: nn.Module, kind: str, gradients: object = "int4/64+ef") -> Handle:
    return nc.attach(model, "auto" if kind == "auto" else gradients, min_values=1)


@pytest.mark.parametrize("kind", [DDPHandle, FSDPHandle])
def test_a_handle_implements_the_interface_and_overrides_nothing(kind: type[Handle]) -> None:
    assert kind.__bases__ == (Handle,)
    members = {name for name in vars(Handle) if not name.startswith("_")}
    assert members == Handle.__abstractmethods__, "the interface has no code to override"
    assert members <= set(vars(kind))


def dropped(group: dist.ProcessGroup, kind: str, by_policy: bool) -> tuple[weakref.ref[nn.Module], Handle]:
    """A model that goes after a step, weakly, and its handle."""
    model = MODELS[kind](group)

    def leads_to_the_model(info: nc.parallel.TensorInfo, step: int) -> str | None:
        return "int4/64+ef" if model is not None else None

    handle = attached(model, kind, leads_to_the_model if by_policy else "int4/64+ef")
    loss(model, dist.get_rank(group), 0).backward()
    return weakref.ref(model), handle


def alone(group: dist.ProcessGroup, kind: str, by_policy: bool) -> dict[str, object]:
    """Only the handle is kept, as in `handle = nc.attach(fully_shard(...), ...)`."""
    weak, handle = dropped(group, kind, by_policy)
    for _ in range(500):
        gc.collect()  # again: a channel's thread may have been in the last lines of a call
        if weak() is None:
            break
        time.sleep(0.02)
    calls = {name: error_of(getattr(handle, name)) for name in NEED_THE_MODEL}
    remains = handle.step, isinstance(handle.stats(), dict), handle.events() is not None, handle.errors() is not None
    handle.detach()
    return {"is a handle": isinstance(handle, nc.parallel.Handle), "is gone": weak() is None, "left": remains, **calls}


@pytest.mark.parametrize("kind, by_policy", [("ddp", False), ("ddp", True), ("fsdp", False), ("auto", False)])
def test_a_handle_does_not_keep_its_model_alive_and_says_so(pool: Pool, kind: str, by_policy: bool) -> None:
    for said in pool.run(2, alone, kind, by_policy):
        assert (said["is a handle"], said["is gone"], said["left"]) == (True, True, (1, True, True, True))
        for name in NEED_THE_MODEL:
            assert said[name] == f"RuntimeError: {GONE}", name


def keys_and_line(group: dist.ProcessGroup, kind: str) -> tuple[set[str], set[str], str]:
    """The keys of `stats()` before and after a step, and what is printed of a handle."""
    if kind == "hook":
        state = HookState(mlp(), "int8/64", min_values=1, group=group)
        model = nn.parallel.DistributedDataParallel(state._module, process_group=group)
        model.register_comm_hook(state, nc.ddp_hook)
    elif kind == "local":
        model = mlp()
        state = nc.LocalSGD(model, every=1, spec="int4/64+ef", group=group, min_values=1)
    else:
        model = MODELS[kind](group)
        state = attached(model, kind)
    before = set(state.stats())
    loss(model, dist.get_rank(group), 0).backward()
    if kind == "local":
        state.step()
    line = str(state) if isinstance(state, Handle) else ""
    return before, set(state.stats()), line


OF_EXCHANGES = {"wait_ms", "exchange_ms", "computing_share"}
"""What `LocalSGD` alone has."""


def test_stats_have_the_same_keys_always_and_a_handle_is_a_line(pool: Pool) -> None:
    common = set(Stats().as_dict())
    for kind in (*MODELS, "hook", "local"):
        for before, after, line in pool.run(2, keys_and_line, kind):
            assert before == after, kind
            assert common <= after, kind
            roles = {key for key in after - common if key.partition("_")[0] in ("gradient", "parameter", "between")}
            assert after - roles == common | (OF_EXCHANGES if kind == "local" else set()), kind
            if kind in ("ddp", "fsdp"):
                assert "(int4/64+ef), " in line
                assert " times fewer bits; " in line
                assert "\n" not in line


def alone_on_one_rank(group: dist.ProcessGroup) -> tuple[list[str], str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("narrowcast")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = wrapped(group)
        handle = attached(model, "ddp")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return heard, str(handle)


def test_attach_logs_what_the_handle_prints_once(pool: Pool) -> None:
    (first, line), (second, _) = pool.run(2, alone_on_one_rank)
    assert (first, second) == ([f"attach: {line}"], [])


def after_detach(group: dist.ProcessGroup, kind: str) -> tuple[list[str], bool]:
    """What is in the state after `detach()`, when the model is gone; and whether residuals are in it."""
    model = MODELS[kind](group)
    handle = attached(model, kind)
    loss(model, dist.get_rank(group), 0).backward()
    before = handle.state_dict()
    handle.detach()
    rows = [row.name for row in handle.rows()]
    del model
    gc.collect()
    assert [row.name for row in handle.rows()] == rows
    return sorted(before), all(bool(value.abs().max() > 0) for value in before.values())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_after_detach_the_handle_has_what_the_model_had(pool: Pool, kind: str) -> None:
    names = sorted(name for name, _ in mlp().named_parameters())
    assert pool.run(2, after_detach, kind) == [(names, True)] * 2
