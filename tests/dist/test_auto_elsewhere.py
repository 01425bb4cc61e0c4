"""The autopilot of FSDP2 models and of LocalSGD: ranks decide alike, and a repeated run has the same bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dist.models import mlp
from dist.pool import Pool
from dist.shards import loss, mesh_of, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowcast as nc
from narrowcast.parallel import seeds
from narrowcast.parallel.autopilot import Decided, Replay
from narrowcast.parallel.autopilot.pilot import BEAT, DOUBTS


def trained(model: Any, rank: int, steps: int) -> list[bytes]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    return [p.full_tensor().detach().numpy().tobytes() for p in model.parameters()]


STEPS = (1 + DOUBTS) * BEAT + 3
"""Until it has decided, though steps of a busy machine contradict what was measured."""


def run(group: dist.ProcessGroup) -> dict[str, Any]:
    rank, model = dist.get_rank(group), sharded(mesh_of(group))
    handle = nc.attach(model, nc.auto(candidates=["int8/64", "int4/64+ef"]), min_values=1)
    bits = trained(model, rank, STEPS)
    handle.check_ranks()
    pilot = handle._pilot
    found = {"bits": bits, "fits": pilot.known.fits, "errors": pilot.known.errors, "history": handle.history()}
    found |= {"layout": pilot.known.layout, "explain": handle.explain(), "steps": handle.stats()["steps"]}
    handle.detach()
    return found


def test_ranks_decide_alike_and_the_rows_say_why(pool: Pool) -> None:
    one, two = pool.run(2, run)
    for key in ("bits", "fits", "errors", "history", "layout"):
        assert one[key] == two[key], key
    assert one["history"]
    assert one["steps"] == STEPS
    assert "plain" in one["fits"]
    assert one["errors"]
    assert sum(map(len, one["layout"].buckets)) == len(one["bits"])
    assert "auto: rounding may add 1 %" in one["explain"]


def repeated(group: dist.ProcessGroup) -> tuple[list[bytes], list[bytes], list[bytes]]:
    rank = dist.get_rank(group)
    names = [name for name, _ in sharded(mesh_of(group)).named_parameters()]
    wires = dict(zip(names, ["int4/64+sr+ef", "int8/64"] * 4, strict=False))
    history = [Decided(3, "wires", wires), Decided(6, "wires", dict.fromkeys(names, "fp32+ef")), Decided(7)]
    ends = []
    for policy in (Replay(history), Replay(history), "as-is"):
        seeds._COUNTS.clear()
        model = sharded(mesh_of(group))
        handle = nc.attach(model, policy, min_values=1)
        ends.append(trained(model, rank, 9))
        handle.detach()
    return ends[0], ends[1], ends[2]


def test_a_repeated_run_has_the_same_bits(pool: Pool) -> None:
    for first, second, plain in pool.run(2, repeated):
        assert first == second
        assert first != plain


def local(group: dist.ProcessGroup) -> dict[str, Any]:
    rank, model = dist.get_rank(group), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = nc.LocalSGD(model, optimizer, every=2, spec="auto", group=group, min_values=1)
    for step in range(2 * (1 + DOUBTS) * BEAT + 2):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    outer.check_ranks()
    found = {"history": outer.history(), "explain": outer.explain(), "exchanges": outer.exchanges}
    outer.close()
    return found


def test_workers_of_local_sgd_decide_alike(pool: Pool) -> None:
    one, two = pool.run(2, local)
    assert one["history"] == two["history"]
    # later where exchanges of a busy machine contradict what was measured
    assert one["history"][0]["step"] in range(BEAT, (1 + DOUBTS) * BEAT + 1, BEAT)
    assert "auto: rounding may add 1 %" in one["explain"]


def hybrid(group: dist.ProcessGroup) -> str:
    model = fully_shard(mlp(), mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards")))
    try:
        nc.attach(model, "auto", min_values=1)
    except ValueError as error:
        return str(error)
    return ""


def test_replicas_are_refused(pool: Pool) -> None:
    assert all("HSDP has two" in error for error in pool.run(8, hybrid))
