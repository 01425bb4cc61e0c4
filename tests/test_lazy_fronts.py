"""Package fronts that import their names at the first use: every name is there, and mypy sees the same ones."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PACKAGES = ("narrowcast.lab", "narrowcast.predict", "narrowcast.study")


def names_for_mypy(path: Path) -> set[str]:
    """What a front imports or assigns under TYPE_CHECKING; a module that only helps to assign is no name."""
    blocks = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    names = set()
    for node in (inner for block in blocks for inner in block.body):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_is_there_and_known_to_mypy(name: str) -> None:
    package = import_module(name)
    assert names_for_mypy(Path(package.__file__ or "")) == set(package.__all__) == set(dir(package))
    for public in package.__all__:
        getattr(package, public)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'narrowcast\.predict' has no attribute 'oracle'"):
        import_module("narrowcast.predict").oracle  # noqa: B018


def test_the_front_shows_what_mypy_knows_and_nothing_needs_torch_before_its_first_use() -> None:
    front = import_module("narrowcast")
    known = names_for_mypy(Path(front.__file__ or ""))
    assert known == set(front.HOMES) | set(front.LAYERS)
    assert set(front.__all__) <= known
    assert all(getattr(front, name) is not None for name in known)
    code = "import sys, narrowcast; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
