"""Words that confused readers stay out: names and prose use the field's own (CONTRIBUTING, "Words and comments")."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "research").rglob("*.py")])
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

NAMES = {
    "owed": "residual",
    "owes": "residual",
    "owe": "residual",
    "lane": "stream",
    "Lane": "DeviceStream",
    "Visit": "StreamScope",
    "telling": "propagate_errors",
    "coder_of": "Coder",
}
"""No variable, argument, function, class or attribute has such a name; the word to take instead."""
FUNCTIONS = ("told", "wanted", "given", "found", "made", "owing", "kept", "taken", "shown")
"""Bare participles say nothing of what a function does or returns."""
PHRASES = {
    r"stops? to pay": "stops paying",
    r"\bowed\b|\bowes\b": "residual",
    r"where it pays off to": "where it helps to",
}


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno


def name_faults(text: str) -> list[str]:
    tree = ast.parse(text)
    faults = [f"{line}: {name}, say {NAMES[name]}" for name, line in names(tree) if name in NAMES]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return faults + [
        f"{f.lineno}: def {f.name}: name what it gives" for f in functions if f.name.strip("_") in FUNCTIONS
    ]


def phrase_faults(text: str) -> list[str]:
    return [f"{found.group()!r}, say {better!r}" for bad, better in PHRASES.items() for found in re.finditer(bad, text)]


def test_no_name_is_on_the_list() -> None:
    assert {str(path.relative_to(ROOT)): faults for path in CODE if (faults := name_faults(path.read_text()))} == {}


def test_no_phrase_is_on_the_list() -> None:
    assert {path.name: faults for path in PROSE if (faults := phrase_faults(path.read_text()))} == {}


def test_a_bad_word_is_caught() -> None:
    assert name_faults("owed = 1") == ["1: owed, say residual"]
    assert name_faults("def _told(): ...") == ["1: def _told: name what it gives"]
    assert phrase_faults("where it stops to pay") == ["'stops to pay', say 'stops paying'"]
