"""The commands say what they found, in tables and in JSON, and refuse what they do not know in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowcast import cli
from narrowcast.console import emit
from narrowcast.formats import all_formats
from narrowcast.kernels import OPS


def run(*words: str, module: str = "narrowcast.cli") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True, check=False, timeout=100
    )


def parsed(*words: str) -> Any:
    done = CliRunner().invoke(cli.assemble(), [*words, "--json", "-"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_formats_lists_every_registered_format_with_its_corner_rules() -> None:
    rows = parsed("formats")
    assert [row["name"] for row in rows] == [fmt.name for fmt in all_formats()]
    assert all({"overflow", "nan", "inf", "-0"} <= set(row["rules"]) for row in rows)


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
        (("bench", "codecs", "int9/64"), "int takes 2 to 8 bits"),
        (("bench", "codecs", "--size", "1PB"), "take 64MiB, 1GiB, 25MB"),
    ],
    ids=["spec", "size"],
)
def test_what_is_wrong_is_said_in_one_line(
    words: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(monkeypatch, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


@pytest.mark.parametrize("module", ["narrowcast", "narrowcast.cli"])
def test_a_module_is_run_as_the_command_is_and_shows_no_traceback(module: str) -> None:
    done = run("bench", "codecs", "int9/64", module=module)
    assert done.returncode == 2
    assert "int takes 2 to 8 bits" in done.stderr
    assert "Traceback" not in done.stderr
