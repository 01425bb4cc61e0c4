"""The short form of `make fuzz`: every kind of input that comes from outside, broken in a few hundred ways."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.__main__ import faults
from fuzz.base import Kind
from fuzz.registry import KINDS, shares

SEED = 20260
COUNTS = {"wires": 600, "specs": 600, "notes": 600}
TESTS = Path(__file__).parents[1]


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


def test_the_command_ends_with_a_summary() -> None:
    words = [sys.executable, "-m", "fuzz", "--only", "specs", "--count", "20", "--seed", "3"]
    done = subprocess.run(words, cwd=TESTS, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^20 inputs, 0 faults, seed 3", done.stdout, re.M)


NUMBERS = "9" * 400, "3" * 30


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_that_no_float_holds_is_refused_by_name_and_line(number: str, tmp_path: Path) -> None:
    """The command line: one line and 2, never a traceback."""
    model = 'format = 1\nname = "m"\nbatch = 1\n[[layer]]\nname = "a"\ntensors = [9]\nmacs = 1\n'
    lines = {
        "study.toml": f'models = ["mlp"]\ndata = ["digits"]\nwires = ["fp32", "int8/256"]\nlr = {number}\n',
        "seeds.toml": 'models = ["mlp"]\ndata = ["digits"]\nwires = ["fp32", "int8/256"]\nseeds = 300000000\n',
        "model.toml": model.replace("macs = 1", f"macs = {number}"),
    }
    for name, text in lines.items():
        (tmp_path / name).write_text(text)
    results = tmp_path / "results"
    results.mkdir()
    (results / "results.jsonl").write_text(json.dumps({"schema": 1, "kind": "time", "workers": "two"}) + "\n")
    asked = {
        "study.toml:4": ["study", "run", str(tmp_path / "study.toml"), "--sbatch"],
        "seeds.toml:4": ["study", "run", str(tmp_path / "seeds.toml"), "--sbatch"],
        "model.toml:7": ["predict", "--model", str(tmp_path / "model.toml"), "--cluster", "8xH100"],
        "results.jsonl:1": ["report", str(results)],
    }
    for place, words in asked.items():
        done = subprocess.run(
            [sys.executable, "-m", "narrowcast.cli", *words], capture_output=True, text=True, check=False, timeout=100
        )
        assert (done.returncode, place in done.stderr) == (2, True), f"{place}: {done.returncode} {done.stderr}"
        assert len(done.stderr.splitlines()) == 1
