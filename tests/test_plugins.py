"""narrowcast with its plugins, without them, and with broken ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import narrowcast_research
import pytest

from narrowcast import plugins
from narrowcast.plugins import Plugins
from narrowcast.study import file

# As where the second distribution is not installed, whatever is installed here.
HIDDEN = """
import sys
from importlib import metadata
metadata.entry_points = lambda **_: ()
sys.modules["narrowcast_research"] = None
sys.argv[0] = "narrowcast"
"""
COMMAND = "from narrowcast.cli import main; main()"


def run(code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {key: value for key, value in os.environ.items() if key != plugins.VARIABLE}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(
        command, env={**known, **environment}, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.fixture
def fresh() -> Iterator[None]:
    """Plugins are loaded anew in the test, and after it."""
    plugins.loaded.cache_clear()
    yield
    plugins.loaded.cache_clear()


def test_research_registers_what_the_wheel_says_it_needs_research_for() -> None:
    found = Plugins()
    narrowcast_research.register(found)
    assert set(found.commands) == set(plugins.RESEARCH_COMMANDS)
    assert set(found.tables) == set(plugins.RESEARCH_TABLES)
    names = {path.stem for folder in found.studies for path in folder.glob("*.toml")}
    assert names == set(plugins.RESEARCH_STUDIES)


def test_every_reference_of_research_leads_somewhere() -> None:
    found = Plugins()
    narrowcast_research.register(found)
    references = [*found.commands.values(), *found.tables.values(), *found.trainers.values()]
    assert all(callable(plugins.resolve(reference)) for reference in references)
    assert all(plugins.resolve(reference) for reference in [*found.statements, *found.published])


ASKED = [*(words.split() for words in plugins.RESEARCH_COMMANDS)]
ASKED += [["codecs", "--table", "nonfinite"], ["study", "run", "edbt18"], ["validate", "--cells", "x", "--help"]]


def test_without_research_every_part_of_it_says_how_to_get_it() -> None:
    code = f"""{HIDDEN}
from narrowcast import cli
for words in {ASKED!r}:
    sys.argv[1:] = words
    try:
        cli.main()
    except SystemExit as end:
        print(end.code)
"""
    done = run(code)
    assert done.stdout.split() == ["2"] * len(ASKED), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(ASKED)
    get = "needs narrowcast-research, which is not installed; pip install narrowcast-research, or in a clone"
    assert [line for line in lines if get not in line] == []
    assert lines[0].startswith("narrowcast: validate needs")


def test_without_research_the_wheel_has_its_own_commands_and_study_and_a_report_without_insights(
    tmp_path: Path,
) -> None:
    results = Path(__file__).parents[1] / "docs" / "examples" / "edbt18" / "results.jsonl"
    (tmp_path / "results.jsonl").write_bytes(results.read_bytes())
    code = f"""{HIDDEN}
from narrowcast import cli
from narrowcast.study import file, models, report
assert file.builtins() == ["quick"]
assert "needs narrowcast-research" in models.cannot_split("mlp")
text = report.write_report({str(tmp_path)!r}).read_text()
assert "<h2" in text and "insights" not in text.partition("<main")[2].partition("<script")[0]
sys.argv[1:] = ["--help"]
cli.main()
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    shown = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("│ ") and len(line.split()) > 1}
    assert {"formats", "codecs", "doctor", "predict", "study", "bench", "lab"} <= shown
    assert not {"validate", "simulate"} & shown


def test_a_tree_that_is_not_installed_is_named_by_the_variable() -> None:
    hidden = HIDDEN.replace('sys.modules["narrowcast_research"] = None\n', "")
    done = run(f"{hidden}{COMMAND}", "simulate", "--json", "-", NARROWCAST_PLUGINS=" narrowcast_research,")
    assert (done.returncode, "aps-cifar10" in done.stdout) == (0, True), done.stderr


BROKEN = {
    "no_such_plugin": "ModuleNotFoundError: No module named 'no_such_plugin'",
    "json": "AttributeError: module 'json' has no attribute 'register'",
    "raises": "register failed: out of order",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_one_line_that_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    text = "def register(plugins):\n    raise RuntimeError('register failed: out of order')\n"
    (tmp_path / "raises.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(plugins.VARIABLE, name)
    with pytest.raises(plugins.PluginError) as caught:
        plugins.loaded()
    assert str(caught.value).startswith(f"NARROWCAST_PLUGINS={name}: ")
    assert BROKEN[name] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_plugin_ends_the_command_with_2_and_no_traceback() -> None:
    assert run(COMMAND, "formats", NARROWCAST_PLUGINS="no_such_plugin").returncode == 0, "it needs no plugin"
    done = run(COMMAND, "study", "ls", NARROWCAST_PLUGINS="no_such_plugin")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("narrowcast: NARROWCAST_PLUGINS=no_such_plugin: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_plugin_of_somebody_else_adds_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    (tmp_path / "mine.toml").write_text('models = ["mlp"]\ndata = ["digits"]\nwires = ["fp32", "int8/256"]\n')
    text = "from pathlib import Path\ndef register(plugins):\n    plugins.studies.append(Path(__file__).parent)\n"
    (tmp_path / "their_plugin.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(plugins.VARIABLE, "their_plugin")
    assert "mine" in file.builtins()
    assert file.load("mine").name == "mine"


def test_a_command_in_no_group_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("def register(plugins):\n    plugins.commands['no such'] = 'odd:register'\n")
    done = run(COMMAND, "study", "ls", NARROWCAST_PLUGINS="odd", PYTHONPATH=str(tmp_path))
    assert (done.returncode, "no group for the command 'no such'" in done.stderr) == (2, True)
