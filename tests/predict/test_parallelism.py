"""FSDP by units, HSDP, tensor and expert parallelism, stragglers and memory: by hand."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
import torch

from narrowcast.predict import cluster, costs, model, parallelism, sharded, sweep, zoo
from narrowcast.predict.cluster import Cluster, Device, Level
from narrowcast.predict.model import Profile, TensorTime
from narrowcast.predict.step import Setup, slowest_of
from narrowcast.predict.sweep import Sweep

FREE = Device("H100", memory_gbyte=1e9, launch_us=0.0)
NODES = Cluster("nodes", (Level("inside", 4, 80.0, 0.0), Level("between", 0, 8.0, 0.0)), FREE)
BLOCKS = tuple(TensorTime(f"layers.{3 - i}.weight", 10**6, 0.01 * (i + 1)) for i in range(4))
PROFILE = Profile("blocks", 4, 0.02, 0.04, 0.0, BLOCKS, activations=1000)


def step(mode: str, wire: str = "fp32", world: int = 8, place: Cluster = NODES, profile: Profile = PROFILE) -> float:
    return Sweep(profile, place, draws=0, mode=mode).cell(Setup(world, wire)).step


def test_units_are_numbered_blocks_and_the_rest_is_the_roots() -> None:
    tensors = (TensorTime("head.weight", 5, 0.1), *BLOCKS, TensorTime("embed.weight", 7, 0.9))
    assert [unit.values for unit in sharded.units_of(tensors)] == [*[10**6] * 4, 12]
    assert [sharded.block_of(name) for name in ("h.0.mlp.1.bias", "layers.10.w", "linear3.0", "w")] == [
        *("h.0", "layers.10", "", "")
    ]


def test_one_unit_comes_while_the_one_before_computes() -> None:
    """Gathers of 2 s, work of 3 s, scatters of 1 s, 3 units: the first gather stands alone, and the last scatter."""

    def rows(value: float) -> torch.Tensor:
        return torch.full((1, 3), value, dtype=torch.float64)

    start = torch.zeros(1, dtype=torch.float64)
    assert float(sharded._one_ahead(start, rows(2), rows(3), rows(0))) == 2 + 3 * 3
    assert float(sharded._one_ahead(start, rows(2), rows(3), rows(1))) == 2 + 3 * 3 + 1
    # where the link is slower each unit waits for its gather, which waits for the scatter before
    assert float(sharded._one_ahead(start, rows(5), rows(3), rows(0))) == 3 * 5 + 3


def test_fsdp_waits_for_the_first_unit_and_the_last_gradients() -> None:
    """1 M values as bf16 forward and backward, and a gradient in float32, over 8 Gb/s between nodes."""
    gather, scatter = 7 / 8 * 2e6 / 1e9, 7 / 8 * 4e6 / 1e9
    assert step("fsdp") == pytest.approx(0.06 + 2 * gather + scatter, rel=1e-3)


def test_hsdp_sends_gradients_alone_between_nodes() -> None:
    """Parameters stay on links of 10 GB/s; a unit's gradient goes between two nodes as 2(N-1)/N = 1 of its bytes."""
    fast = replace(NODES, levels=(Level("inside", 4, 8e6, 0.0), NODES.levels[1]))
    assert step("hsdp", place=fast) == pytest.approx(0.06 + 4e6 / 1e9, rel=1e-3)
    assert step("hsdp", "bf16", place=fast) == pytest.approx(0.06 + 2e6 / 1e9, rel=1e-3)
    with pytest.raises(ValueError, match="has one device a node"):
        step("hsdp", place=cluster.load("10gbe-tcp"))


def test_tensor_parallelism_adds_activations_four_times_a_block() -> None:
    """4 blocks, 1000 values a sample, 4 samples a worker of 4: 16 sums of 16,000 float32 inside a node, not hidden."""
    sent = 2 * 3 / 4 * 64000 / 10e9
    assert step("tensor", world=4) == pytest.approx(0.06 + 16 * sent, rel=1e-3)


def test_expert_parallelism_moves_samples_and_adds_up_what_is_no_expert() -> None:
    """All four tensors are experts: 16 exchanges of a rank's own 4,000 values."""
    assert step("expert", world=4) == pytest.approx(0.06 + 16 * 3 / 4 * 16000 / 10e9, rel=1e-3)
    more = replace(PROFILE, tensors=(*BLOCKS, TensorTime("head", 10**6 + 1, 0.04)))
    assert step("expert", world=4, profile=more) > step("expert", world=4)


def test_models_without_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="no blocks with known activations"):
        step("tensor", profile=replace(PROFILE, activations=0))


@pytest.mark.parametrize("world", [2, 16, 1024])
def test_the_slowest_of_many_is_the_expected_maximum(world: int) -> None:
    draw = random.Random(0)
    maxima = [max(draw.gauss(1.0, 0.1) for _ in range(world)) for _ in range(400)]
    assert slowest_of(world, 0.1) == pytest.approx(statistics.mean(maxima), rel=0.015)
    jumpy = replace(PROFILE, jitter=0.1)
    assert step("data", world=world, place=replace(NODES, levels=(NODES.levels[0], Level("b", 0, 8e9, 0.0)))) < step(
        "data", world=world, place=NODES, profile=jumpy
    )


def test_memory_by_hand() -> None:
    n = 4 * 10**6
    plain = sweep.needed(PROFILE, Setup(1, "fp32"), "data", 1)
    assert plain.total == 16 * n
    ddp = sweep.needed(PROFILE, Setup(8, "int8/256+ef"), "data", 4)
    assert (ddp.residuals, ddp.parameters) == (4 * n * (1 + 1 / 8), 4 * n)
    assert ddp.buffers > 4 * n
    fsdp, hsdp = (sweep.needed(PROFILE, Setup(8, "fp32"), mode, 4) for mode in ("fsdp", "hsdp"))
    assert (fsdp.optimizer, hsdp.optimizer) == (8 * n / 8, 8 * n / 4)
    assert fsdp.buffers == 4 * 3 * 10**6


def test_what_is_split_over_ranks_is_held_in_parts_and_has_no_buckets() -> None:
    """Of 10 million values 6 are a convolution's; a sample hands 100 values on."""
    tensors = (TensorTime("linear1.weight", 4 * 10**6, 0.01), TensorTime("conv1.weight", 6 * 10**6, 0.02))
    made = replace(PROFILE, tensors=tensors, batch=8, activations=100)
    got = {mode: sweep.needed(made, Setup(4, "int8/256"), mode, 1) for mode in parallelism.MODES}
    held = {mode: one.parameters / 4e6 for mode, one in got.items()}
    assert {held[mode] for mode in ("model", "tensor", "pipeline", "fsdp")} == {10 / 4}
    assert (held["hybrid"], held["data"]) == (6 + 4 / 4, 10)
    wires = {"model": 8 * 100, "tensor": 4 * 8 * 100, "pipeline": 8 * 100 // 4}
    for mode, values in wires.items():
        assert got[mode].buffers == sweep.WIRES * model.wire_sizes("int8/256", (values,))[0]
    bucket = sweep.WIRES * model.wire_sizes("int8/256", (6 * 10**6,))[0]
    assert got["hybrid"].buffers == 4 * 6 * 10**6 + bucket


def test_sums_between_nodes_are_a_whole_nodes() -> None:
    made = costs.between_nodes("two_shot", NODES, 8)
    assert [(stage.level, stage.sent, stage.own) for stage in made.stages] == [(1, 1.0, 0.25)]
    assert made.codec_share == 0.25
    assert zoo.gpt2().numel > 0
