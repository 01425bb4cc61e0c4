"""An `assert` tells mypy a type and guards nothing: under `python -O` the package says and computes the same."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "src" / "narrowcast").rglob("*.py"))


def only_narrows(test: ast.expr) -> bool:
    """`isinstance(x, T)`, `x is None`, `x is not None`: what mypy reads, and what cannot be otherwise."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return only_narrows(test.operand)
    if isinstance(test, ast.Call):
        return ast.unparse(test.func) == "isinstance"
    operators = test.ops if isinstance(test, ast.Compare) else []
    none = isinstance(test, ast.Compare) and ast.unparse(test.comparators[-1]) == "None"
    return none and len(operators) == 1 and isinstance(operators[0], ast.Is | ast.IsNot)


def asserts(source: str) -> list[ast.Assert]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]


def test_an_assert_only_narrows_a_type() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: assert {ast.unparse(node.test)}; raise an error instead"
        for path in FILES
        for node in asserts(path.read_text())
        if not only_narrows(node.test)
    ]
    assert found == []


@pytest.mark.parametrize("test", ["status == 0", "x", "callable(x)", "x is not None or y is not None", "0 <= n < 3"])
def test_a_check_is_seen(test: str) -> None:
    (node,) = asserts(f"assert {test}")
    assert not only_narrows(node.test)


def answers(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, *options, str(ROOT / "tests" / "refusals.py")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.timeout(300)
def test_bad_input_is_told_and_good_input_computed_the_same_without_asserts() -> None:
    found = []
    for process in [answers(), answers("-O")]:
        with process:
            out, err = process.communicate()
        assert process.returncode == 0, err
        found.append(json.loads(out))
    plain, optimized = found
    assert (plain["optimized"], optimized["optimized"]) == (False, True)
    assert plain["told"] == optimized["told"]
    assert plain["results"] == optimized["results"]
    unclear = ("accepted", "AssertionError", "AttributeError", "IndexError", "KeyError", "UnboundLocalError")
    assert {name: said for name, said in plain["told"].items() if said[0] in unclear} == {}
