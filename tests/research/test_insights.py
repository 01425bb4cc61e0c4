"""Each insight is supported in a world where it is true, not in one where it is false, and unknown without data."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from narrowcast_research.insights import STATEMENTS, insights
from study.report import made_up
from study.report.made_up import Line, Truth

from narrowcast.study.analysis.findings import Findings
from narrowcast.study.report.sections import Support

TRAINED = Truth(
    nets=("cnn",), wires=("fp32", "int8/256", "int4/128+ef", "onebit/64+ef"), rates=("1gbit",), workers=(4,)
)


def support(folder: Path, lines: list[Line], word: str) -> Support:
    (found,) = [i for i in insights(Findings.of(made_up.write(folder, lines))) if re.search(word, i.statement)]
    assert found.because
    return found.support


def trained(**loss: float) -> list[Line]:
    named = {"four": "int4/128+ef", "one": "onebit/64+ef"}
    truth = Truth(**{**vars(TRAINED), "loss": {named[key]: value for key, value in loss.items()}})
    return made_up.study(truth)


def step(ms: float, **axes: Any) -> Line:
    """A predicted step that takes exactly so long."""
    defaults: dict[str, Any] = {"model": "resnet50", "data": "imagenet", "wire": "fp32", "workers": 8, "cluster": "p2"}
    chosen = {**defaults, "rate_name": axes.get("cluster", "p2"), "source": "predicted", **axes}
    line = made_up.axes("time", **{key: value for key, value in chosen.items() if key != "dollars"})
    return {**line, "step_ms": ms, "interval_ms": [0.99 * ms, 1.01 * ms], "dollars_per_epoch": axes.get("dollars")}


def world(*lines: Line) -> list[Line]:
    return [made_up.session(), *lines]


def test_without_data_nothing_can_be_told(tmp_path: Path) -> None:
    found = insights(Findings.of(made_up.write(tmp_path, [made_up.session()])))
    assert len(found) == len(STATEMENTS)
    assert {insight.support for insight in found} == {Support.UNKNOWN}


def test_4_to_8_bits_keep_accuracy(tmp_path: Path) -> None:
    assert support(tmp_path, trained(), "4 to 8 bits keep") is Support.YES
    assert support(tmp_path, trained(four=4.0), "4 to 8 bits keep") is Support.NO
    assert support(tmp_path, trained(four=1.0), "4 to 8 bits keep") is Support.UNKNOWN


def test_1_or_2_bits_lose_accuracy(tmp_path: Path) -> None:
    assert support(tmp_path, trained(one=3.0), "1 or 2 bits lose") is Support.YES
    assert support(tmp_path, trained(), "1 or 2 bits lose") is Support.NO


def test_a_network_whose_trainings_failed_is_not_kept(tmp_path: Path) -> None:
    lines = trained()
    for line in lines:
        if line["kind"] == "accuracy" and line["wire"] == "int8/256":
            line |= {"status": "failed", "error": "boom"}
    assert support(tmp_path, lines, "4 to 8 bits keep") is Support.UNKNOWN


def test_a_wire_has_the_bits_of_its_codes_whatever_its_scales_take(tmp_path: Path) -> None:
    """onebit/16 has 5 bits on the wire: it is 1-bit SGD all the same."""
    truth = Truth(**{**vars(TRAINED), "wires": ("fp32", "onebit/16+ef"), "loss": {"onebit/16+ef": 3.0}})
    lines = made_up.study(truth)
    assert support(tmp_path, lines, "1 or 2 bits lose") is Support.YES
    assert support(tmp_path, lines, "4 to 8 bits keep") is Support.UNKNOWN


TRUE, FALSE = "true", "false"
WORLDS: dict[str, tuple[str, Callable[[str], list[Line]]]] = {
    "mpi helps": (
        "Over MPI",
        lambda kind: world(
            step(100, transport="mpi"), step(50 if kind == TRUE else 150, transport="mpi", wire="int8/256")
        ),
    ),
    "large networks": (
        "gain most",
        lambda kind: world(
            *(step(100, model=m) for m in ("vgg19", "resnet50")),
            step(20 if kind == TRUE else 95, model="vgg19", wire="int8/256"),
            step(80, model="resnet50", wire="int8/256"),
        ),
    ),
    "many workers": (
        "more workers",
        lambda kind: world(
            *(step(100, workers=n) for n in (2, 16)),
            step(90 if kind == TRUE else 30, workers=2, wire="int8/256"),
            step(40, workers=16, wire="int8/256"),
        ),
    ),
    "nccl shrinks": (
        "shrinks strongly",
        lambda kind: world(
            *(step(100, transport=t) for t in ("mpi", "nccl")),
            step(40, transport="mpi", wire="int8/256"),
            step(95 if kind == TRUE else 45, transport="nccl", wire="int8/256"),
        ),
    ),
    "nccl wins": (
        "often beats",
        lambda kind: world(
            step(100, transport="mpi"),
            step(50, transport="mpi", wire="int8/256"),
            step(40 if kind == TRUE else 60, transport="nccl"),
        ),
    ),
    "dgx": (
        "DGX-1",
        lambda kind: world(
            *(step(100, transport="nccl", cluster="dgx-1", model=m) for m in ("alexnet", "resnet50")),
            step(50, transport="nccl", cluster="dgx-1", model="alexnet", wire="int8/256"),
            step(97 if kind == TRUE else 50, transport="nccl", cluster="dgx-1", model="resnet50", wire="int8/256"),
        ),
    ),
    "diminishing": (
        "diminishing",
        lambda kind: world(step(100), step(40, wire="int4/128"), step(36 if kind == TRUE else 12, wire="onebit/64+ef")),
    ),
    "stock": (
        "stock form",
        lambda kind: world(
            step(100),
            step(130 if kind == TRUE else 60, wire="onebit/16+ef"),
            step(50, wire="onebit/64+ef"),
        ),
    ),
    "dollars": (
        "cost less",
        lambda kind: world(
            step(100, dollars=10.0),
            step(50, wire="int8/256", dollars=5.0),
            step(20, cluster="dgx-1", dollars=8.0 if kind == TRUE else 3.0),
        ),
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_an_insight_about_speed_in_a_world_where_it_holds_and_in_one_where_it_does_not(
    name: str, tmp_path: Path
) -> None:
    word, make = WORLDS[name]
    assert support(tmp_path, make(TRUE), word) is Support.YES
    assert support(tmp_path, make(FALSE), word) is Support.NO


def test_one_machine_with_two_primitives_has_one_price(tmp_path: Path) -> None:
    lines = world(
        step(100, cluster="p2", rate_name="p2", transport="mpi", dollars=10.0),
        step(50, cluster="p2", rate_name="p2", transport="mpi", wire="int8/256", dollars=4.0),
        step(90, cluster="p2 with NCCL", rate_name="p2", transport="nccl", dollars=9.0),
    )
    (found,) = [i for i in insights(Findings.of(made_up.write(tmp_path, lines))) if "cost less" in i.statement]
    assert (found.support, found.because) == (Support.UNKNOWN, "needs prices of two machines")


def test_no_gain_over_mpi_cannot_shrink_over_nccl(tmp_path: Path) -> None:
    lines = world(
        *(step(100, transport=t) for t in ("mpi", "nccl")),
        step(110, transport="mpi", wire="int8/256"),
        step(120, transport="nccl", wire="int8/256"),
    )
    assert support(tmp_path, lines, "shrinks strongly") is Support.UNKNOWN


def test_measured_steps_outweigh_predicted_ones(tmp_path: Path) -> None:
    lines = [
        *made_up.study(Truth(nets=("mlp",), wires=("fp32", "int8/256"), rates=("100mbit",))),
        *(step(100, workers=n) for n in (2, 16)),
        *(step(ms, workers=n, wire="int8/256") for n, ms in ((2, 10), (16, 100))),
    ]
    found = [i for i in insights(Findings.of(made_up.write(tmp_path, lines))) if "more workers" in i.statement]
    assert found[0].because.startswith("measured: ")
