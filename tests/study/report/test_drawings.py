"""Drawings can be read, whatever a study has: no label on another, no datum beyond the axes, no figure of nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from drawings import covered, drawings, frame_of, outside, sticking_out
from study.report import made_up
from study.report.made_up import WIRES, Line, Truth

from narrowcast.figures import Axis, Box, apart, place_labels, text_box, text_width, tick_names
from narrowcast.study.report import write_report


def _study(wires: int, **other: object) -> list[Line]:
    truth = Truth(nets=("mlp",), wires=WIRES[:wires], rates=("100mbit", "loopback"), seeds=3, **other)  # type: ignore[arg-type]
    lines = made_up.study(truth)
    # the grid of other machines has its own wires: a part of it is enough
    return [line for line in lines if line.get("cluster") is None or line["model"] == "lstm"]


def _missing() -> list[Line]:
    """Holes in everything that may have some."""
    source, lines = random.Random(3), _study(9)
    for line in lines:
        if line["kind"] == "time" and "breakdown_ms" in line and source.random() < 0.3:
            line["breakdown_ms"] = {**line["breakdown_ms"], source.choice(list(line["breakdown_ms"])): None}
        for layer in line.get("layers") or ():
            layer["snr_db"] = None if source.random() < 0.3 else layer["snr_db"]
        if source.random() < 0.2:
            line.pop("predicted_ms", None)
    return [line for line in lines if line["kind"] == "session" or source.random() < 0.8]


def _huge() -> list[Line]:
    """Twelve decades between the quickest and the slowest."""
    source, lines = random.Random(4), _study(9)
    for line in lines:
        factor = 10 ** source.uniform(-6, 6)
        if "steps_ms" in line:
            line["steps_ms"] = [[factor * step for step in repeat] for repeat in line["steps_ms"]]
            line["breakdown_ms"] = {part: factor * ms for part, ms in line["breakdown_ms"].items()}
        if "step_ms" in line:
            line["step_ms"], line["interval_ms"] = factor * line["step_ms"], [factor * x for x in line["interval_ms"]]
        if line["kind"] == "bus":
            line["bus_gbps"] *= factor
    return lines


def _alike() -> list[Line]:
    """All wires take the same time, have the same accuracy and the same noise."""
    lines = _study(9, noise=0.0, spread=0.0, loss={})
    for line in lines:
        if "steps_ms" in line:
            line["steps_ms"] = [[10.0] * 3] * 2
    return lines


STUDIES: dict[str, Callable[[], list[Line]]] = {
    "one wire": lambda: _study(1),
    "two wires": lambda: _study(2),
    "nine wires": lambda: _study(9),
    "twenty wires": lambda: _study(20),
    "missing values": _missing,
    "huge ranges": _huge,
    "all alike": _alike,
}


@cache
def _page(name: str, folder: Path) -> str:
    return write_report(made_up.write(folder / name.replace(" ", "-"), STUDIES[name]())).read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drawings")


@pytest.mark.parametrize("name", STUDIES)
def test_labels_cover_nothing_and_data_lie_within_the_axes(name: str, folder: Path) -> None:
    found = drawings(_page(name, folder))
    assert len(found) >= 3
    faults = []
    for svg in found:
        what = svg.get("aria-label")
        faults += [f"{what}: {a!r} covers {b!r}" for a, b in covered(svg)]
        faults += [f"{what}: {words!r} sticks out" for words in sticking_out(svg)]
        faults += [f"{what}: {place} lies beyond {frame_of(svg)}" for place in outside(svg)]
    assert faults == []


def test_every_mark_of_a_wire_differs_from_those_of_the_others(folder: Path) -> None:
    """By shape and dash, for whoever sees no colours: the pairs of a legend are all different with colour, and eight
    shapes take turns."""
    legends = re.findall(r'<ul class="legend" aria-label="Wires">(.*?)</ul>', _page("twenty wires", folder))
    assert legends
    for legend in legends:
        keys = re.findall(r'<li class="(w\d)"[^>]*><svg[^>]*>(.*?)</svg>', legend)
        assert len(set(keys)) == len(keys)
        shapes = {re.sub(r'(x1|x2|y1|y2|stroke-dasharray|class="s")="?[^ />]*', "", drawn) for _, drawn in keys}
        assert len(shapes) >= min(8, len(keys))


def test_a_figure_of_one_number_is_a_sentence(tmp_path: Path) -> None:
    """One wire beside the baseline at one rate: the heat map would have one cell."""
    truth = Truth(nets=("mlp",), wires=("fp32", "int8/256"), rates=("100mbit",), workers=(2,), seeds=1)
    lines = [line for line in made_up.study(truth) if not line.get("cluster") and line["kind"] in ("session", "time")]
    page = write_report(made_up.write(tmp_path, lines)).read_text()
    (section,) = re.findall(r'<section class="figure" id="heat".*?</section>', page, re.DOTALL)
    assert "<svg" not in section
    assert "Figure" not in re.sub("<[^>]*>", "", section)
    assert re.search(r'<p class="proves">[^<]{40,}', section)
    assert "<table" in section


@pytest.mark.parametrize(
    "low, high, log",
    [
        (3.05, 3.2, True),
        (1, 2, True),
        (0.9, 11, True),
        (1e-6, 1e6, True),
        (1e-30, 1e30, True),
        (2e7, 3e7, False),
        (-1, 1, False),
        (0.001, 0.00101, False),
    ],
)
def test_an_axis_has_a_few_round_numbers_and_they_lie_on_it(low: float, high: float, log: bool) -> None:
    axis = Axis([low, high], 0.0, 100.0, log)
    ticks = tick_names(axis)
    assert 2 <= len(ticks) <= 10
    assert len(set(ticks.values())) == len(ticks)
    assert all(-0.1 <= axis.at(tick) <= 100.1 for tick in ticks)


def test_numbers_below_an_axis_keep_apart_and_stay_in_the_drawing() -> None:
    ticks = [(float(x), f"{x} GB/s") for x in range(0, 300, 9)]
    shown = apart(ticks, 0.0, 300.0)
    boxes = [text_box(middle, 0, text_width(words, 11.0), "middle") for _, words, middle in shown]
    assert 4 < len(shown) < len(ticks)
    assert not any(a.overlaps(b) for a, b in pairwise(boxes))
    assert boxes[0].left >= 0
    assert boxes[-1].right <= 300


def test_labels_without_room_are_left_to_the_legend() -> None:
    seats = place_labels([(50.0, 50.0)] * 40, ["int4/128+ef"] * 40, Box(0, 0, 200, 100))
    assert 2 < sum(seat is not None for seat in seats) < 40
