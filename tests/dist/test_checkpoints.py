"""torch.distributed.checkpoint with our part and without, in every order; calls in torch.profiler; LBFGS."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist.models import loss, mlp, wrapped
from dist.pool import Pool
from each import each
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import narrowcast as nc
from narrowcast.parallel.integrations.checkpoint import LoadPlanner


def model_of(group: dist.ProcessGroup, kind: str) -> Any:
    if kind == "ddp":
        return wrapped(group)
    return fully_shard(mlp(), mesh=DeviceMesh.from_group(group, "cpu"))


def attached(group: dist.ProcessGroup, kind: str, spec: str) -> tuple[Any, dict[str, Any]]:
    model = model_of(group, kind)
    handle = nc.attach(model, spec, min_values=1) if spec else None
    return model, {"model": model.state_dict()} | ({"narrowcast": handle} if handle is not None else {})


def through_a_checkpoint(group: dist.ProcessGroup, kind: str, before: str, after: str, folder: str) -> None:
    """Saved with one wire (or without), loaded with another."""
    model, state = attached(group, kind, before)
    loss(model, dist.get_rank(group), 0).backward()
    dcp.save(state, checkpoint_id=folder, process_group=group)
    if before:
        saved = {name: whole(value) for name, value in state["narrowcast"].state_dict().items()}
        state["narrowcast"].detach()
    model, state = attached(group, kind, after)

    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner(), process_group=group)
    if after:
        now = {name: whole(value) for name, value in state["narrowcast"].state_dict().items()}
        if "ef" in before and "ef" in after:
            assert all(torch.equal(now[name], value) for name, value in saved.items())
            assert any(value.any() for value in now.values())
        else:
            assert not any(value.any() for value in now.values())
        state["narrowcast"].detach()


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


WIRES = ("", "int8/256", "int4/32+ef")


@each("kind, before, after", [("fsdp", b, a) for b in WIRES for a in WIRES] + [("ddp", "", WIRES[2])])
def test_our_part_of_a_checkpoint_may_be_missing(
    pool: Pool, tmp_path: Path, kind: str, before: str, after: str
) -> None:
    folder = tmp_path / f"{kind} {before} {after}".replace("/", " ")
    pool.run(2, through_a_checkpoint, kind, before, after, str(folder))


def without_a_weight(group: dist.ProcessGroup, folder: str) -> str:
    dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=folder, process_group=group)
    state = {"model": {"a": torch.ones(3), "b": torch.ones(3)}}
    try:
        dcp.load(state, checkpoint_id=folder, planner=LoadPlanner(), process_group=group)
    except BaseException as error:  # noqa: BLE001  DCP's own kind, with what each rank raised
        return str(error)
    return ""


def test_nothing_else_may_be_missing(pool: Pool, tmp_path: Path) -> None:
    assert all(
        "Missing key in checkpoint state_dict: model.b" in said for said in pool.run(2, without_a_weight, str(tmp_path))
    )


def profiled(group: dist.ProcessGroup, kind: str) -> list[str]:
    rank, model = dist.get_rank(group), model_of(group, kind)
    more = {} if kind == "ddp" else {"parameters": "int8/256"}
    handle = nc.attach(model, "int8/256", min_values=1, **more)
    loss(model, rank, 0).backward()
    with torch.profiler.profile() as seen:
        loss(model, rank, 1).backward()
    handle.detach()
    return sorted({event.key for event in seen.key_averages() if event.key.startswith("narrowcast")})


def test_calls_are_in_the_profiler(pool: Pool) -> None:
    assert pool.run(2, profiled, "ddp") == [["narrowcast::all_reduce"]] * 2
    assert pool.run(2, profiled, "fsdp") == [["narrowcast::all_gather", "narrowcast::reduce_scatter"]] * 2


def second_order(group: dist.ProcessGroup, spec: str, detach: bool) -> list[str]:
    rank, model = dist.get_rank(group), wrapped(group)
    handle = nc.attach(model, spec, min_values=1)
    optimizer, said = torch.optim.LBFGS(model.parameters(), max_iter=2), list[str]()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, rank, 0)
        value.backward()
        return value

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    if detach:
        handle.detach()
    logger, listener = logging.getLogger("narrowcast"), Listener()
    logger.addHandler(listener)
    optimizer.step(closure)
    optimizer.step(closure)
    logger.removeHandler(listener)
    handle.detach()
    return said


def test_lbfgs_is_warned_of_once(pool: Pool) -> None:
    for said in pool.run(2, second_order, "int8/256", False):
        assert len(said) == 1
        assert said[0].startswith("attach: LBFGS takes differences of gradients for curvature")
    assert pool.run(2, second_order, "as-is", False) == [[], []]
    assert pool.run(2, second_order, "int8/256", True) == [[], []]
