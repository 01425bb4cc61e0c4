"""Predictions: by hand where that can be done, consistent everywhere, and quick."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from each import each
from narrowcast_research.validation import lab

import narrowcast as nc
from narrowcast.predict import cluster, zoo
from narrowcast.predict.advice import GradientError, advise, gradient_error, gradients
from narrowcast.predict.cluster import Cluster, CodecSpeed, Device, Level, Overlap
from narrowcast.predict.costs import Costs
from narrowcast.predict.model import Profile, TensorTime
from narrowcast.predict.parallelism import MODES
from narrowcast.predict.step import BANDWIDTHS, Setup, StepPredictor
from narrowcast.predict.sweep import Sweep

SLOW = Cluster("slow", (Level("link", 0, 0.1, 100.0),), Device("cpu", memory_gbyte=10.0, launch_us=0.0))
FAST = Cluster("fast", (Level("link", 0, 1000.0, 1.0),), Device("cpu", memory_gbyte=10.0, launch_us=0.0))
SLOW, FAST = (replace(one, measured=True, busy=0.0) for one in (SLOW, FAST))
PROFILE = Profile("m", 8, 0.1, 0.2, 0.05, (TensorTime("b", 1_000_000, 0.1), TensorTime("a", 1_000_000, 0.2)))
WIRES = ("fp32", "bf16", "int8/256", "int4/128")


def sweep(made: Cluster = SLOW, profile: Profile = PROFILE, **options: object) -> Sweep:
    return Sweep(profile, made, **options)  # type: ignore[arg-type]


def test_the_backends_own_sum_takes_buckets_whole_and_ours_sends_small_tensors_apart() -> None:
    small = replace(PROFILE, tensors=(*PROFILE.tensors, TensorTime("bias", 100, 0.2)))
    steps = sweep(profile=small).steps
    for algorithm, found in (("native", [(1_000_000, "bf16"), (1_000_100, "bf16")]), ("two_shot", None)):
        calls = [(call.values, call.wire) for call in steps.plan(Setup(2, "bf16", algorithm))[0]]
        assert calls == (found or [(1_000_000, "bf16"), (1_000_000, "bf16"), (100, "fp32")])


def test_a_step_by_hand() -> None:
    """Two buckets of 4 MB on 2 ranks at 0.1 Gb/s: 0.32 s each, the first from 0.2 s on: done at 0.84; update 0.05."""
    made = sweep().steps.predict(Setup(2, "fp32"))
    copies = 4 * 8e6 / 10e9
    # bucket copies: in before each call (the first one's is exposed), out at the end
    assert made.step == pytest.approx(0.2 + 2 * 0.32 + 4e-4 + 0.05 + copies / 4 + copies / 2, rel=1e-6)
    assert made.bytes_sent == 8e6
    assert made.bottleneck == "link"


@pytest.mark.parametrize("world", [2, 8, 64, 4096])
@pytest.mark.parametrize("wire", WIRES)
def test_predictions_are_consistent(world: int, wire: str) -> None:
    made = sweep(cluster.load("p3.16xlarge")).cell(Setup(world, wire))
    assert made.low <= made.step <= made.high
    assert made.over_16bit_low <= made.over_16bit <= made.over_16bit_high
    assert made.max_bound <= made.step <= made.sum_bound
    assert made.compute <= made.step
    assert made.speedup <= world
    json.dumps(made.as_dict(), allow_nan=False)


def worlds(place: Cluster, *counts: int) -> list[int]:
    """Those that the cluster joins."""
    most = math.prod(level.ranks for level in place.levels)
    return [world for world in counts if not most or world <= most]


@pytest.mark.parametrize("name", cluster.presets())
def test_a_step_never_gets_shorter_with_more_workers(name: str) -> None:
    place = cluster.load(name)
    flat = [(wire, way) for wire in ("fp32", "int8/256") for way in ("two_shot", "one_shot", "ring", "tree", "auto")]
    nodes = [(wire, "hierarchical") for wire in ("fp32", "int8/256")] * (len(place.levels) > 1)
    for model in (zoo.resnet50(), zoo.gpt2()):
        made = StepPredictor(model.profile(place.device.flops, place.device.memory_gbyte), Costs(place, draws=0))
        for wire, way in (*flat, *nodes, ("fp32", "native"), ("bf16", "native")):
            uneven = () if way == "tree" else (3, 6, 9, 12, 17, 24)
            taken = worlds(place, *sorted((1, 2, 4, 8, 16, 32, 64, 512, 4096, *uneven)))
            steps = [float(made.steps(Setup(world, wire, way))[0]) for world in taken]
            # 1 + 1/P of a tensor are encoded: a little less on more ranks
            assert all(more >= 0.999 * less for less, more in pairwise(steps)), (model.name, wire, way, steps)


EXACT = 1 + 1e-9


@pytest.mark.parametrize("mode", MODES)
@each("name", cluster.presets())
def test_bounds_bracket_the_step_on_every_preset(name: str, mode: str) -> None:
    place = cluster.load(name)
    if mode == "hsdp" and place.node == 1:
        pytest.skip("hsdp shards inside nodes")
    with_blocks = mode in ("tensor", "expert")
    for model in (zoo.bert_base(), zoo.gpt2()) if with_blocks else (zoo.alexnet(), zoo.resnet50(), zoo.gpt2()):
        profile = model.profile(place.device.flops, place.device.memory_gbyte)
        made = sweep(place, profile, mode=mode, description=model, draws=0).steps
        for world in worlds(place, 1, 2, 8, 16, 64):
            for wire in ("fp32", "int8/256"):
                one = made.predict(Setup(world, wire))
                assert one.max_bound <= one.step * EXACT, one
                assert one.step <= one.sum_bound * EXACT, one
                # whatever hides, the link and the device have their work to do
                assert one.step * EXACT >= max(one.communication, profile.forward + profile.backward), one


@pytest.mark.parametrize("row", lab.read(lab.SHIPPED), ids=lambda row: f"{row['hosts']}-{row['rate']}-{row['model']}")
def test_bounds_bracket_the_step_on_measured_clusters(row: dict[str, Any]) -> None:
    place = cluster.load(lab.SHIPPED / f"cluster-{row['hosts']}-{row['rate']}.toml")
    for mode in ("data", "fsdp"):
        made = sweep(place, lab._profile(row, lab.SHIPPED), mode=mode, draws=0).steps
        for wire in (*WIRES, "int4/128+ef"):
            for setup in (Setup(2, wire), Setup(16, wire), Setup(4, wire, overlap=False)):
                one = made.predict(setup)
                assert one.max_bound <= one.step * EXACT, one
                assert one.step <= one.sum_bound * EXACT, one


def test_the_bubble_of_a_pipeline_is_not_communication() -> None:
    """4 stages, 16 micro-batches of 0.3 s in all: 3 of them each stage waits, on a link that is free."""
    profile = replace(PROFILE, activations=100_000)
    free, slow = (sweep(place, profile, mode="pipeline").cell(Setup(4, "fp32")) for place in (FAST, SLOW))
    assert free.bubble == slow.bubble == pytest.approx(3 * 0.3 / 16)
    assert free.exposed < 0.02 * profile.compute < slow.exposed
    assert (free.bottleneck, slow.bottleneck) == ("bubble", "link")
    assert free.hide_gbit is not None


def test_fewer_bits_are_faster_on_a_slow_link_and_never_on_a_free_one() -> None:
    slow = [sweep().cell(Setup(4, wire)).step for wire in WIRES]
    assert slow == sorted(slow, reverse=True)
    fast = [sweep(FAST).cell(Setup(4, wire)).step for wire in WIRES]
    assert fast[0] == min(fast)


def test_one_worker_neither_sends_nor_gains() -> None:
    made = sweep().cell(Setup(1, "int4/128"))
    assert (made.step, made.speedup, made.bytes_sent, made.over_fp32) == (PROFILE.compute, 1.0, 0.0, 1.0)


def test_the_break_even_bandwidth_is_where_the_wire_stops_to_win() -> None:
    made = sweep()
    limit = made.cell(Setup(4, "int8/256")).break_even_gbit
    assert limit is not None
    below, above = (sweep(SLOW.with_bandwidth(limit * factor)) for factor in (0.8, 1.5))
    assert below.cell(Setup(4, "int8/256")).over_16bit > 1.01
    assert above.cell(Setup(4, "int8/256")).over_16bit < 1.01


def test_another_bandwidth_is_what_break_even_takes_it_for() -> None:
    """On a measured cluster, with its tables: --bandwidth and the bandwidths that are tried agree."""
    place = cluster.load(lab.SHIPPED / "cluster-4-1gbit.toml")
    tuned = sweep(place)
    for wire in (*WIRES, "int4/128+ef"):
        now = sweep(place.with_bandwidth(place.levels[-1].bandwidth_gbit)).cell(Setup(4, wire))
        assert now.over_16bit == tuned.cell(Setup(4, wire)).over_16bit
        for at in (20, 60, 100):
            there = sweep(place.with_bandwidth(float(BANDWIDTHS[at])), draws=0).cell(Setup(4, wire)).step
            assert there == pytest.approx(float(tuned.tuned_steps(Setup(4, wire))[at]), rel=1e-9)


def test_the_bandwidth_that_hides_communication_does() -> None:
    made = sweep()
    enough = made.cell(Setup(4, "int4/128")).hide_gbit
    assert enough is not None
    assert sweep(SLOW.with_bandwidth(1.05 * enough)).cell(Setup(4, "int4/128")).exposed <= 0.021 * PROFILE.compute
    assert sweep(SLOW.with_bandwidth(0.5 * enough)).cell(Setup(4, "int4/128")).exposed > 0.02 * PROFILE.compute


def test_ranks_that_share_processors_are_slower_unless_the_profile_has_seen_it() -> None:
    shared = replace(FAST, overlap=Overlap(together=2.0))
    alone, seen = (
        StepPredictor(replace(PROFILE, ranks=ranks), Costs(shared)).predict(Setup(4, "fp32")) for ranks in (1, 4)
    )
    assert alone.compute == 2 * seen.compute == 2 * PROFILE.compute


def test_a_wire_may_slow_compute_down_more_than_others() -> None:
    speed = CodecSpeed("int8/256", ((1e6, 1e-4),), ((1e6, 1e-4),), compute=3.0, collective=2.0)
    place = replace(SLOW, codecs=(speed,), overlap=Overlap(1.5, 1.25))
    assert (place.slowdowns("int8/256+sr").compute, place.slowdowns("int8/256").collective) == (3.0, 2.0)
    assert place.slowdowns("fp32") == place.slowdowns("int4/128") == place.overlap
    mild = replace(place, codecs=(replace(speed, compute=0.0),))
    steps = [sweep(one).cell(Setup(2, "int8/256")).step for one in (place, mild)]
    assert steps[0] > steps[1]
    on_gpu = replace(place, device=replace(place.device, name="NVIDIA H200"))
    assert on_gpu.slowdowns("int8/256") == place.overlap


def test_a_codec_on_the_compute_stream_holds_compute_up() -> None:
    one = sweep(replace(FAST, device=replace(FAST.device, codec_stream="compute"))).cell(Setup(2, "int8/256"))
    assert one.step > sweep(FAST).cell(Setup(2, "int8/256")).step
    assert one.step >= PROFILE.compute + one.codec


def test_a_queue_for_each_level_is_never_slower() -> None:
    made = sweep(cluster.load("p3.8xlarge"), zoo.vgg19().profile(8.9e12))
    one, levels = (made.cell(Setup(16, "int8/256", queues=queues)).step for queues in ("one", "levels"))
    assert levels < one


def test_roundings_are_those_of_the_algorithms() -> None:
    found = {
        name: sweep().cell(Setup(8, "int8/256", name)).roundings for name in ("two_shot", "one_shot", "ring", "tree")
    }
    assert found == {"two_shot": 2, "one_shot": 1, "ring": 8, "tree": 4}
    assert sweep().cell(Setup(8, "fp32")).roundings == 0
    assert sweep(mode="fsdp").cell(Setup(8, "int8/256")).roundings == 1


def test_dollars() -> None:
    priced = replace(SLOW, price_per_hour=36.0)
    made = sweep(priced, samples=1600).cell(Setup(2, "fp32"))
    assert made.dollars_per_epoch == pytest.approx(2 * 36.0 * 100 * made.step / 3600)


@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_share_the_work_predicts(mode: str) -> None:
    model = (zoo.gpt2 if mode in ("tensor", "expert") else zoo.alexnet)()
    place = cluster.load("p3.8xlarge")
    made = sweep(place, model.profile(place.device.flops, place.device.memory_gbyte), mode=mode, description=model)
    for world in (1, 4, 8):
        cells = [made.cell(Setup(world, wire)) for wire in WIRES]
        assert all(cell.low <= cell.step <= cell.high for cell in cells)
        # FSDP and split layers share the update, too
        assert all(cell.speedup <= world * 1.01 for cell in cells)
        assert cells[3].bytes_sent <= cells[2].bytes_sent <= cells[1].bytes_sent


def test_fsdp_sends_three_collectives() -> None:
    model = sweep(SLOW, mode="fsdp")
    made = model.cell(Setup(4, "fp32"))
    # parameters as bf16 twice, gradients as float32 once
    assert made.bytes_sent == pytest.approx(0.75 * 2e6 * (2 * 2 + 4))


def test_a_profile_knows_no_layers() -> None:
    with pytest.raises(ValueError, match="a profile does not know them"):
        sweep(SLOW, mode="hybrid")
    with pytest.raises(ValueError, match="take data, fsdp"):
        sweep(SLOW, mode="sideways")


def test_a_single_prediction_and_a_sweep_are_quick_enough() -> None:
    """A cell may take 50 ms, 10 000 of them a minute: here is room for a machine ten times slower."""
    place, model = cluster.load("p3.16xlarge"), zoo.bert_large()
    made = sweep(place, model.profile(place.device.flops, place.device.memory_gbyte))
    start = time.process_time()
    cells = list(made.cells([2**k for k in range(13)], WIRES))
    assert len(cells) == 52
    assert (time.process_time() - start) / len(cells) < 0.05


# ---- advice ----------------------------------------------------------------------------------------------------------


def test_advice_on_a_slow_a_fast_and_an_unknown_link() -> None:
    assert advise(sweep(), 4).verdict == "compress"
    assert advise(sweep(FAST), 4).verdict == "leave-off"
    vague = replace(SLOW, levels=(Level("link", 0, 2.0, 100.0, spread=1.5),))
    found = advise(sweep(vague, replace(PROFILE, spread=0.4)), 2)
    assert (found.verdict, "measure first" in found.text) == ("cannot-tell", True)


def test_advice_names_wire_gain_break_even_and_risk() -> None:
    error = GradientError("int4/128+ef", 28.0, 0.001, "a", 20.0)
    text = advise(sweep(), 16, errors=[error]).text
    for part in ("use `int4/128+ef`, two_shot", "over 16 bits", "at 16 workers", "Gb/s it pays", "risk low", "28 dB"):
        assert part in text


def test_a_wire_with_a_high_risk_is_not_chosen() -> None:
    risky = GradientError("int4/128+ef", 3.0, 2.0, "a", 1.0)
    assert risky.risk == "moderate", "error feedback takes a step off"
    bad = replace(risky, wire="int4/128")
    assert bad.risk == "high"
    found = advise(sweep(), 4, wires=("int8/256", "int4/128"), errors=[bad])
    assert found.wire == "int8/256"
    assert "not considered" in found.text


def test_the_gradient_error_is_that_of_the_codec() -> None:
    module = torch.nn.Linear(300, 200)
    first, second = (gradients(module, torch.randn(4, 300)) for _ in range(2))
    assert all(p.grad is None for p in module.parameters())
    found = gradient_error("int8/256", first, second)
    gradient = first["weight"].flatten()
    assert found.snr_db == pytest.approx(nc.error_report(gradient, "int8/256").snr_db - 10 * math.log10(2), abs=1e-3)
    assert found.worst == "weight"
    assert gradient_error("int2/64", first, second).snr_db < found.snr_db


def test_advice_needs_two_workers() -> None:
    with pytest.raises(ValueError, match="begins with two"):
        advise(sweep(), 1)
