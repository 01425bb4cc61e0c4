"""Bytes, steps and seconds of every algorithm: against the collectives themselves, and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from dist.algorithms import takes

import narrowcast as nc
from narrowcast.collectives.algorithms import record
from narrowcast.collectives.algorithms.record import ALGORITHMS, Setting
from narrowcast.collectives.segments import Coder
from narrowcast.predict import cluster, codec_systems, costs, curves, speeds
from narrowcast.predict.cluster import Cluster, CodecSpeed, CollectiveTimings, Device, Level
from narrowcast.predict.costs import Costs, plan
from narrowcast.predict.curves import Curve

FLAT = Cluster("flat", (Level("link", 0, 8.0, 100.0),), Device("cpu", memory_gbyte=10.0, launch_us=0.0))
"""1 GB/s and 100 us."""
NODES = Cluster(
    "nodes", (Level("inside", 4, 80.0, 10.0), Level("between", 0, 8.0, 100.0)), Device(memory_gbyte=10.0, launch_us=0.0)
)


def sizes(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_curve_goes_through_its_points_and_on_at_the_last_slope() -> None:
    made = Curve(sizes(10, 100, 1000), torch.tensor([[1.0, 2.0, 11.0]], dtype=torch.float64))
    assert made(sizes(10, 100, 1000))[0].tolist() == pytest.approx([1.0, 2.0, 11.0])
    assert made(sizes(1))[0].tolist() == [1.0]
    assert float(made(sizes(2000))[0]) == pytest.approx(11.0 + 0.01 * 1000)
    assert float(made(sizes(math.sqrt(10 * 100)))[0]) == pytest.approx(math.sqrt(2.0))


def test_the_first_version_is_the_mean_and_the_others_are_drawn_from_the_timings() -> None:
    made = curves.draw_means([1.0, 2.0, 3.0, 100.0], 200, torch.Generator().manual_seed(0))
    assert float(made[0]) == 2.0, "a timing that is far out does not count"
    assert float(made[1:].min()) >= 1.0
    assert float(made[1:].max()) <= 3.0
    assert 1.8 < float(made[1:].mean()) < 2.2


def test_versions_are_the_same_every_time() -> None:
    one, two = (Costs(replace(FLAT, levels=(replace(FLAT.levels[0], spread=0.3),))) for _ in range(2))
    assert torch.equal(one.levels[0].factor_D, two.levels[0].factor_D)


SENT = {
    "native": lambda world: 2 * (world - 1) / world,
    "two_shot": lambda world: 2 * (world - 1) / world,
    "ring": lambda world: 2 * (world - 1) / world,
    "tree": lambda world: 2 * (world - 1) / world,
    "one_shot": lambda world: world - 1,
    "shared_scale": lambda world: 2 * (world - 1) / world,
}
"""As the docstrings of the collectives state it; tests/dist counts the same bytes on real ranks."""


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("algorithm", SENT)
def test_bytes_a_rank_are_those_of_the_collectives(algorithm: str, world: int) -> None:
    (stage,) = costs.plan(algorithm, FLAT, world).stages
    assert stage.sent == pytest.approx(SENT[algorithm](world))


@pytest.mark.parametrize("algorithm", [name for name, one in ALGORITHMS.items() if not one.takes_nodes])
def test_the_predictor_counts_the_bytes_that_ranks_send(algorithm: str) -> None:
    """Where shards divide evenly; the backend's sums send one byte more to each peer."""
    for world in (2, 4, 8):
        spec = next(spec for spec in ("mxfp4", "int8/64", "bf16") if takes(algorithm, spec, world))
        n = 64 * world * 5
        (sent,) = set(record.sent_bytes(algorithm, Setting(Coder(nc.codec(spec), [n], torch.float32), world)))
        (stage,) = costs.plan(algorithm, FLAT, world).stages
        assert sent - stage.own * nc.codec(spec).nbytes(n) in (0, world - 1)


def test_shared_scale_rounds_once_and_adds_twice() -> None:
    """One sum for the scales, one for the integers; each value is encoded and decoded once."""
    made, native = (costs.plan(name, FLAT, 4) for name in ("shared_scale", "native"))
    assert (made.roundings, made.encodes, made.decodes) == (1, 1.0, 1.0)
    assert made.stages[0].steps == 2 * native.stages[0].steps


def test_hierarchical_sends_a_share_outside() -> None:
    made = costs.plan("hierarchical", NODES, 8)
    inside, between, back = made.stages
    assert (inside.level, between.level, back.level) == (0, 1, 0)
    assert (inside.sent, between.sent, back.sent) == (0.75, 1.0, 0.75)
    assert (inside.as_is, between.as_is, made.codec_share) == (True, False, 0.25)


def test_a_flat_exchange_between_nodes_goes_through_one_card() -> None:
    """4 ranks a node: each sends 1/8 of the tensor to each rank outside, and all of it through one card; messages do
    so twice, NCCL gathers in a ring."""
    on_cpu = replace(NODES, device=replace(NODES.device, name="cpu"))
    assert costs.plan("two_shot", on_cpu, 8).stages[0].sent == 2 * 4 * 4 / 8
    assert costs.plan("two_shot", NODES, 8).stages[0].sent == 4 * 4 / 8 + 7 / 8
    assert costs.plan("one_shot", on_cpu, 8).stages[0].sent == 4 * 4
    assert costs.plan("one_shot", NODES, 8).stages[0].sent == 7
    assert {costs.plan("two_shot", place, 8).stages[0].own for place in (on_cpu, NODES)} == {2 * 7 / 8}


@pytest.mark.parametrize("algorithm", SENT)
def test_a_flat_algorithm_takes_as_long_as_the_slower_of_its_links(algorithm: str) -> None:
    """1 M values on 2 nodes of 4, inside at 1 MB/s: what a member sends, however fast the link between nodes is."""
    crawling = replace(NODES, levels=(Level("inside", 4, 0.008, 0.0), Level("between", 0, 8e6, 100.0)))
    made, own = replace(costs.plan(algorithm, crawling, 8), otherwise=()), 4 * SENT[algorithm](8)
    seconds = Costs(crawling, draws=0).wire_seconds(made, "fp32", sizes(1e6))
    assert float(seconds) == pytest.approx(own + made.stages[0].steps * 1e-4, rel=1e-6)
    # and with the links the other way round the node's bytes through its card count
    crawling = replace(NODES, levels=(Level("inside", 4, 8e6, 0.0), Level("between", 0, 0.008, 100.0)))
    seconds = Costs(crawling, draws=0).wire_seconds(made, "fp32", sizes(1e6))
    assert float(seconds) == pytest.approx(4 * made.stages[0].sent + made.stages[0].steps * 1e-4, rel=1e-6)


def test_hierarchical_needs_two_levels_and_crosses_none_in_one_node() -> None:
    with pytest.raises(ValueError, match="hierarchical needs two levels, cluster flat has one"):
        costs.plan("hierarchical", FLAT, 4)
    assert [stage.level for stage in costs.plan("hierarchical", NODES, 4).stages] == [0, 0]


def test_inside_one_node_only_the_inner_link_counts() -> None:
    assert [stage.level for stage in costs.plan("two_shot", NODES, 4).stages] == [0]
    assert costs.resolve("auto", "int8/256", NODES, 4) == "two_shot"
    assert costs.resolve("auto", "int8/256", NODES, 8) == "hierarchical"
    assert costs.resolve("auto", "fp32", NODES, 8) == "native"


def test_seconds_by_hand() -> None:
    """1 M values as float32 on 2 ranks: 4 MB at 1 GB/s and two latencies."""
    seconds, codec = Costs(FLAT, draws=0).seconds("native", "fp32", sizes(1e6), 2)
    assert float(seconds[0, 0]) == pytest.approx(4e-3 + 2e-4)
    assert float(codec[0, 0]) == 0.0


def test_a_codec_reads_and_writes_at_the_speed_of_memory_where_nobody_measured_it() -> None:
    """int8/256: 4 + 1 + 4/256 bytes a value; on 2 ranks 1.5 encodings and 2 decodings of 1 M values, at 10 GB/s."""
    _, codec = Costs(FLAT, draws=0).seconds("two_shot", "int8/256", sizes(2**20), 2)
    assert float(codec[0, 0]) == pytest.approx(3.5 * 2**20 * (5 + 4 / 256) / 10e9, rel=1e-3)


def test_chunks_hide_the_shorter_of_codec_and_wire() -> None:
    made = Costs(FLAT, draws=0)
    plan = costs.plan("two_shot", FLAT, 2)
    values = sizes(2.0**23)
    wire, codec = made.wire_seconds(plan, "int8/256", values), made.codec_seconds(plan, "int8/256", values)
    whole, _ = made.seconds("two_shot", "int8/256", values, 2)
    assert float(whole) == pytest.approx(float(torch.maximum(wire, codec) + torch.minimum(wire, codec) / 8))


def test_a_measured_table_holds_at_its_own_ranks_and_scales_to_others() -> None:
    points = tuple((float(n), 1e-4 + n * 1.5e-9) for n in (2**12, 2**16, 2**20, 2**24))
    level = replace(FLAT.levels[0], tables=(CollectiveTimings("all_reduce", 4, points),))
    made = Costs(replace(FLAT, levels=(level,)), draws=0)
    at = made.seconds("native", "fp32", sizes(2**20 / 4), 4)[0]
    assert float(at) == pytest.approx(1e-4 + 2**20 * 1.5e-9)
    # 8 ranks send 7/6 of the bytes in 14 instead of 6 steps
    eight = float(made.seconds("native", "fp32", sizes(2**20 / 4), 8)[0])
    assert eight == pytest.approx(1e-4 + 2**20 * 1.5e-9 * 7 / 6 + 8 * 1e-4, rel=0.02)


def test_a_call_that_was_timed_whole_is_predicted_as_it_was_timed() -> None:
    fp32 = CollectiveTimings("two_shot", 2, tuple((float(n), 1e-4 + n * 1e-9) for n in (2**12, 2**18, 2**24)))
    whole = CollectiveTimings(
        "two_shot", 2, tuple((float(n), 3e-4 + n * 0.7e-9) for n in (2**12, 2**18, 2**24)), "int8/256"
    )
    level = replace(FLAT.levels[0], tables=(fp32, whole))
    made = Costs(replace(FLAT, levels=(level,)), draws=0)
    assert float(made.seconds("two_shot", "int8/256", sizes(2**16), 2)[0]) == pytest.approx(3e-4 + 2**18 * 0.7e-9)
    # another wire has no such table and is put together from its parts
    assert float(made.seconds("two_shot", "int4/128", sizes(2**16), 2)[0]) < 3.1e-4


TWO = plan("two_shot", FLAT, 2)


def test_tables_are_scaled_to_another_bandwidth_and_what_is_no_link_stays() -> None:
    """Timed at 1 GB/s: 1 ns a byte and two latencies; whole calls with int8 take 1 ms more, which is not the link's."""
    knots, eight = [2**k for k in range(12, 25)], 1 / 4 + 1 / 256
    fp32 = CollectiveTimings("two_shot", 2, tuple((float(n), 2e-4 + n * 1e-9) for n in knots))
    whole = CollectiveTimings("two_shot", 2, tuple((float(n), 12e-4 + n * eight * 1e-9) for n in knots), "int8/256")
    device = Device("cpu", memory_gbyte=1e6, launch_us=0.0)
    place = replace(FLAT, levels=(replace(FLAT.levels[0], tables=(fp32, whole)),), device=device, measured=True)

    def seconds(made: Cluster, wire: str) -> float:
        return float(Costs(made, draws=0).seconds("two_shot", wire, sizes(2**22), 2)[0])

    same, half = place.with_bandwidth(8.0), place.with_bandwidth(4.0)
    assert (same.measured, half.measured) == (False, False)
    for wire in ("fp32", "int8/256"):
        assert seconds(same, wire) == seconds(place, wire)
    assert seconds(half, "fp32") == pytest.approx(2e-4 + 2**24 * 2e-9, rel=0.01)
    assert seconds(half, "int8/256") == pytest.approx(12e-4 + 2**24 * eight * 2e-9, rel=0.01)
    assert half.with_bandwidth(8.0).levels == same.levels


def test_on_another_link_only_the_bytes_take_another_time() -> None:
    """Timed at 1 GB/s, but a call takes 3 ms of the processors as well: a hundredth of the bandwidth leaves those."""
    table = CollectiveTimings("two_shot", 2, tuple((float(n), 3e-3 + n * 1e-9) for n in [2**k for k in range(12, 25)]))
    place = replace(FLAT, levels=(replace(FLAT.levels[0], tables=(table,)),), measured=True)

    def seconds(gbit: float, values: int) -> float:
        return float(Costs(place.with_bandwidth(gbit), draws=0).wire_seconds(TWO, "fp32", sizes(values))[0])

    for values in (2**12, 2**20):
        assert seconds(0.08, values) == pytest.approx(3e-3 + 4 * values * 1e-7, rel=0.01)
        assert 0 <= seconds(8e3, values) <= 3e-3 * 1.01


def test_an_unmeasured_wire_runs_like_the_nearest_measured_one() -> None:
    speeds = tuple(
        CodecSpeed(wire, ((2.0**20, t),), ((2.0**20, t),)) for wire, t in (("int8/256", 1e-3), ("int4/128", 2e-3))
    )
    made = Costs(replace(FLAT, codecs=speeds), draws=0)
    assert float(made.codec("int3/64")[0](sizes(2.0**20))) == 2e-3
    assert float(made.codec("e4m3fn/128")[0](sizes(2.0**20))) == 1e-3


def test_unknown_algorithms_and_missing_speeds_are_errors() -> None:
    with pytest.raises(ValueError, match="unknown 'rings'; take auto"):
        costs.plan("rings", FLAT, 2)
    with pytest.raises(ValueError, match="says how fast int8/256 is"):
        Costs(replace(FLAT, device=Device()), draws=0).seconds("two_shot", "int8/256", sizes(1e6), 2)


def test_error_feedback_costs_a_decoding_and_three_passes_more() -> None:
    made = Costs(FLAT, draws=0)
    plain, owing = (made.codec(wire)[0](sizes(2.0**20)) for wire in ("int4/128", "int4/128+ef"))
    assert float(owing - plain) == pytest.approx(float(made.codec("int4/128")[1](sizes(2.0**20))) + 12 * 2**20 / 10e9)


def timed(*wires: tuple[str, float]) -> Cluster:
    """FLAT, where 2^20 values take so many seconds each way."""
    return replace(FLAT, codecs=tuple(CodecSpeed(wire, ((2.0**20, t),), ((2.0**20, t),)) for wire, t in wires))


def test_a_transform_that_nobody_timed_has_its_share_of_the_copy() -> None:
    codec = nc.codec("int4/128+rot")
    encode, decode, _ = Costs(timed(("int4/128", 1e-9)), draws=0).codec("int4/128+rot")
    copied = 2**20 * (4 + codec.bits_per_value / 8) / 10e9
    share = speeds.ON_CPU["rot"]
    assert float(encode(sizes(2.0**20))) == pytest.approx(copied / share.encode)
    assert float(decode(sizes(2.0**20))) == pytest.approx(copied / share.decode)
    on_gpu = Costs(replace(FLAT, device=replace(FLAT.device, name="H200")), draws=0)
    encode, *_ = on_gpu.codec("int4/128+rot")
    assert float(encode(sizes(2.0**20))) == pytest.approx(copied / speeds.ON_GPU["rot"].encode)


def test_a_slow_codec_of_another_wire_slows_no_float32_that_two_shot_sends() -> None:
    quick, slow = (Costs(timed(("int8/256", t)), draws=0) for t in (1e-9, 1.0))
    assert torch.equal(*(made.seconds("two_shot", "fp32", sizes(2.0**20), 4)[0] for made in (quick, slow)))


def test_a_slow_codec_slows_no_cast_and_no_baseline() -> None:
    """bf16 is cast at the speed of memory, whatever int8 takes."""
    place = cluster.load("10gbe-tcp")
    slow = codec_systems.with_codec_system(place, "grace-8bit")
    plain, same = (Costs(made, draws=0).seconds("native", "bf16", sizes(1e6), 8)[0] for made in (place, slow))
    assert torch.equal(plain, same)
    _, coded = Costs(slow, draws=0).seconds("one_shot", "int8/256", sizes(2.0**20), 8)
    system = codec_systems.codec_systems()["grace-8bit"]
    assert float(coded) == pytest.approx(2**20 * (system.encode_ns + 8 * system.decode_ns) * 1e-9)
    with pytest.raises(ValueError, match="unknown 'gracious'; take grace-8bit"):
        codec_systems.with_codec_system(place, "gracious")


def test_a_system_is_not_asked_for_codecs_that_it_does_not_have() -> None:
    """Our own speeds would answer for it, and nobody would know."""
    place = cluster.load("10gbe-tcp")
    slow, sparse = (codec_systems.with_codec_system(place, name) for name in ("grace-8bit", "grace-topk"))
    with pytest.raises(ValueError, match=r"grace-8bit: does not say how fast int4/128\+rot is; it has timed int8/256"):
        Costs(slow, draws=0).codec("int4/128+rot")
    with pytest.raises(ValueError, match=r"fp32/4096\+top41: take that, another wire with \+top, or fp32, as-is, bf16"):
        Costs(sparse, draws=0).codec("int8/256")
    for wire in ("int4/128+ef", *speeds.ALWAYS):
        Costs(slow, draws=0).codec(wire)


def test_a_transform_is_timed_like_the_same_one_and_a_plain_wire_like_none() -> None:
    made = Costs(timed(("int8/256", 1e-3), ("int4/128+rot", 2e-3), ("int2/4096+top64", 3e-3)), draws=0)
    wanted = {"int3/64+rot": 2e-3, "fp32/4096+top41": 3e-3, "int4/128": 1e-3, "ternary/512": 1e-3}
    assert {wire: float(made.codec(wire)[0](sizes(2.0**20))) for wire in wanted} == wanted


def test_a_transform_whose_speed_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"nobody has measured how fast \+haar is; `narrowcast probe --wires int4/128"):
        Costs(FLAT, draws=0).codec("int4/128+haar")
    assert float(Costs(timed(("int4/128+haar", 1.0)), draws=0).codec("int4/128+haar")[0](sizes(2.0**20))) == 1.0


@pytest.mark.parametrize("wire, more", [("int4/128+rot+sr+ef", 0.0), ("int4/128+rot", 0.0), ("int4/128+sr", 1.0)])
def test_what_happens_around_a_plain_codec_does_not_happen_around_a_transform(wire: str, more: float) -> None:
    """Whole calls with int4/128 took a second longer than their parts."""
    knots = [2**k for k in range(12, 25)]
    fp32 = CollectiveTimings("two_shot", 2, tuple((float(n), 2e-4 + n * 1e-9) for n in knots))
    whole = CollectiveTimings("two_shot", 2, tuple((float(n), 1.0 + n * 1e-9) for n in knots), "int4/128")
    with_table, without = (
        Costs(replace(FLAT, levels=(replace(FLAT.levels[0], tables=tables),)), draws=0)
        for tables in ((fp32, whole), (fp32,))
    )
    found = [float(made.seconds("two_shot", wire, sizes(2**16), 2)[0]) for made in (with_table, without)]
    assert found[0] - found[1] == pytest.approx(more, abs=0.01)


def test_the_link_of_a_preset_may_be_slow_and_is_hardly_quicker_than_its_line() -> None:
    drawn = Costs(cluster.load("10gbe-tcp")).levels[0].factor_D
    assert float(drawn.min()) == costs.QUICKEST
    assert float(drawn.max()) > 1.5
