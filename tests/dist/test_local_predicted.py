"""What the predictor says that an exchange sends is what `LocalSGD` sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dist.pool import Pool
from torch import nn

import narrowcast as nc
from narrowcast.predict import Cluster, Device, Level, Profile, TensorTime
from narrowcast.predict.local import LocalPredictor
from narrowcast.predict.rounds import LocalSetup

WIRES = ("fp32", "int4/128+ef", "int2/4096+top64+ef95", "e4m3fn", "bf16+rank4+ef")
PLACE = Cluster("two", (Level("link", 0, 1.0, 10.0),), Device("cpu", memory_gbyte=10.0))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(130, 210), nn.Tanh(), nn.Linear(210, 77), nn.Tanh(), nn.Linear(77, 5))


def sent(group: dist.ProcessGroup, spec: str) -> float:
    made = model()
    local = nc.LocalSGD(made, every=1, spec=spec, group=group)
    local.step()
    local.close()
    return local.stats()["sent_bytes"]


@pytest.mark.parametrize("spec", WIRES)
def test_bytes_of_an_exchange_are_those_that_are_sent(pool: Pool, spec: str) -> None:
    tensors = tuple(TensorTime(name, p.numel(), 0.0, tuple(p.shape)) for name, p in model().named_parameters())
    profile = Profile("model", 8, 0.1, 0.2, 0.0, tensors)
    for world in (2, 4):
        made = LocalPredictor(profile, PLACE, draws=0).predict(LocalSetup(world, spec, 10))
        assert made.round_bytes == max(pool.run(world, sent, spec))
