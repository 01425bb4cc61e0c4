"""Imports point left only, the core needs torch alone, and files and functions stay short enough to read."""

from __future__ import annotations

import ast
import importlib.util
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "narrowcast"
FILES = sorted(SRC.rglob("*.py"))

SPINE = ("formats", "kernels", "codecs", "collectives", "measure", "parallel")
# Built on the spine; nothing in the spine imports them.
ABOVE = (
    "data",
    "simulate",
    "figures",
    "toml_file",
    "lazy",
    "predict",
    "lab",
    "study",
    "bench",
    "console",
    "cli",
    "__main__",
)

COMMANDS = ("bench", "lab", "data", "simulate", "predict", "study", "study.report")
CONSOLE = ("cli", "console", *(f"{place}.cli" for place in COMMANDS))
# Third-party packages beside torch: where they may be imported, and whether only inside a function.
EXTRAS_AT_THE_TOP = {"typer": CONSOLE, "rich": CONSOLE, "triton": ("kernels.triton",)}
EXTRAS_IN_FUNCTIONS = ("bench", "collectives.mpi", "parallel.integrations", "data", "study")

MAX_FILE = 400
MAX_MEDIAN_FUNCTION = 8
MAX_P90_FUNCTION = 30


def module_name(path: Path, root: Path) -> str:
    """`kernels.native` for root/kernels/native.py, `kernels` for its `__init__`, the empty name for the root's."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """Absolute name and line of all that a file of `package` imports: relative, lazy and by-name imports included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            # `from narrowcast import codecs` names the layer in its alias
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "narrowcast" else [base]
            yield from ((name, node.lineno) for name in names)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield importlib.util.resolve_name(name.value, package), node.lineno


def belongs_to(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def in_a_function(tree: ast.AST, line: int) -> bool:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(f.lineno <= line <= (f.end_lineno or 0) for f in functions)


def layer_fault(importer: str, imported: str) -> str | None:
    """Why a module of the package may not import another, or None where it may."""
    here, there = importer.partition(".")[0], imported.partition(".")[0]
    if here not in SPINE:
        return None
    if there in SPINE and SPINE.index(there) <= SPINE.index(here):
        return None
    return f"{here} may import only {', '.join(SPINE[: SPINE.index(here) + 1])}, got {imported or 'the package itself'}"


def extra_fault(importer: str, imported: str, lazy: bool) -> str | None:
    """Why a module may not import a third-party package, or None where it may."""
    package = imported.partition(".")[0]
    if package == "torch" or package in sys.stdlib_module_names:
        return None
    if belongs_to(importer, EXTRAS_AT_THE_TOP.get(package, ())):
        return None
    if lazy and belongs_to(importer, EXTRAS_IN_FUNCTIONS):
        return None
    return f"{package} is not torch: it belongs into {', '.join(EXTRAS_IN_FUNCTIONS)}, inside a function"


def faults(root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        importer, tree = module_name(path, root), ast.parse(path.read_text())
        package = ".".join(["narrowcast", *path.relative_to(root).parent.parts])
        for imported, line in imports(tree, package):
            if imported.partition(".")[0] == "narrowcast":
                fault = layer_fault(importer, imported.removeprefix("narrowcast").lstrip("."))
            else:
                fault = extra_fault(importer, imported, in_a_function(tree, line))
            if fault:
                found.append(f"{path.relative_to(root)}:{line}: {fault}")
    return found


def function_lengths(paths: list[Path]) -> list[int]:
    """Lines of every function from `def` to its end, its docstring apart: nobody shall save on those."""
    lengths = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                doc = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0
                lengths.append((node.end_lineno or 0) - node.lineno + 1 - doc)
    return lengths


def hand_written() -> list[Path]:
    return [path for path in FILES if not belongs_to(module_name(path, SRC), ("kernels.triton",))]


def test_every_import_points_left_and_the_core_needs_torch_alone() -> None:
    assert faults(SRC) == []


def test_every_module_has_its_place() -> None:
    tops = {module_name(path, SRC).partition(".")[0] for path in FILES} - {""}
    assert tops <= {*SPINE, *ABOVE}, "a new top-level module: say in SPINE or ABOVE where it stands"


@pytest.mark.parametrize(
    "path, text, word",
    [
        ("formats/bad.py", "import narrowcast.codecs", "formats may import"),
        ("kernels/bad.py", "from narrowcast.codecs import registry", "kernels may import"),
        ("kernels/bad.py", "from narrowcast import codecs", "kernels may import"),
        ("kernels/bad.py", "from .. import codecs", "kernels may import"),
        ("kernels/deep/bad.py", "from ...codecs.registry import codec", "kernels may import"),
        ("codecs/__init__.py", "from ..parallel import attach", "codecs may import"),
        ("codecs/bad.py", "def f():\n    from narrowcast.collectives import ring", "codecs may import"),
        ("codecs/bad.py", "import importlib\nimportlib.import_module('narrowcast.study')", "codecs may import"),
        ("codecs/bad.py", "__import__('narrowcast.predict')", "codecs may import"),
        ("codecs/bad.py", "import narrowcast as nc", "the package itself"),
        ("codecs/bad.py", "from narrowcast import cli", "codecs may import"),
        ("codecs/bad.py", "import numpy", "numpy is not torch"),
        ("codecs/bad.py", "def f():\n    import numpy", "numpy is not torch"),
        ("codecs/bad.py", "import typer", "typer is not torch"),
        ("bench/bad.py", "import numpy", "inside a function"),
        ("__init__.py", "import rich", "rich is not torch"),
    ],
)
def test_a_wrong_import_is_caught(tmp_path: Path, path: str, text: str, word: str) -> None:
    bad = tmp_path / path
    bad.parent.mkdir(parents=True, exist_ok=True)
    bad.write_text(text)
    (fault,) = faults(tmp_path)
    assert word in fault


@pytest.mark.parametrize(
    "path, text",
    [
        ("kernels/good.py", "from narrowcast.formats import floats\nfrom . import plan\nfrom ..formats import base"),
        ("codecs/__init__.py", "from . import registry\nfrom ..kernels import ops\nimport torch, math"),
        ("bench/good.py", "def f():\n    import numpy"),
        ("study/good.py", "from narrowcast import predict\nfrom ..parallel import attach"),
        ("__init__.py", "from .codecs import codec\nfrom . import study"),
        ("cli/__init__.py", "import rich\nimport typer\nimport narrowcast as nc"),
    ],
)
def test_a_right_import_is_let_through(tmp_path: Path, path: str, text: str) -> None:
    good = tmp_path / path
    good.parent.mkdir(parents=True, exist_ok=True)
    good.write_text(text)
    assert faults(tmp_path) == []


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(SRC)): len(path.read_text().splitlines()) for path in hand_written()}
    assert {path: n for path, n in lengths.items() if n > MAX_FILE} == {}


def test_functions_are_short() -> None:
    lengths = function_lengths(hand_written())
    assert statistics.median(lengths) <= MAX_MEDIAN_FUNCTION
    assert statistics.quantiles(lengths, n=10)[-1] <= MAX_P90_FUNCTION


def test_the_length_of_a_function_leaves_its_docstring_out(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text('def f(x):\n    """One\n    two.\n    """\n    y = x\n    return y\n\n\ndef g(): ...\n')
    assert function_lengths([file]) == [3, 1]
