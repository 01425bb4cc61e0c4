"""`narrowcast lab run`, `check` and `clean`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.helpers import TRIES
from typer.testing import CliRunner

from narrowcast.cli.lab import app
from narrowcast.lab.job import Policy

RUNNER = CliRunner()


@pytest.mark.usefixtures("needs_lab")
def test_run_passes_output_and_the_first_failing_code_on() -> None:
    links = ["--hosts", "3", "--rate", "200mbit", "--slow", "2=100mbit", "--racks", "0,1/2", "--uplink", "50mbit"]
    script = "echo rank $RANK of $WORLD_SIZE says $1; exit $((RANK == 1 ? 5 : 0))"
    done = RUNNER.invoke(app, ["run", *links, "--grace", "30", "--", "sh", "-c", script, "sh", "--help"])
    assert done.exit_code == 5
    assert "[host 2 rank 2] rank 2 of 3 says --help" in done.output
    assert "failed: rank 1 with 5; made to end: none" in done.output


@pytest.mark.usefixtures("needs_lab")
def test_check_shows_that_the_rate_is_held(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    for _ in range(TRIES // 2):
        done = RUNNER.invoke(
            app, ["check", "--hosts", "2", "--rate", "200mbit", "--mb", "5", "--rounds", "3", "--json", str(file)]
        )
        (row,) = json.loads(file.read_text())
        assert done.exit_code == (0 if row["held"] else 1), done.output
        if row["held"] or row["ratio"] < 1:  # a busy machine may keep Gloo from it, now and then
            break
    assert done.exit_code == 0, done.output
    assert (row["rate"], row["nbytes"], row["expected"], row["held"]) == ("200mbit", 5_000_000, 0.2, True)
    assert f"{row['ratio']:.3f}" in done.output


@pytest.mark.usefixtures("needs_lab")
def test_clean_says_what_it_removed() -> None:
    done = RUNNER.invoke(app, ["clean", "--json", "-"])
    assert (done.exit_code, type(json.loads(done.output))) == (0, list)


@pytest.mark.parametrize(
    "words, message",
    [
        (["run", "--rate", "fast", "true"], "rate: got 'fast'"),
        (["run", "--slow", "2:1gbit", "true"], "--slow: got '2:1gbit'"),
        (["run", "--racks", "a/b", "true"], "--racks: got 'a/b'"),
        (["check", "--hosts", "1"], "one host sends nothing"),
        (["check", "--mb", "-5"], "--mb: got -5 megabytes"),
        (["check", "--mb", "0"], "give 1 or more"),
    ],
)
def test_a_wrong_option_is_named_without_a_traceback(words: list[str], message: str) -> None:
    done = RUNNER.invoke(app, words)
    assert done.exit_code == 2
    assert done.output.startswith("narrowcast: ")
    assert message in done.output


@pytest.mark.parametrize("wrong", [{"timeout": -1.0}, {"timeout": 0.0}, {"grace": -0.1}])
def test_a_job_that_would_end_before_it_begins_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: got"):
        Policy(**wrong)


@pytest.mark.parametrize("command", ["run", "check", "clean"])
def test_help(command: str) -> None:
    done = RUNNER.invoke(app, [command, "--help"])
    assert (done.exit_code, "Usage" in done.output) == (0, True)
