"""With real ranks: `probe` gives all of them the same numbers, and "auto" the same decision."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.models import bits, loss, wrapped
from dist.pool import Crew
from torch import nn

import narrowcast as nc
from narrowcast.parallel import auto
from narrowcast.predict import cluster, probe, profile

SIZES = (1 << 12, 1 << 14)
TOKEN = {
    "SIZES": SIZES,
    "WIRE_SIZES": SIZES,
    "CODEC_VALUES": (256, 1024, 4096),
    "ROUNDS": 2,
    "WORK": 8,
    "BACKGROUND": 256,
}
"""A token of what is measured: the numbers do not matter here."""


WIRES = ("fp32", "int8/256", "int4/128+ef", "int4/128+rot", "bf16+rank2+ef", "fp32+acp1")


def values_of(crew: Crew, world: int) -> list[Any]:
    found = [crew.outcome(rank) for rank in range(world)]
    assert all(outcome is not None and not outcome.error for outcome in found), found
    return [outcome.value for outcome in found if outcome is not None]


def probed(group: dist.ProcessGroup, local: int) -> str:
    for name, value in TOKEN.items():
        setattr(probe, name, value)
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    return cluster.dump(probe.probe(WIRES, 10.0, "token"))


@pytest.mark.parametrize("world, local", [(2, 1), (2, 2), (4, 2)])
def test_all_ranks_hold_the_same_cluster(world: int, local: int) -> None:
    with Crew(world, probed, local, timeout=40) as crew:
        texts = values_of(crew, world)
    assert len(set(texts)) == 1
    found = cluster.parse(texts[0])
    assert found.measured
    wanted = ["inside a node"] * (local > 1) + ["between nodes"] * (world > local)
    assert [level.name for level in found.levels] == wanted
    assert all(
        {table.name for table in level.tables} == {"all_reduce", "two_shot", "all_gather", "send"}
        for level in found.levels
    )
    assert [speed.wire for speed in found.codecs] == list(WIRES)
    assert all(t > 0 for speed in found.codecs for row in (*speed.encode, *speed.decode) for t in row)
    assert found.node == (local if world > local else 1)
    assert all(level.timed_gbit == level.bandwidth_gbit for level in found.levels)


def profiled(group: dist.ProcessGroup) -> Any:
    module = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4))
    return profile.profile_together(module, torch.randn(4, 8), "m", steps=3)


def test_all_ranks_hold_the_same_profile() -> None:
    with Crew(2, profiled, timeout=40) as crew:
        one, two = values_of(crew, 2)
    assert [t.name for t in one.tensors] == [t.name for t in two.tensors]
    assert [t.ready for t in one.tensors] == [t.ready for t in two.tensors]
    assert (one.ranks, one.forward, one.backward) == (2, two.forward, two.backward)


def trained(group: dist.ProcessGroup, rates: dict[str, float]) -> dict[str, Any]:
    """Twelve steps with "auto", on a link whose times are made up."""
    made_up = {wire: torch.full((4,), rate, dtype=torch.float64) for wire, rate in rates.items()}
    auto.seconds_a_value = lambda channel, group, clock: made_up
    model, rank = wrapped(group), dist.get_rank(group)
    handle = nc.attach(model, "auto", min_values=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = handle.explain()
    for step in range(12):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.zeros(1, 24))  # no training: does not count as a step
    handle.check_ranks()
    found = {"first": first, "last": handle.explain(), "stats": handle.stats(), "bits": bits(model.module)}
    handle.detach()
    found["again"] = nc.attach(model, "int8/256").detach() is None
    return found


SLOW_LINK = {"as-is": 1e-3, "bf16": 0.5e-3, "int8/256": 0.26e-3}
FREE_LINK = {"as-is": 1e-12, "bf16": 1e-9, "int8/256": 1e-9}


@pytest.mark.parametrize("world", [2, 3])
def test_auto_compresses_on_a_slow_link_and_says_why(world: int) -> None:
    with Crew(world, trained, SLOW_LINK, timeout=40) as crew:
        found = values_of(crew, world)
    for one in found:
        assert one["first"].startswith("auto: watching: 0 of 5 steps seen")
        assert one["last"].startswith("auto: use int8/256: int8/256 gives")
        assert one["stats"]["steps"] == 12 - auto.WARM_UP - auto.WATCHED
        assert one["bits"] == found[0]["bits"]


def test_auto_leaves_it_off_where_the_link_is_free() -> None:
    with Crew(2, trained, FREE_LINK, timeout=40) as crew:
        found = values_of(crew, 2)
    for one in found:
        assert "gradients stay as they are: leave it off" in one["last"]
        assert one["stats"] == {}
        assert one["bits"] == found[0]["bits"]


def measured(group: dist.ProcessGroup) -> dict[str, list[float]]:
    auto.VALUES = 1 << 12
    channel = auto.Channel(auto.TorchTransport(group))
    found = auto.seconds_a_value(channel, group, auto.DeviceClock(torch.device("cpu")))
    channel.close()
    return {wire: rates.tolist() for wire, rates in found.items()}


def test_all_ranks_measure_the_same_link() -> None:
    with Crew(2, measured, timeout=40) as crew:
        one, two = values_of(crew, 2)
    assert one == two
    assert list(one) == ["as-is", "bf16", "int8/256"]
    assert all(rate > 0 for rates in one.values() for rate in rates)
