"""The commands say what they found, in tables and in JSON, and refuse what they do not know in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from narrowcast_research.bench import dettmers2016

from narrowcast import cli
from narrowcast.codecs import all_specs
from narrowcast.console import emit
from narrowcast.formats import all_formats
from narrowcast.kernels import OPS


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


def refusal(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    """The status that the process ends with, in this process."""
    monkeypatch.setattr(sys, "argv", ["narrowcast", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize("words", ["formats", "predict --model resnet50 --cluster pcie3"])
def test_a_file_that_cannot_be_written_is_refused_in_a_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no" / "x"
    assert refusal(monkeypatch, *words.split(), "--json", str(path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"narrowcast: --json {path}: there is no folder {tmp_path / 'no'}; ")
    with pytest.raises(ValueError, match=f"--json {tmp_path}: Is a directory; name a file that can be written"):
        emit([], "", str(tmp_path))


def test_bench_refuses_no_threads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("bench", "codecs", "int8/256", "--size", "25MB", "--no-peers")
    for option in (("--threads", "0"), ("--rounds", "1")):
        assert refusal(monkeypatch, *words, *option) == 2
        assert option[0] in capsys.readouterr().err


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
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
