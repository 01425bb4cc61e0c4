"""Every case records how much of what travels was compressed, and `min_values` decides about that."""

from __future__ import annotations

from pathlib import Path

import pytest
from study.nets import OWN_STUDY

from narrowcast.predict import Profile, TensorTime
from narrowcast.study import Options, expand, parse, run
from narrowcast.study.analysis.verdict import verdict_text
from narrowcast.study.execution.results import latest, read
from narrowcast.study.spec_bits import NONE, message_share, profile_share

OWN = OWN_STUDY + "seconds = 0.2\nseeds = 1\nepochs = 1\nworkers = [2]\nprobe_seconds = 0\n"
SMALL = 400 + 400 * 4 + 4
"""Values of the tensors that have fewer than 10,000; the matrix has 12,800."""
SHARE = 12_800 / (12_800 + SMALL)


@pytest.mark.slow
def test_measured_and_simulated_cases_say_how_much_they_compressed(tmp_path: Path) -> None:
    grids = '[[grid]]\nkind = "time"\nmin_values = 100000\n[[grid]]\nkind = "accuracy"\nmin_values = 500\n'
    study = parse(OWN + grids, "own.toml")
    outcome = run(study, Options(tmp_path, launcher="local", quiet=True))
    assert (outcome.total, outcome.failed) == (2 + 2, 0)
    for line in latest(read(tmp_path)).values():
        share = line["compressed"]
        if line["kind"] == "time" or line["wire"] == "fp32":
            assert share == {"values": 0.0, "bytes": 0.0}, line["case"]
        else:
            assert share["values"] == pytest.approx((12_800 + 1600) / (12_800 + SMALL)), line["case"]
            assert 0.85 < share["bytes"] < share["values"]
    assert "Nothing was compressed: no finding in 1 step time;" in verdict_text(tmp_path)
    again = run(study, Options(tmp_path, launcher="local", quiet=True))
    assert (again.done, len(latest(read(tmp_path)))) == (4, 4), "every case is found again by its name"


def test_a_collective_alone_sends_every_value_by_its_wire() -> None:
    assert message_share("int8/256") == {"values": 1.0, "bytes": 1.0}
    assert message_share("fp32") == message_share("as-is") == NONE


def test_min_values_is_part_of_a_name_where_it_is_not_the_usual() -> None:
    usual, said, other = (
        [case.id for grid in expand(parse(OWN + text), "lab") for case in grid]
        for text in ("", "min_values = 10000\n", "min_values = 0\n")
    )
    assert usual == said
    assert other == [f"{name}|min_values 0" for name in usual]
    case = expand(parse(OWN + "min_values = 0\n"), "lab")[1][0]
    assert (case.axes()["min_values"], case.min_values) == (0, 0)


def test_what_is_predicted_knows_it_too() -> None:
    profile = Profile("net", 8, 0.1, 0.2, 0.0, (TensorTime("a", 12_800, 0.1), TensorTime("b", SMALL, 0.2)))
    assert profile_share(profile, "int8/256", 10_000)["values"] == pytest.approx(SHARE)
    assert profile_share(profile, "int8/256", 1)["values"] == 1.0
    assert profile_share(profile, "int8/256", 20_000) == NONE
    assert profile_share(profile, "fp32", 0) == NONE
