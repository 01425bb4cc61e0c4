"""The commands say what they found, in tables and in JSON, and refuse what they do not know in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from narrowcast.bench import dettmers2016
from narrowcast.codecs import all_specs
from narrowcast.formats import all_formats
from narrowcast.kernels.ops import OPS


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "narrowcast.cli", *words], capture_output=True, text=True, check=False, timeout=100
    )


def parsed(*words: str) -> Any:
    done = run(*words, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_formats_lists_every_registered_format_with_its_corner_rules() -> None:
    rows = parsed("formats")
    assert [row["name"] for row in rows] == [fmt.name for fmt in all_formats()]
    assert all({"overflow", "nan", "inf", "-0"} <= set(row["rules"]) for row in rows)


def test_no_codec_but_declared_ones_loses_a_nan_an_inf_or_a_huge_value() -> None:
    rows = parsed("codecs", "--table", "nonfinite")
    assert [row["codec"] for row in rows] == all_specs()
    assert [row["codec"] for row in rows if not row["kept"]] == []


def test_the_dettmers_table_agrees_with_the_corrected_numbers_to_two_percent() -> None:
    cells = list(dettmers2016.run(1_000_000))
    assert len(cells) == len(dettmers2016.PUBLISHED)
    assert {cell.codec: cell.deviation for cell in cells if cell.deviation > 0.02} == {}


def test_doctor_names_the_implementation_and_every_slow_codec() -> None:
    facts = parsed("doctor")
    assert facts["failed_checks"] == {}
    assert {row["op"] for row in facts["ops"]} == set(OPS)
    assert "e4m3@1+cpd" in facts["slow"]


def test_bench_gives_shares_for_a_codec_that_passed_its_check() -> None:
    found = parsed("bench", "codecs", "int8/256", "--size", "25MB", "--threads", "1", "--rounds", "2", "--no-peers")
    (row,) = found["rows"]
    assert min(row["encode"], row["decode"]) > 0
    assert row["failed"] is None


@pytest.mark.parametrize(
    "words, text",
    [
        (("codecs", "--table", "x"), "there are dettmers2016, nonfinite"),
        (("bench", "codecs", "int9/64"), "int takes 2 to 8 bits"),
        (("bench", "codecs", "--size", "1PB"), "take 64MiB, 1GiB, 25MB"),
    ],
    ids=["table", "spec", "size"],
)
def test_what_is_wrong_is_said_in_one_line_without_a_traceback(words: tuple[str, ...], text: str) -> None:
    done = run(*words)
    assert done.returncode == 1
    assert text in done.stderr
    assert "Traceback" not in done.stderr
