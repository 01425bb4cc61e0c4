"""The tables in the docs are those of the registries."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

GENERATOR = Path(__file__).parents[1] / "docs" / "generate.py"
TABLES = ("families", "formats", "codecs", "algorithms", "verdicts", "results")


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
