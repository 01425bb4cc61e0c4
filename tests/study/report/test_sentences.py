"""The sentences above figures say what was measured: where, with which algorithm, and no more than can be told."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from each import each
from study.report import made_up
from study.report.made_up import Line, Truth

import narrowcast as nc
from narrowcast.codecs import all_specs, low_rank_specs
from narrowcast.study.analysis.findings import Findings
from narrowcast.study.analysis.verdict import headline, judge
from narrowcast.study.report.accuracy import accuracy_sentence, trade
from narrowcast.study.report.courses import time_to_accuracy
from narrowcast.study.report.figure import Context, Figure
from narrowcast.study.report.page import page
from narrowcast.study.report.speedups import speedups
from narrowcast.study.report.steps import breakdown, bus, scaling
from narrowcast.study.spec_bits import bits_name, code_bits

SMALL = Truth(nets=("mlp",), wires=("fp32", "int8/256"), rates=("100mbit", "1gbit"), workers=(2, 4))
FIGURES = (breakdown, bus, scaling, speedups, time_to_accuracy, trade)


def context(folder: Path, lines: list[Line]) -> Context:
    return Context(Findings.of(made_up.write(folder, lines)))


def sentence(folder: Path, lines: list[Line], make: object) -> str:
    assert callable(make)
    figure = make(context(folder, lines))
    assert isinstance(figure, Figure)
    return figure.sentence


def measured(line: Line) -> bool:
    return line["kind"] != "session" and line["status"] == "done" and line["source"] != "predicted"


def with_another_algorithm(lines: list[Line]) -> list[Line]:
    """The same once more, twice as fast: whoever takes the last, the fastest or a mixture says something else."""
    extra = []
    for line in lines:
        if measured(line) and line["wire"] == "int8/256":
            other = {**copy.deepcopy(line), "algorithm": "ring", "case": line["case"] + "|ring"}
            line["algorithm"] = "auto"
            if line["kind"] == "time":
                other["steps_ms"] = [[ms / 2 for ms in repeat] for repeat in line["steps_ms"]]
            if line["kind"] == "bus":
                other["bus_gbps"] *= 2
            extra.append(other)
    return [*lines, *extra]


@pytest.mark.parametrize("make", [make for make in FIGURES if make is not trade])
def test_a_second_algorithm_changes_no_sentence(make: object, tmp_path: Path) -> None:
    before = sentence(tmp_path / "a", made_up.study(SMALL), make)
    assert "int8/256" in before
    assert sentence(tmp_path / "b", with_another_algorithm(made_up.study(SMALL)), make) == before


def test_the_average_speedup_is_that_of_each_algorithm(tmp_path: Path) -> None:
    one = sentence(tmp_path / "a", made_up.study(SMALL), trade)
    two = sentence(tmp_path / "b", with_another_algorithm(made_up.study(SMALL)), trade)
    gains = [float(re.search(r"([\d.]+)× on average", told)[1]) for told in (one, two)]  # type: ignore[index]
    assert "the fastest is int8/256," in one
    assert "the fastest is int8/256 · ring," in two
    assert math.isclose(gains[1], 2 * gains[0], rel_tol=0.01)


def test_sentences_name_the_transport_the_hosts_and_the_scheme_where_there_are_several(tmp_path: Path) -> None:
    lines = made_up.study(replace(SMALL, rates=("100mbit",), workers=(4,)))
    assert "over" not in sentence(tmp_path / "plain", lines, speedups).split(":")[0]
    fast = [{**x, "case": x["case"] + "|fast"} for x in copy.deepcopy(lines) if measured(x) and x["kind"] == "time"]
    for line in fast:
        if line["wire"] == "int8/256":
            line["steps_ms"] = [[ms / 3 for ms in repeat] for repeat in line["steps_ms"]]
    for changed, told in (
        ({"transport": "mpi"}, r"at 100\sMb/s over MPI:"),
        ({"layout": "2x2"}, r"at 100\sMb/s on 2x2 hosts:"),
        ({"parallel": "model"}, r"at 100\sMb/s \(model parallel\):"),
    ):
        found = sentence(tmp_path / str(changed), [*lines, *({**line, **changed} for line in fast)], speedups)
        assert re.search(r"most with mlp with 4 workers " + told, found), found


def test_every_sentence_about_steps_names_the_transport(tmp_path: Path) -> None:
    lines = made_up.study(SMALL)
    extra = [{**copy.deepcopy(x), "transport": "mpi", "case": x["case"] + "|mpi"} for x in lines if measured(x)]
    for make in (breakdown, bus, scaling, speedups, time_to_accuracy):
        assert re.search("over (MPI|Gloo)", sentence(tmp_path / make.__name__, [*lines, *extra], make)), make


def scaled(lines: list[Line], rate: str, factor: float) -> list[Line]:
    """The primary wire as fast as the baseline at a rate, times a factor, with noise of its own."""
    plain = {(x["workers"], x["rate_name"]): x["steps_ms"] for x in lines if x.get("steps_ms") and x["wire"] == "fp32"}
    for line in lines:
        if line.get("steps_ms") and line["wire"] == "int8/256" and line["rate_name"] == rate:
            line["steps_ms"] = [[ms * factor for ms in repeat] for repeat in plain[line["workers"], rate]]
    return lines


@pytest.mark.parametrize(
    "factor, told",
    [
        (1.3, r"Its gain ends between 100\sMb/s and 1\sGb/s in 2 settings\."),
        (1.001, r"Its gain cannot be told from 1 at some rate in 2 settings\."),
        (0.5, r"Its gain lasts over all rates in 2 settings\."),
    ],
)
def test_a_gain_ends_where_a_loss_can_be_told(factor: float, told: str, tmp_path: Path) -> None:
    lines = scaled(made_up.study(SMALL), "1gbit", factor)
    figure = speedups(context(tmp_path, lines))
    assert isinstance(figure, Figure)
    assert re.search(told, figure.sentence), figure.sentence
    drawn = [panel for panel in figure.panels if 'class="even"' in panel.drawing]
    assert len(drawn) == (2 if factor == 1.3 else 0)


def test_numbers_and_verbs_agree(tmp_path: Path) -> None:
    truth = replace(SMALL, nets=("mlp", "cnn"), wires=("fp32", "int8/256", "int4/128+ef"), loss={"int4/128+ef": 4.0})
    lines = made_up.study(truth)
    for line in lines:
        if line["kind"] == "accuracy" and line["model"] == "cnn":
            line["accuracy"] -= 2.0 if line["wire"] == "int8/256" else 5.0
    told = accuracy_sentence(context(tmp_path, lines))
    assert told.endswith("1 is equal, 1 is better and 2 lost more.")
    assert "% of a step with fp32 waiting for the link" in sentence(tmp_path, lines, breakdown)


def test_bytes_are_those_of_the_settings_that_the_verdict_counts(tmp_path: Path) -> None:
    """Neither another algorithm nor model parallel steps count; where shares differ both ends are told."""
    lines = made_up.study(SMALL)
    ours = [line for line in lines if line.get("steps_ms") and line["wire"] == "int8/256"]
    for line, share in zip(ours, (0.20, 0.20, 0.30, 0.20), strict=True):
        line["bytes"]["claimed"] = share * line["bytes"]["plain"]
    extra = [{**copy.deepcopy(line), "parallel": "model", "case": line["case"] + "|model"} for line in ours]
    for line in extra:
        line["bytes"]["claimed"] = 0.9 * line["bytes"]["plain"]
    lines[-1:-1] = extra
    assert "<strong>20–30 %</strong>" in page(context(tmp_path, lines).findings)
    for line in ours:
        line["bytes"]["claimed"] = 0.2 * line["bytes"]["plain"]
    assert "<strong>20 %</strong>" in page(context(tmp_path, lines).findings)


def test_bytes_that_could_not_be_counted_are_told(tmp_path: Path) -> None:
    lines = made_up.study(replace(SMALL, rates=("100mbit", "loopback")))
    assert "In 4 more settings nothing could be counted." in page(context(tmp_path, lines).findings)


@pytest.mark.parametrize(
    "wire, bits, name",
    [
        ("int8/256", 8, "8 bits"),
        ("onebit/16+ef", 1, "1 bit"),
        ("qsgd2/128", 2, "2 bits"),
        ("qsgd4/512", 4, "4 bits"),
        ("int8/16", 8, "8 bits"),
        ("nvfp4", 4, "4 bits"),
        ("bf16", 16, "16 bits"),
        ("fp32", 32, "float32"),
        ("int2/4096+top64", 0.1640625, "0.16 bits"),
        ("fp32/64+top16", 9, "9 bits"),
        ("no-such-wire", math.inf, "no-such-wire"),
    ],
)
def test_bits_are_those_of_a_code(wire: str, bits: float, name: str) -> None:
    assert (code_bits(wire), bits_name(wire)) == (bits, name)


@each("wire", [*all_specs(), *low_rank_specs()])
def test_only_what_sends_float32_is_called_so(wire: str) -> None:
    """Whatever the codes of `fp32/4096+top41` and `fp32+rank4` are, few of them travel."""
    assert (bits_name(wire) == "float32") == nc.codec(wire).lossless


def test_an_unknown_wire_is_named_by_its_spec(tmp_path: Path) -> None:
    lines = [{**x, "wire": "mine/7"} if x.get("wire") == "int8/256" else x for x in made_up.study(SMALL)]
    lines = [{**x, "primary": "mine/7"} if x["kind"] == "session" else x for x in lines]
    told = headline(judge(context(tmp_path, lines).findings))
    assert "Codes of mine/7 on the wire train" in told
    assert "loat32" not in told


def test_a_seed_that_failed_never_reached_the_target(tmp_path: Path) -> None:
    lines = made_up.study(SMALL)
    assert "% on digits after" in sentence(tmp_path / "all", lines, time_to_accuracy)
    first = next(line for line in lines if line["kind"] == "accuracy" and line["wire"] == "int8/256")
    first |= {"status": "failed", "error": "boom"}
    assert "Cannot tell" in sentence(tmp_path / "one", lines, time_to_accuracy)
