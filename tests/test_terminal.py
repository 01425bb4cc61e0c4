"""What stands on a terminal: help at once, tables that fit, and JSON wherever a command has a table."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from each import each
from rich.console import Console
from typer.testing import CliRunner

from narrowcast import __version__, cli, console
from narrowcast.cli import study, table
from narrowcast.console import GrowingTable, new_table
from narrowcast.study.execution.progress import Tally

ROOT = Path(__file__).parents[1]
EDBT18 = str(ROOT / "docs" / "examples" / "edbt18")
TABLES = (
    "formats",
    "predict --list",
    "predict --model resnet50 --cluster p2.16xlarge --workers 1,16 --wires fp32,int8/256",
    "advise --model resnet50 --clusters 10gbe-tcp,25gbe-tcp --workers 8",
    "study ls",
    f"study show {EDBT18}",
    "data ls",
    "doctor",
)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")


def commands(app: Any, words: str = "") -> Iterator[tuple[str, Any]]:
    """Every command of the tree by its words."""
    for name, one in getattr(app, "commands", {}).items():
        path = f"{words} {name}".strip()
        yield from commands(one, path) if getattr(one, "commands", None) else [(path, one)]


TREE = dict(commands(cli.command_of(cli.assemble())))


def test_help_and_version_need_neither_torch_nor_plug_ins() -> None:
    for words, part in (["--help"], "selftest"), (["-h"], "Usage"), ([], "Usage"), (["--version"], __version__):
        code = (
            f"import sys; sys.argv = ['narrowcast', *{words!r}]\nfrom narrowcast.cli import main\n"
            "try:\n    main()\nexcept SystemExit:\n    pass\n"
            "assert not {'torch', 'narrowcast_research'} & set(sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert part in done.stdout


def test_the_overview_has_every_command_and_no_other() -> None:
    app = cli.command_of(cli.assemble())
    shown = {name for name, one in app.commands.items() if not one.hidden}
    own = {*table.COMMANDS, *table.GROUPS}
    assert own <= shown
    assert {words.partition(" ")[0] for words in cli.plugins.loaded().commands} | own == shown
    assert set(cli.command_of(cli.overview()).commands) == own


def test_one_command_is_the_same_alone() -> None:
    for name in table.COMMANDS:
        alone, (whole) = cli.command_of(cli._one(name)).commands[name], TREE[name]
        assert [param.opts for param in alone.params] == [param.opts for param in whole.params]


def test_no_flag_has_a_type_and_every_command_takes_h() -> None:
    runner = CliRunner()
    for words in TREE:
        done = runner.invoke(cli.assemble(), [*words.split(), "-h"])
        assert done.exit_code == 0, words
    for words, one in TREE.items():
        flags = [param for param in one.params if getattr(param, "is_bool_flag", False)]
        assert all(param.metavar == "" for param in flags), words


WITHOUT_JSON = {"lab run": "it is the command that it runs", "probe": "its result is a file"}


def test_every_command_takes_json_but_those_that_say_why_not() -> None:
    takes = {words for words, one in TREE.items() if any("--json" in param.opts for param in one.params)}
    assert set(TREE) - takes == set(WITHOUT_JSON)


class Kept:
    """A console that keeps what is printed, to be shown at any width."""

    def __init__(self, words: str) -> None:
        self._printed: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        with pytest.MonkeyPatch.context() as patch:
            for place in (console, study):
                patch.setattr(place, "make_console", lambda: self)
            done = CliRunner().invoke(cli.assemble(), words.split(), catch_exceptions=False)
        assert done.exit_code == 0, done.output

    def print(self, *what: Any, **how: Any) -> None:
        self._printed.append((what, how))

    def shown(self, width: int) -> str:
        out = io.StringIO()
        for what, how in self._printed:
            Console(file=out, width=width, no_color=True).print(*what, **how)
        return out.getvalue()


@each("words", TABLES)
def test_tables_fit_80_and_120_columns_and_no_number_is_broken(words: str) -> None:
    kept = Kept(words)
    wide = set(NUMBER.findall(kept.shown(2000)))
    for width in (80, 120):
        text = kept.shown(width)
        assert max(map(len, text.splitlines())) <= width
        assert set(NUMBER.findall(text)) == wide, f"{width} columns"


def test_texts_stand_on_the_left_and_numbers_on_the_right() -> None:
    out, rows = io.StringIO(), [("a", "some words", "1.5"), ("b", "word", "10.25")]
    Console(file=out, width=80).print(new_table("T", "name", "what", "ms", rows=rows))
    first, second = (line for line in out.getvalue().splitlines() if "word" in line)
    assert first.index("some") == second.index("word")
    assert first.index("1.5") + len("1.5") == second.index("10.25") + len("10.25")


def test_a_table_that_is_too_wide_goes_on_below_with_what_tells_rows_apart() -> None:
    rows = [("1", "fp32", *range(100000, 100009)), ("1", "bf16", *range(200000, 200009))]
    columns = ("ranks", "wire", *(f"column {number}" for number in range(9)))
    table = new_table("T [mpi]", *columns, rows=rows)
    table.caption = "see [cli]"
    out = io.StringIO()
    Console(file=out, width=60).print(table)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 60
    assert "T [mpi]" in text
    assert "see [cli]" in text
    keyed = [line for line in text.splitlines() if re.match(r" +1 +(fp32|bf16)", line)]
    assert len(keyed) == 2 * text.count("ranks") > 2
    assert all(str(number) in text for row in rows for number in row[2:])


def test_a_growing_table_goes_on_below_where_it_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_width", lambda: 40)
    GrowingTable("What", "wire      ", *(f"column {number}" for number in range(6))).add_row(
        "x", *map(str, range(1000, 1006))
    )
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 40
    assert all(str(number) in text for number in range(1000, 1006))


def test_predict_and_study_show_begin_with_the_verdict() -> None:
    words = TABLES[2].split()
    first = CliRunner().invoke(cli.assemble(), words).output.splitlines()[0]
    assert re.match(r"(Compress|Leave it off|Cannot tell)\. .*int8/256 is predicted [\d.]+× .* with 16 workers", first)
    assert Kept(f"study show {EDBT18}").shown(120).startswith("Cannot tell. ")


def test_progress_never_knows_that_more_than_nothing_is_left() -> None:
    class Case:
        kind, source, id = "time", "measured", "x"

    tally = Tally([Case()], set())  # type: ignore[list-item]
    assert "0:00 to go" not in tally.line()
    assert "nobody knows how long to go" in tally.line()


def test_a_study_of_ones_own_begins_as_a_copy_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    done = runner.invoke(cli.assemble(), ["study", "init", "mine.toml", "--json", "-"])
    assert json.loads(done.output) == {"written": "mine.toml", "like": "quick"}
    assert 'name = "mine"' in (tmp_path / "mine.toml").read_text()
    again = runner.invoke(cli.assemble(), ["study", "init", "mine.toml"])
    assert "mine.toml is there already" in str(again.exception)
    quick = runner.invoke(cli.assemble(), ["study", "show", "quick", "--file"]).output
    assert quick.replace('name = "quick"', 'name = "mine"') == (tmp_path / "mine.toml").read_text()
