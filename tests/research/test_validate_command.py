"""`narrowcast validate`: cells, pages, and what is wrong in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowcast.cli import assemble


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(assemble(), list(words), catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def test_validate_prints_measured_predicted_and_error() -> None:
    code, out, _ = run("validate", "dettmers2016")
    assert code == 0
    for part in ("measured x", "predicted x", "50.55", "37.19", "the honest mode", "reached"):
        assert part in out


def test_validate_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert run("validate", "transfer", "--markdown", str(page))[0] == 0
    assert "composed MAPE <= 5 %: reached" in page.read_text()


@pytest.mark.parametrize(
    "words, word",
    [
        ("validate no-such", "unknown 'no-such'"),
        ("validate --data no-such.csv", "no file no-such.csv"),
        ("validate transfer --markdown no/such.md", "--markdown: there is no folder no"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: str, word: str) -> None:
    code, _, err = run(*words.split())
    assert (code, err.count("\n")) == (2, 1)
    assert word in err
