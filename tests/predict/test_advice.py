"""Which wire is chosen, when the measurements are sure of it and when they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from narrowcast.predict import cluster, zoo
from narrowcast.predict.advice import advise, choose
from narrowcast.predict.cluster import Cluster, Device, Level
from narrowcast.predict.step import Setup
from narrowcast.predict.sweep import Sweep, half_precision

MANY = 40


def steps(seconds: float, spread: float = 0.0) -> Tensor:
    """A best estimate, and versions that lie evenly around it."""
    versions = torch.linspace(1 - spread, 1 + spread, MANY, dtype=torch.float64)
    return seconds * torch.cat([torch.ones(1, dtype=torch.float64), versions])


@pytest.mark.parametrize(
    "half, narrow, wanted, sure",
    [
        ((0.70, 0.0), (0.40, 0.05), "int4/128", True),
        # 4 bits are 1.17x, but their interval reaches below 1: 16 bits surely gain, and lose less
        ((0.70, 0.0), (0.60, 0.3), "bf16", True),
        ((0.70, 0.0), (0.69, 0.0), "bf16", True),
        # 4 bits surely beat float32; nobody knows whether 16 do, or whether 4 are better
        ((0.95, 0.1), (0.92, 0.01), "fp32", False),
        # nor are 4 bits sure against float32
        ((0.70, 0.0), (0.65, 0.6), "bf16", True),
        ((0.98, 0.5), (0.95, 0.5), "fp32", False),
        ((1.10, 0.0), (1.05, 0.0), "fp32", True),
    ],
)
def test_fewer_than_16_bits_must_surely_beat_16(
    half: tuple[float, float], narrow: tuple[float, float], wanted: str, sure: bool
) -> None:
    found = choose({"fp32": steps(1.0), "bf16": steps(*half), "int4/128": steps(*narrow)})
    assert (found.wire, found.sure) == (wanted, sure)


@pytest.mark.parametrize("name", ["10gbe-tcp", "100gbe-tcp", "pcie3", "p2.16xlarge", "p3.16xlarge", "8xH100"])
def test_no_advice_to_compress_reaches_below_16_bits(name: str) -> None:
    """The interval that is printed is over the 16 bits that were compared with."""
    place = cluster.load(name)
    for model in (zoo.alexnet(), zoo.resnet50(), zoo.vgg19(), zoo.gpt2()):
        sweep = Sweep(model.profile(place.device.flops, place.device.memory_gbyte), place)
        for world in (2, 4, 8):
            found = advise(sweep, world)
            if found.verdict == "compress":
                assert found.prediction.over_16bit_low > 1.0, (name, model.name, world)
            if found.verdict == "16-bit":
                assert found.prediction.algorithm == half_precision(place, 4).algorithm == "native"
                assert "bf16 gives" in found.text


def test_the_link_is_not_spoken_of_where_it_is_the_limit() -> None:
    """Communication adds a lot, but codecs would add more."""
    place = Cluster("slow codecs", (Level("link", 0, 2.0, 9.0),), Device("cpu", memory_gbyte=0.2))
    place = replace(place, measured=True, busy=0.0)
    sweep = Sweep(zoo.alexnet().profile_of(1.0), place)
    found = advise(sweep, 4)
    assert (found.verdict, sweep.cell(Setup(4, "fp32")).bottleneck) == ("leave-off", "link")
    assert "bottleneck" not in found.text
    assert "fewer bits cost as much as they save, or more" in found.text
