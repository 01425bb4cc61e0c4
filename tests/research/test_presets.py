"""Presets say where their numbers come from, and the numbers do follow from there."""

from __future__ import annotations

import re
import statistics

import pytest
from narrowcast_research.validation import ddl, grace, qsgd
from narrowcast_research.validation.published import rows

from narrowcast.predict import cluster, codec_systems, zoo
from narrowcast.predict.costs import volume

PRESETS = {name: cluster.load(name) for name in cluster.presets()}


def said(name: str, pattern: str) -> list[float]:
    """The numbers that a preset's source names."""
    found = re.search(pattern, PRESETS[name].source)
    assert found is not None, PRESETS[name].source
    return [float(number) for number in found.groups()]


def test_a_device_is_as_fast_as_the_training_that_is_named() -> None:
    """Of ResNet-50, at six flops for each multiply-add."""
    checked = 0
    for name, made in PRESETS.items():
        for images in re.findall(r"([\d.]+) images/s", made.source):
            assert made.device.flops == pytest.approx(6 * zoo.resnet50().macs * float(images), rel=0.01), name
            checked += 1
    assert checked >= 12


@pytest.mark.parametrize(
    "name, link, nodes", [("10gbe-tcp", "10GbE", True), ("100gb-ib", "100GbIB", True), ("pcie3", "", False)]
)
def test_links_of_ddl_benchmarks_are_inside_what_its_runs_reach(name: str, link: str, nodes: bool) -> None:
    """Bus bandwidth of the runs without overlap: the bytes of a ring over the time beyond one GPU's."""
    reached = []
    for row in rows("ddl_benchmarks_2020.csv"):
        gpus = int(row["gpus"])
        if (
            row["method"] != ddl.GIVEN
            or not row["link"].startswith(link)
            or (gpus > int(row["gpus_per_node"])) != nodes
        ):
            continue
        beyond = float(row["iter_ms"]) / 1e3 - ddl.compute_seconds(row["dnn"])
        reached.append(volume("all_reduce", gpus) * 4 * ddl.MODELS[row["dnn"]]().numel / beyond / 1e9)
    assert said(name, r"([\d.]+) to ([\d.]+) GB/s") == pytest.approx([min(reached), max(reached)], abs=0.06)
    assert min(reached) < PRESETS[name].levels[0].bandwidth_gbit / 8 < max(reached)


def test_the_k80s_link_is_that_of_qsgds_bars() -> None:
    reached = {}
    for name, (build, batches) in qsgd.MODELS.items():
        seconds = 3600 * qsgd.hours()[name, "32bit", 16][0]
        reached[name] = volume("all_reduce", 16) * 4 * build().numel * zoo.IMAGENET / batches[-1] / seconds / 1e9
    odd = reached.pop("BN-Inception")
    found = said("p2.16xlarge", r"([\d.]+) to ([\d.]+) GB/s a rank with four networks; BN-Inception's gives ([\d.]+)")
    assert found == pytest.approx([min(reached.values()), max(reached.values()), odd], abs=0.005)
    assert min(reached.values()) < PRESETS["p2.16xlarge"].levels[0].bandwidth_gbit / 8 < max(reached.values())


@pytest.mark.parametrize("name", ["nvlink2-8xV100", "nvlink3-8xA100", "dgx-1", "p3.8xlarge", "p3.16xlarge"])
def test_nvlink_has_the_bus_bandwidth_that_is_named(name: str) -> None:
    assert PRESETS[name].levels[0].bandwidth_gbit == pytest.approx(8 * said(name, r"([\d.]+) GB/s of bus")[0], rel=0.01)


def test_ethernet_over_tcp_follows_its_words() -> None:
    gigabit = PRESETS["1gbe-tcp"].levels[0]
    payload, frame = said("1gbe-tcp", r"(\d+) of (\d+) bytes a frame")
    assert gigabit.bandwidth_gbit == pytest.approx(payload / frame, rel=0.01)
    milliseconds, steps = said("1gbe-tcp", r"([\d.]+) ms for (\d+) steps")
    assert gigabit.latency_us == pytest.approx(1e3 * milliseconds / steps)
    for name in ("25gbe-tcp", "p3.16xlarge"):
        (share,) = said(name, r"(\d+) %")
        assert PRESETS[name].levels[-1].bandwidth_gbit == pytest.approx(25 * share / 100), name


def test_a_price_has_a_source() -> None:
    for name, made in PRESETS.items():
        assert (made.price_per_hour > 0) == ("price: " in made.source), name


def test_graces_codecs_are_lines_through_its_runs() -> None:
    """ResNet-50, 32 samples a worker: what 2, 4 and 8 workers take beyond compute and bytes is E + P D."""
    rate = 32 * grace.seconds_a_byte("resnet50")
    alone = statistics.median(32 / float(r["throughput_med"]) for r in runs("none", 1))
    numel = zoo.resnet50().numel
    methods = {"8bit": "8bit", "sign": "signsgd", "onebit": "onebit", "terngrad": "terngrad", "topk": "topk"}
    for name, method in methods.items():
        own = []
        for workers in (2, 4, 8):
            taken = [r for r in runs(method, workers) if r["param"] in ("n/a", "0.01")]
            step = statistics.median(32 * workers / float(r["throughput_med"]) for r in taken)
            size = grace.bytes_a_value(taken[0])
            assert size is not None
            own.append(step - alone - rate * size * (workers - 1))
        line = statistics.linear_regression((2, 4, 8), own)
        made = codec_systems.codec_systems()[f"grace-{name}"]
        expected = [1e9 * seconds / numel for seconds in (line.intercept, line.slope)]
        assert [made.encode_ns, made.decode_ns] == pytest.approx(expected, rel=0.02), name


def runs(method: str, workers: int) -> list[dict[str, str]]:
    return [row for row in grace._runs("resnet50", "10g", workers) if row["method"] == method]
