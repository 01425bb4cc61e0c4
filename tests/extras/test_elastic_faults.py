"""The command that makes faults: one host is killed in an exchange, one is cut; all steps are made, law 8 holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from narrowcast_research.local import faults

from narrowcast.lab import LabError
from narrowcast.lab.lab import check_machine

pytestmark = [pytest.mark.extras, pytest.mark.timeout(300)]
SEED = 1320
"""Of faults that take little time."""


def test_faults_are_survived_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        check_machine()
    except LabError as error:
        pytest.skip(str(error))
    out = tmp_path / "faults.json"
    numbers = {"seed": SEED, "faults": 2, "hosts": 3, "spacing": 60}
    words = ["--out", str(out), "--only", "random", *(w for k, v in numbers.items() for w in (f"--{k}", str(v)))]
    assert faults.main(words) == 0
    first = capsys.readouterr().out
    (run,) = json.loads(out.read_text())
    assert [fault["kind"] for fault in run["faults"]] == ["killed in an exchange", "cut"]
    assert not run["fell"]
    assert list(run["ended"].values()) == [{"steps": 300, "exchanges": 30}] * 3
    # those who lived through the first fault took back what they had encoded, and made the exchange again
    assert all(other["failed"] for other in run["faults"][0]["others"].values())
    law = run["law 8"]
    assert law["of which survived"] == law["of which all residuals came back"] >= 2
    assert law["checked"] >= 30
    assert law["off"] < 1e-5 < law["largest residual"]
    assert law["anchors differ"] == 0
    # what is in the file is not made again
    assert faults.main(words) == 0
    assert capsys.readouterr().out == first
