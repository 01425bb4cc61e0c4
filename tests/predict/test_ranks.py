"""With real ranks: `probe` gives all of them the same numbers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.pool import Crew
from torch import nn

from narrowcast.predict import cluster, probe, profile

SIZES = (1 << 12, 1 << 14)
TOKEN = {
    "SIZES": SIZES,
    "WIRE_SIZES": SIZES,
    "TWO_SIZES": SIZES,
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


@pytest.mark.parametrize("world, local", [(3, 1), (2, 2), (4, 2)])
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
    outer = {table.ranks for table in found.levels[-1].tables if table.name == "all_reduce"}
    assert outer == ({2, 3} if world == 3 else {2})
    assert found.probed_ranks == max(outer)
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
