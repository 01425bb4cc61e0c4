"""The page of results: every item once, every command and file there, and quick forms that run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from narrowcast_research import reproductions, results
from narrowcast_research.validation.registry import VALIDATIONS

from narrowcast.cli import assemble

ROOT = Path(__file__).parents[2]
COMMANDS = sorted({command for item in results.items() for command in item.commands})
STUDIES = [path.stem for path in ROOT.glob("research/narrowcast_research/studies/*.toml")]
NAMES = {"simulate": reproductions.HOMES, "validate": VALIDATIONS, "run": STUDIES}


def test_every_item_has_one_row() -> None:
    """They were numbered to 73, and 15 was never given."""
    assert [item.number for item in results.items()] == [number for number in range(1, 74) if number != 15]


def test_every_file_is_there() -> None:
    assert [f for item in results.items() for f in item.files if not (ROOT / f).is_file()] == []


def test_what_was_not_run_says_why_and_the_rest_what_is_behind_it() -> None:
    for item in results.items():
        assert item.found, item.number
        assert item.verdict == "not run" or item.files, item.number


def test_every_reproduction_has_a_row() -> None:
    named = {words[2] for words in map(shlex.split, COMMANDS) if words[1] == "simulate"}
    assert named == set(reproductions.HOMES)


@pytest.fixture(scope="module")
def cli() -> Any:
    return typer.main.get_command(assemble())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_that_the_command_line_takes(command: str, cli: Any) -> None:
    """Parsed, not run: names, options and their values; `--quick` forms of simulate run in test_reproductions."""
    program, *words = shlex.split(command)
    assert program == "narrowcast"
    found = cli
    while getattr(found, "commands", None):
        name, *words = words
        assert name in found.commands, command
        found = found.commands[name]
    found.make_context(name, list(words))
    if name in NAMES and words:
        assert words[0] in NAMES[name]


def test_an_unknown_verdict_is_refused() -> None:
    with pytest.raises(ValueError, match="verdict 'maybe'"):
        results.PaperItem(1, "", "", "maybe", "")
