"""A file becomes a list of cases: the same every time, each once, what matters first."""

from __future__ import annotations

import re

import pytest

from narrowcast.study import builtins, expand, load, parse
from narrowcast.study.cases import settings
from narrowcast.study.execution.launch import LabLauncher
from narrowcast.toml_file import FileError

STUDY = """\
models = ["mlp", "cnn"]
data = ["digits"]
wires = ["bf16", "fp32", "int8/256"]
algorithms = ["auto", "ring"]
workers = [2, 4]
rates = ["100mbit", "1gbit"]
seeds = 2
"""


def ids(text: str, launcher: str = "lab") -> list[str]:
    return [case.id for grid in expand(parse(text), launcher) for case in grid]


@pytest.mark.parametrize("launcher", ["lab", "local", "torchrun"])
@pytest.mark.parametrize("name", builtins())
def test_every_case_has_a_name_of_its_own(name: str, launcher: str) -> None:
    found = [case.id for grid in expand(load(name), launcher) for case in grid]
    assert len(found) == len(set(found)) > 0
    assert found == [case.id for grid in expand(load(name), launcher) for case in grid]


def test_plain_training_has_one_way_and_the_others_have_all() -> None:
    found = [name for name in ids(STUDY) if name.startswith("time|mlp|digits") and name.endswith("|2|1gbit|gloo|data")]
    ways = [tuple(name.split("|")[3:5]) for name in found]
    assert ways == [("bf16", "auto"), ("bf16", "ring"), ("fp32", "auto"), ("int8/256", "auto"), ("int8/256", "ring")]


def test_the_primary_question_comes_first_with_all_its_seeds() -> None:
    wires = [name.split("|")[3] for name in ids(STUDY) if name.startswith("accuracy|")]
    last_of_question = max(place for place, wire in enumerate(wires) if wire in ("fp32", "int8/256"))
    assert last_of_question < wires.index("bf16")


def test_a_case_that_two_grids_have_is_run_once() -> None:
    grids = '[[grid]]\nkind = "time"\n[[grid]]\nkind = "time"\nworkers = [4, 8]\n'
    first, second = expand(parse(STUDY + grids), "lab")
    assert {case.layout.workers for case in second} == {8}
    assert len(first) == 2 * 2 * 2 * 5


@pytest.mark.parametrize(
    "kind, first, second",
    [
        ("accuracy", "lr = 0.1", "lr = 0.01"),
        ("time", "batch = 16", "batch = 64"),
        ("bus", "repeats = 3", "repeats = 5"),
    ],
)
def test_a_case_that_two_grids_would_run_in_different_ways_is_refused(kind: str, first: str, second: str) -> None:
    grids = "".join(f'[[grid]]\nkind = "{kind}"\n{number}\n' for number in (first, second))
    with pytest.raises(FileError) as caught:
        parse(STUDY + grids, "mine.toml")
    message = str(caught.value)
    assert message.startswith("mine.toml:11: this grid has cases that the grid of line 8 has, such as ")
    assert re.search(r"with other numbers: \w+ \S+ and \S+\. A case is run once", message)


def test_grids_that_differ_in_links_are_one_where_there_are_none() -> None:
    grids = "".join(f'[[grid]]\nkind = "time"\nrates = "{rate}mbit"\nbatch = {rate}\n' for rate in (10, 20))
    study = parse(STUDY + grids, "mine.toml")
    assert [len(grid) for grid in expand(study, "lab")] == [20, 20]
    with pytest.raises(FileError, match=r"mine.toml:12: .*launcher local makes no link rates"):
        expand(study, "local")


def test_a_lab_leaves_out_what_it_has_no_hosts_for() -> None:
    grid = expand(parse(STUDY.replace("[2, 4]", "[250, 300]") + 'kinds = "time"\n'), "lab")[0]
    assert {case.layout.workers for case in grid if LabLauncher().fits(case)} == {250}


def test_without_a_lab_rates_are_predicted_from_the_loopback() -> None:
    grid = expand(parse(STUDY + 'kinds = "time"\n'), "local")[0]
    measured = {case.rate_name for case in grid if case.source == "measured"}
    predicted = {(case.rate_name, case.rate) for case in grid if case.source == "predicted"}
    assert measured == {"loopback"}
    assert predicted == {("100mbit", 1e8), ("1gbit", 1e9)}
    assert all(case.id.startswith("predicted|") for case in grid if case.source == "predicted")


def test_the_rate_that_is_probed_comes_first() -> None:
    grid = expand(parse(STUDY + 'kinds = "time"\nprobe_at = "1gbit"\n'), "lab")[0]
    assert list(dict.fromkeys(case.rate_name for case in grid)) == ["1gbit", "100mbit"]


def test_a_setting_has_all_wires_of_one_place_and_places_follow_one_another() -> None:
    found = settings(expand(parse(STUDY + 'kinds = "time"\n'), "lab")[0])
    assert [len(setting.cases) for setting in found] == [5] * 8
    places = [setting.place for setting in found]
    assert len(set(places)) == 4
    assert all(places.index(place) + 1 == len(places) - places[::-1].index(place) - 1 for place in set(places))


def test_two_ranks_on_a_host_are_another_layout_than_two_hosts() -> None:
    made = ids(STUDY.replace("workers = [2, 4]", 'workers = [4, "2x2"]') + 'kinds = "time"\n')
    assert {name.split("|")[5] for name in made} == {"4", "2x2"}


def test_without_a_measurement_of_the_machine_nothing_is_predicted_from_it() -> None:
    grid = expand(parse(STUDY + 'kinds = "time"\nprobe_seconds = 0\n'), "local")[0]
    assert {case.source for case in grid} == {"measured"}
