"""A study file is read strictly: what is wrong in it is named with its line and what was probably meant."""

from __future__ import annotations

import pytest

from narrowcast.study import builtins, load, parse
from narrowcast.study.file import HostLayout
from narrowcast.toml_file import FileError

GOOD = """\
name = "mine"
models = ["mlp"]
data = ["digits"]
wires = ["fp32", "int8/256"]
workers = [2, "2x2"]
"""


def test_a_short_file_has_defaults_for_the_rest() -> None:
    study = parse(GOOD)
    assert [grid.kind for grid in study.grids] == ["time", "accuracy"]
    assert (study.margin, study.primary, study.baseline, study.targets) == (1.0, "int8/256", "fp32", {})
    assert study.grids[0].workers == (HostLayout(2), HostLayout(2, 2))
    assert study.grids[1].seeds == (0, 1, 2, 3, 4)


def test_a_grid_takes_over_what_stands_above_it_and_may_say_otherwise() -> None:
    study = parse(GOOD + 'batch = 8\n[[grid]]\nkind = "time"\nrates = "1gbit"\n[[grid]]\nkind = "time"\nbatch = 32\n')
    assert [(grid.batch, grid.rates, grid.models) for grid in study.grids] == [
        (8, ("1gbit",), ("mlp",)),
        (32, ("unlimited",), ("mlp",)),
    ]


WRONG = [
    ("modles = 1", 6, "did you mean models?"),
    ('models = ["mpl"]', 2, "did you mean mlp?"),
    ('data = ["digit"]', 3, "did you mean digits?"),
    ('wires = ["int9/256"]', 4, "int9"),
    ("wires = []", 4, "empty list"),
    ('wires = ["fp32", "fp32"]', 4, "second time"),
    ('algorithms = ["two-shot"]', 6, "did you mean two_shot?"),
    ('algorithms = ["hierarchical"]', 5, "2x2"),
    ('rates = ["1 gbit"]', 6, "1gbit"),
    ('transport = "nccll"', 6, "did you mean nccl?"),
    ("workers = [0]", 5, "number of workers"),
    ("workers = [1]", 5, "one worker sends nothing"),
    ('workers = ["2 x 2"]', 5, "2x2"),
    ("seeds = 0", 6, "whole number"),
    ("batch = 1.5", 6, "whole number"),
    ("lr = true", 6, "number above 0"),
    ('margin = "1"', 6, "number above 0"),
    ('primary = "int8/7"', 6, "primary"),
    ('kinds = ["speed"]', 6, "time, accuracy, bus, predicted"),
    ('models = ["lstm"]', 2, "lstm takes text"),
    ('models = ["resnet"]\nparallel = "model"', 2, "alexnet"),
    ('probe_at = "1gbit"', 6, "one of the rates"),
    ('[[grid]]\nkind = "accuracy"\nrates = ["1gbit"]', 8, "in a grid of kind accuracy"),
    ("[[grid]]\nsteps = 3", 6, "kind"),
    ('[[grid]]\nkind = "predicted"', 6, "clusters"),
    ('[[grid]]\nkind = "bus"\nsizes = [64]', 8, "64KiB"),
    ("[targets]\ndigits = 0", 7, "number above 0"),
    ("[targets]\ndigit = 90", 7, "did you mean digits?"),
    ('wires = ["fp32", "bf16"]', 4, "primary wire int8/256"),
    ('primary = "bf16"', 6, "primary = one of fp32, int8/256"),
    ('baseline = "bf16"', 6, "no grid has the baseline wire bf16"),
    ("kinds = []", 6, "empty list"),
    ("grid = []", 6, "empty list"),
    ('name = "../.."', 1, "it names a folder"),
    ('name = ".."', 1, "it names a folder"),
    ('name = "a b"', 1, "it names a folder"),
]


@pytest.mark.parametrize("change, line, word", WRONG, ids=[change.splitlines()[-1] for change, _, _ in WRONG])
def test_what_is_wrong_is_named_with_its_line(change: str, line: int, word: str) -> None:
    first, *more = change.splitlines()
    key = first.partition(" =")[0]
    rows = GOOD.splitlines()
    at = next((number for number, row in enumerate(rows) if row.startswith(f"{key} =")), len(rows))
    rows[at : at + 1] = [first]
    with pytest.raises(FileError) as caught:
        parse("\n".join([*rows, *more]) + "\n", "mine.toml")
    assert str(caught.value).startswith(f"mine.toml:{line}: "), caught.value
    assert word in str(caught.value)


def test_collectives_alone_ask_no_question() -> None:
    assert parse('wires = ["bf16"]\nkinds = "bus"\n').grids[0].wires == ("bf16",)


def test_no_such_study_says_which_there_are() -> None:
    with pytest.raises(FileError, match="quick"):
        load("quik")


@pytest.mark.parametrize("name", builtins())
def test_what_comes_with_narrowcast_can_be_read(name: str) -> None:
    study = load(name)
    assert study.name == name
    assert study.about
    assert any(study.primary in grid.wires and study.baseline in grid.wires for grid in study.grids)
