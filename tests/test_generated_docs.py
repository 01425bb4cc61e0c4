"""The tables in the docs are those of the registries."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import narrowcast

GENERATOR = Path(__file__).parents[1] / "docs" / "generate.py"
TABLES = ("families", "formats", "codecs", "algorithms", "python", "verdicts", "results")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_up_to_date() -> None:
    # a process of its own: another test may have registered a format in this one
    command = [sys.executable, str(GENERATOR), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_table_has_a_place_and_every_place_a_table(generator: ModuleType) -> None:
    pages = "".join(page.read_text() for page in GENERATOR.parent.glob("*.md"))
    assert sorted(re.findall("<!-- generated: (.*) -->", pages)) == sorted(generator.TABLES) == sorted(TABLES)


def test_a_stale_table_is_seen(generator: ModuleType) -> None:
    page = "before\n<!-- generated: formats -->\n\n| old |\n\n<!-- end -->\nafter <!-- end -->\n"
    fresh = generator.filled(page, "formats", "| new |")
    assert fresh == page.replace("old", "new")
    assert generator.filled(fresh, "formats", "| new |") == fresh


def test_a_page_without_its_marker_is_refused(generator: ModuleType) -> None:
    with pytest.raises(ValueError, match="needs the marker <!-- generated: codecs -->"):
        generator.filled("nothing here", "codecs", "| new |")


def test_the_reference_has_every_public_name_with_its_arguments_and_what_it_says(generator: ModuleType) -> None:
    text = generator.python_reference()
    assert re.findall("^## ([a-zA-Z_]+)$", text, re.MULTILINE) == narrowcast.__all__
    assert "spec: Spec, " in text
    for name in narrowcast.__all__:
        first = (inspect.getdoc(getattr(narrowcast, name)) or "?").split("\n")[0]
        assert first in text, name
    assert " at 0x" not in text


def test_a_public_name_without_a_docstring_is_refused(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrowcast.attach, "__doc__", None)
    with pytest.raises(ValueError, match=r"attach.* is public and has no docstring"):
        generator.python_reference()
