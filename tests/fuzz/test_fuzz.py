"""The short form of `make fuzz`: every kind of input that comes from outside, broken in a few hundred ways."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from fuzz.__main__ import faults
from fuzz.__main__ import main as driver
from fuzz.base import Kind
from fuzz.registry import KINDS, shares

from narrowcast.cli import main

SEED = 20260
COUNTS = {"wires": 600, "specs": 600, "notes": 600, "results": 300}


@pytest.mark.parametrize("name", KINDS)
def test_broken_input_is_refused_in_one_line_or_taken_for_what_it_is(name: str) -> None:
    assert list(faults(KINDS[name], SEED, range(COUNTS.get(name, 120)))) == []


def test_an_input_is_made_again_from_its_number() -> None:
    for kind in KINDS.values():
        assert kind.input(SEED, 5) == kind.input(SEED, 5)


def test_all_inputs_are_handed_out() -> None:
    assert sum(shares(1_000_000).values()) == 1_000_000
    assert set(shares(1)) == set(KINDS)


def test_a_fault_is_shown_with_the_way_to_see_it_again() -> None:
    def wrong(given: int) -> None:
        raise KeyError(given)

    found = list(faults(Kind("numbers", 1, lambda source: source.randrange(9), wrong), 1, range(3)))
    assert len(found) == 3
    assert "KeyError" in found[2]
    assert "--only numbers --seed 1 --first 2 --count 1" in found[2]


def test_the_driver_ends_with_a_summary(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fuzz", "--only", "specs", "--count", "20", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", words)
    assert driver() == 0
    assert re.search(r"^20 inputs, 0 faults, seed 3", capsys.readouterr().out, re.M)


MODEL = 'format = 1\nname = "m"\nbatch = 1\n[[layer]]\nname = "a"\ntensors = [9]\nmacs = {}\n'
STUDY = 'models = ["mlp"]\ndata = ["digits"]\nwires = ["fp32", "int8/256"]\n{}\n'
LINE = json.dumps({"schema": 1, "kind": "time", "workers": "two"}) + "\n"
WRONG = [
    ("study.toml", STUDY.format("lr = " + "9" * 400), 4, "study run {} --sbatch"),
    ("study.toml", STUDY.format("seeds = 300000000"), 4, "study run {} --sbatch"),
    ("study.toml", STUDY.format("wires = " + "[" * 5000), 4, "study run {} --sbatch"),
    ("study.toml", "[" + ".".join("a" * 1100) + "]\n", 1, "study run {} --sbatch"),
    ("model.toml", MODEL.format("3" * 30), 7, "predict --model {} --cluster 8xH100"),
    ("model.toml", "\n\xff", 2, "predict --model {} --cluster 8xH100"),
    ("results.jsonl", LINE, 1, "report {}"),
    ("results.jsonl", "[" * 100_000 + "\n", 1, "report {}"),
    ("table.csv", '"' + "9" * 200_000, 1, "validate --data {}"),
]


@pytest.mark.parametrize("name, text, line, words", WRONG, ids=[f"{case[0]}-{i}" for i, case in enumerate(WRONG)])
def test_the_command_says_file_and_line_and_ends_with_2(
    name: str,
    text: str,
    line: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, never a traceback."""
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(sys, "argv", ["narrowcast", *words.format(tmp_path / name).split()])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 2, told
    assert f"{name}:{line}: " in told
    assert len(told.splitlines()) == 1
