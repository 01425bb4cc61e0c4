"""Results survive whatever ends a study: whole lines only, and each case is run once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrowcast.study.execution.results import Results, ResultsError, latest, read


def test_a_torn_last_line_is_cut_off_before_the_next_is_written(tmp_path: Path) -> None:
    with Results(tmp_path) as results:
        results.append(case="a", status="done")
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"schema": 1, "case": "b", "sta')
    assert [line["case"] for line in read(tmp_path)] == ["a"]
    with Results(tmp_path) as results:
        results.append(case="c", status="done")
    assert [line["case"] for line in read(tmp_path)] == ["a", "c"]


def test_the_last_line_of_a_case_counts(tmp_path: Path) -> None:
    with Results(tmp_path) as results:
        results.append(case="a", status="failed", error="x")
        assert results.done() == set()
        results.append(case="a", status="done")
        assert results.done() == {"a"}
    assert latest(read(tmp_path))["a"]["status"] == "done"


def test_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps({"schema": 2, "kind": "time"}) + "\n")
    with pytest.raises(ResultsError, match=r"results.jsonl:1: schema 2; this version reads schema 1"):
        read(tmp_path)


def test_two_studies_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with Results(tmp_path), pytest.raises(ResultsError, match="another study is writing"), Results(tmp_path):
        pass


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    with Results(tmp_path) as results:
        results.append(case="a", status="done", loss=float("nan"), curve=[{"loss": float("inf")}])
    assert read(tmp_path)[0]["loss"] is None
    assert read(tmp_path)[0]["curve"] == [{"loss": None}]


def test_what_is_written_can_be_read_again(tmp_path: Path) -> None:
    """A training that diverges has a loss of any size; what a reader would refuse is not written at all."""
    with Results(tmp_path) as results:
        results.append(kind="accuracy", case="a", status="done", loss=3e13)
        with pytest.raises(ResultsError, match=r"accuracy must be a number from 0 to 100, got 101"):
            results.append(kind="accuracy", case="b", status="done", accuracy=101.0)
    assert [line["case"] for line in read(tmp_path)] == ["a"]
