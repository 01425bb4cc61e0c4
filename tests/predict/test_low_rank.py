"""Low rank is predicted from the shapes of a model: its calls, its bytes and its products, and nothing without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import narrowcast as nc
from narrowcast.codecs import Matrix
from narrowcast.predict import cluster, low_rank, model, zoo
from narrowcast.predict.advice import advise, gradient_error
from narrowcast.predict.cluster import Cluster, CodecSpeed, Device, Level
from narrowcast.predict.costs import Costs
from narrowcast.predict.model import Profile, TensorTime
from narrowcast.predict.parallelism import MODES
from narrowcast.predict.step import Setup
from narrowcast.predict.sweep import Sweep
from narrowcast.toml_file import parse_toml

SLOW = Cluster("slow", (Level("link", 0, 0.1, 100.0),), Device("cpu", memory_gbyte=10.0, launch_us=0.0))
WIRES = ("bf16+rank4+ef", "int8/256+rank4", "fp32+acp4+ef")
NET = Profile(
    *("net", 8, 0.1, 0.2, 0.05),
    tensors=(
        TensorTime("3.bias", 100, 0.01, (100,)),
        TensorTime("3.weight", 409_600, 0.05, (100, 4096)),
        TensorTime("2.weight", 16_384, 0.06, (4096, 4)),
        TensorTime("2.scale", 8_000_000, 0.06, (8_000_000,)),
        TensorTime("1.weight", 9_437_184, 0.2, (1024, 1024, 3, 3)),
    ),
)
"""A small tensor, a matrix, one that is too thin, a long vector and a convolution, in three buckets."""


def calls_of(wire: str, profile: Profile = NET) -> list[tuple[int, float, str, tuple[Matrix, ...]]]:
    planned = Sweep(profile, SLOW, draws=0).steps.plan(Setup(2, wire, min_values=1000))[0]
    return [(call.values, call.ready, call.wire, call.matrices) for call in planned]


def test_calls_are_those_of_ddp() -> None:
    matrices = Matrix(100, 4096), Matrix(1024, 9216)
    assert calls_of("bf16+rank4+ef") == [
        (100, 0.05, "fp32", ()),
        (8_016_384, 0.06, "bf16+ef", ()),
        (9_846_784, 0.2, "bf16+rank4+ef", matrices),
    ]


def test_factors_that_have_enough_bytes_wait_for_no_others() -> None:
    """2 x 64 vectors of 4096 values in float32 are 2 MiB."""
    wide = replace(NET, tensors=(replace(NET.tensors[1], numel=1 << 24, shape=(4096, 4096)), *NET.tensors[2:]))
    for rank, ready in ((64, [0.05, 0.06, 0.2]), (63, [0.06, 0.2])):
        assert [call[1] for call in calls_of(f"fp32+rank{rank}+ef", wide)] == ready


def test_bytes_by_hand() -> None:
    """On two ranks each sends what it has once: 4 values for each row and column, and the rest as it is."""
    rows, columns = 100 + 1024, 4096 + 9216
    steps = Sweep(NET, SLOW, draws=0).steps
    rest = 4 * 100 + 2 * 8_016_384
    assert steps.predict(Setup(2, "bf16+rank4+ef", min_values=1000)).bytes_sent == 2 * 4 * (rows + columns) + rest
    alternating = steps.predict(Setup(2, "fp32+acp4+ef", min_values=1000)).bytes_sent
    assert alternating == 4 * 4 * (rows + columns) / 2 + 4 * 100 + 4 * 8_016_384


def test_products_by_hand() -> None:
    """10 GB/s, 12.5 Gflop/s and launches for nothing: two products read 8 bytes a value, the end moves 16."""
    matrix, made = Matrix(1000, 500), Costs(SLOW, draws=0)
    seconds = low_rank.product_seconds(made, "bf16+rank4+ef", [matrix])
    assert float(seconds[0]) == pytest.approx(5e5 * (2 * 8 + 16) / 10e9 + 5e5 * 3 * 8 / 12.5e9)
    one = low_rank.product_seconds(made, "bf16+acp4", [matrix])
    assert float(one[0]) == pytest.approx(5e5 * (4 + 4) / 10e9 + 5e5 * 2 * 8 / 12.5e9)
    launching = Costs(replace(SLOW, device=replace(SLOW.device, launch_us=1.0)), draws=0)
    # 2^10 and 2^9 values in a vector: 8 + 4 x (8 + 20) and 8 + 4 x (8 + 18) kernels, and 16 around products
    more = low_rank.product_seconds(launching, "bf16+rank4+ef", [matrix]) - seconds
    assert float(more[0]) == pytest.approx(1e-6 * (120 + 112 + 16))


def test_what_probe_has_timed_is_taken() -> None:
    speed = CodecSpeed("fp32+rank4+ef", ((1e3, 0.25), (1e6, 0.25)), ((1e3, 0.5), (1e6, 0.5)), busy=2.0)
    made = Costs(replace(SLOW, codecs=(speed,)), draws=0)
    matrices = [Matrix(100, 100)] * 3
    for wire in ("fp32+rank4+ef", "int8/256+rank4+ef"):
        assert float(low_rank.product_seconds(made, wire, matrices)[0]) == pytest.approx(3 * 2 * 0.75)
    # another rank, another way or no residual are other products
    for wire in ("fp32+rank2+ef", "fp32+acp4+ef", "fp32+rank4"):
        assert float(low_rank.product_seconds(made, wire, matrices)[0]) < 0.01


def test_on_a_gpu_a_call_of_several_matrices_launches_what_they_share_once() -> None:
    points = ((1e3, 1.0), (1e5, 1.25))
    device = replace(SLOW.device, name="NVIDIA H200", launch_us=1000.0)
    cluster = replace(SLOW, device=device, codecs=(CodecSpeed("fp32+rank4+ef", points, points),))
    large, small = Matrix(250, 400), Matrix(10, 10)

    def seconds(*matrices: Matrix) -> float:
        return float(low_rank.product_seconds(Costs(cluster, draws=0), "bf16+rank4+ef", matrices)[0])

    assert seconds(small) == pytest.approx(2.0)
    assert seconds(large) == pytest.approx(2.5)
    # two products of two launches each and ten to finish, of a millisecond
    assert seconds(large, small, large) == pytest.approx(2.0 + 2 * 0.5 + 2 * 14e-3)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", zoo.MODELS)
def test_built_in_models_have_shapes(name: str, wire: str) -> None:
    place = cluster.load("10gbe-tcp")
    made = zoo.MODELS[name]()
    assert all(len(layer.shapes) == len(layer.tensors) for layer in made.layers)
    sweep = Sweep(made.profile(place.device.flops, place.device.memory_gbyte), place, draws=4)
    cells = [sweep.cell(Setup(world, wire)) for world in (2, 16)]
    plain = sweep.steps.predict(Setup(16, "bf16", "two_shot"))
    for cell in cells:
        assert cell.low <= cell.step <= cell.high
        assert cell.max_bound <= cell.step * (1 + 1e-9)
        assert cell.step <= cell.sum_bound * (1 + 1e-9)
        assert cell.bytes_sent < plain.bytes_sent
    assert cells[0].step <= cells[1].step


def test_a_profile_without_shapes_still_loads_and_says_what_to_do() -> None:
    text = model.dump(replace(NET, tensors=tuple(replace(t, shape=()) for t in NET.tensors)))
    found = model.read_profile(parse_toml(text))
    assert Sweep(found, SLOW, draws=0).steps.predict(Setup(2, "int8/256")).bytes_sent > 0
    with pytest.raises(ValueError, match=r"has none of 3\.weight; profile it again with `narrowcast profile`"):
        calls_of("bf16+rank4+ef", found)
    assert model.read_profile(parse_toml(model.dump(NET))) == NET


def test_fsdp_sums_the_factors_of_each_unit() -> None:
    """Parameters in bf16 twice, the rest of the gradients by half, on two ranks; factors once."""
    steps = Sweep(NET, SLOW, draws=0, mode="fsdp").steps
    rows, columns, values = 100 + 1024, 4096 + 9216, sum(t.numel for t in NET.tensors)
    made = steps.predict(Setup(2, "bf16+rank4+ef", min_values=1000))
    assert made.bytes_sent == 2 * values + 2 * 4 * (rows + columns) + (4 * 100 + 2 * 8_016_384) / 2
    assert made.max_bound <= made.step <= made.sum_bound
    assert made.step < steps.predict(Setup(2, "bf16")).step


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("data", "fsdp")])
def test_ways_to_share_the_work_without_such_sums_refuse_it(mode: str) -> None:
    place, made = cluster.load("8xH100"), zoo.gpt2()
    sweep = Sweep(made.profile_of(0.1), place, draws=0, mode=mode, description=made)
    with pytest.raises(
        ValueError, match="low rank is for 1-D" if mode == "hsdp" else "low rank is for gradients, and here"
    ):
        sweep.cell(Setup(2, "bf16+rank4+ef"))


def test_advice_looks_at_what_a_low_rank_leaves_out() -> None:
    draw = torch.Generator().manual_seed(0)
    thin = torch.randn(200, 2, generator=draw) @ torch.randn(2, 300, generator=draw)
    noise = torch.randn(200, 300, generator=draw)
    for gradient, wanted in ((thin, ("low", "low")), (noise, ("moderate", "high"))):
        pair = {"w": gradient}, {"w": gradient + noise}
        risks = tuple(gradient_error(wire, *pair).risk for wire in ("bf16+rank4+ef", "bf16+rank4"))
        assert risks == wanted
    exact = gradient_error("fp32+rank4", {"w": noise}, {"w": -noise})
    # of 200 directions that are as large as each other, about, four are sent
    assert 0.05 < exact.snr_db < 0.5
    vector = gradient_error("int8/256+rank4", {"w": noise.flatten()}, {"w": -noise.flatten()})
    assert vector.worst_db == pytest.approx(nc.error_report(noise.flatten(), "int8/256").snr_db)


def test_advice_proposes_it_on_a_slow_link() -> None:
    matrices = replace(NET, tensors=tuple(t for t in NET.tensors if t.name != "2.scale"))
    made = advise(Sweep(matrices, SLOW), 4, ("int4/128+ef", "bf16+rank4+ef"))
    assert (made.verdict, made.wire) == ("compress", "bf16+rank4+ef")
