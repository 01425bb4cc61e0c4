"""Benches in a real lab: rows come while ranks run, a rank that fails is named, and nothing is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowcast import cli
from narrowcast.bench import collectives, ranks
from narrowcast.bench.ranks import Ranks
from narrowcast.lab import LabError


@pytest.mark.usefixtures("needs_lab")
def test_collectives_in_a_lab_without_a_rate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    words = ["bench", "collectives", "int8/256", "--lab", "none", "--hosts", "2", "--sizes", "0.02", "--rounds", "2"]
    done = CliRunner().invoke(cli.assemble(), [*words, "--json", str(file)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "All-reduce on 2 hosts of a lab without a rate, Gloo" in done.stdout
    found = json.loads(file.read_text())
    assert [(row["wire"], row["rate"]) for row in found["rows"]] == [
        (wire, "none") for wire in (collectives.FLOAT, collectives.HALF, "int8/256")
    ]
    assert "narrowcast: 5000 values" in done.stderr


@pytest.mark.usefixtures("needs_lab")
def test_a_rank_that_fails_is_named_with_its_last_words() -> None:
    wrong = ranks.rows(Ranks(2, "none"), "narrowcast.bench.collectives", collectives.measure, {"nonsense": 1})
    with pytest.raises(LabError, match=r"failed: rank[\s\S]*nonsense"):
        list(wrong)
