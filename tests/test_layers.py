"""The law of the house: who may import whom, how long files and functions are, one name for one thing."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest
from figures_of_the_house import (
    RESEARCH,
    WHEEL,
    Import,
    files,
    function_lengths,
    hand_written,
    imports,
    in_cycles,
    lines,
    module_name,
    past_a_front,
    repeated_classes,
    separators,
    top,
)

ITSELF = "narrowcast"
ALLOWED = {
    # the spine: each on what stands before it
    "formats": (),
    "kernels": ("formats",),
    "codecs": ("formats", "kernels"),
    "collectives": ("formats", "kernels", "codecs"),
    "parallel": ("kernels", "codecs", "collectives", "measure"),
    # beside it
    "lazy": (),
    "toml_file": (),
    "figures": (),
    "plugins": (),
    "console": (),
    "data": (),
    "measure": ("codecs", "collectives"),
    "lab": ("lazy", "measure"),
    "simulate": ("formats", "kernels", "codecs", "collectives", "parallel", "console", "lazy"),
    # on top of it
    "predict": ("codecs", "collectives", "parallel", "measure", "figures", "lazy", "toml_file"),
    "bench": ("formats", "kernels", "codecs", "collectives", "parallel", "measure", "lab", "data"),
    "selftest": ("codecs", "collectives", "parallel", "measure", "simulate", "bench"),
    "study": (
        *("kernels", "codecs", "collectives", "parallel", "measure", "simulate", "predict", "lab", "data", "bench"),
        *("figures", "lazy", "plugins", "toml_file", ITSELF),
    ),
    "cli": (
        *("formats", "kernels", "codecs", "collectives", "measure", "predict", "lab", "data", "bench", "study"),
        *("selftest", "console", "plugins", "lazy", ITSELF),
    ),
    "__main__": ("cli",),
    # the front, whose names are all that most users see
    ITSELF: ("formats", "kernels", "codecs", "collectives", "parallel", "simulate", "predict", "lab", "study", "lazy"),
}
"""Every part of the package, and the parts that it may import. Nothing may import narrowcast-research."""

LIMITS = {
    "imports past a front": (0, 0),
    "class names defined twice": (1, 2),
    "separators": (14, 0),
}
"""In the wheel and in research. They are what was there when they were first counted: lower them, never raise them."""

# Third-party packages beside torch: where they may be imported, and whether only inside a function.
EXTRAS_AT_THE_TOP = {"typer": ("cli", "console"), "rich": ("cli", "console"), "triton": ("kernels.triton",)}
EXTRAS_IN_FUNCTIONS = ("bench", "collectives.transports.mpi", "parallel.integrations", "data", "study")

MAX_FILE = 400
MAX_MEDIAN_FUNCTION = 8
MAX_P90_FUNCTION = 30
ROOTS = pytest.mark.parametrize("root", [WHEEL, RESEARCH], ids=["wheel", "research"])


def belongs_to(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def edge_fault(one: Import) -> str | None:
    """Why a module of narrowcast may not import another, or None where it may."""
    here, there = (part or ITSELF for part in one.edge)
    if here == there or there in ALLOWED.get(here, ()):
        return None
    got = "the package itself" if there == ITSELF else one.imported
    return f"{here} may import {', '.join(ALLOWED.get(here, ())) or 'nothing'} of narrowcast, got {got}"


def extra_fault(one: Import) -> str | None:
    """Why a module may not import a third-party package, or None where it may."""
    package = top(one.imported)
    if package == "torch" or package in sys.stdlib_module_names:
        return None
    if belongs_to(one.importer, EXTRAS_AT_THE_TOP.get(package, ())):
        return None
    if one.lazy and package != "narrowcast_research" and belongs_to(one.importer, EXTRAS_IN_FUNCTIONS):
        return None
    return f"{package} is not torch: it belongs into {', '.join(EXTRAS_IN_FUNCTIONS)}, inside a function"


def faults(root: Path) -> list[str]:
    found = []
    for one in imports(root):
        fault = edge_fault(one) if top(one.imported) == "narrowcast" else extra_fault(one)
        if fault:
            found.append(f"{one.path.relative_to(root)}:{one.line}: {fault}")
    return found


def test_every_import_is_in_the_table_and_the_core_needs_torch_alone() -> None:
    assert faults(WHEEL) == []


def test_every_part_has_its_place_in_the_table() -> None:
    parts = {top(module_name(path, WHEEL)) or ITSELF for path in files(WHEEL)}
    assert parts <= set(ALLOWED), "a new part: say in ALLOWED what it may import, and who may import it"


def test_the_table_has_no_cycle_but_that_of_the_front() -> None:
    """Parts in the order of the table import what was named before, the fronts' version and names apart."""
    below: set[str] = {ITSELF, "measure", "lazy"}
    for part, allowed in ALLOWED.items():
        assert {name for name in allowed if name not in below} == set(), part
        below.add(part)


def test_no_import_leads_back_even_inside_of_a_function() -> None:
    assert in_cycles(imports(WHEEL)) == set()


@ROOTS
def test_what_is_to_become_less_does_not_become_more(root: Path) -> None:
    found = {
        "imports past a front": past_a_front(imports(root, root.name)),
        "class names defined twice": repeated_classes(files(root)),
        "separators": separators(files(root)),
    }
    limits = {what: limit[root == RESEARCH] for what, limit in LIMITS.items()}
    assert {what: (len(these), limits[what]) for what, these in found.items() if len(these) > limits[what]} == {}


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
        ("predict/bad.py", "from narrowcast.study import run", "predict may import"),
        ("data/bad.py", "from narrowcast.console import emit", "data may import nothing"),
        ("study/bad.py", "def f():\n    import narrowcast_research", "narrowcast_research is not torch"),
        ("unheard_of/bad.py", "from narrowcast import codecs", "unheard_of may import nothing"),
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


@ROOTS
def test_files_are_short(root: Path) -> None:
    lengths = {str(path.relative_to(root)): lines(path) for path in hand_written(root)}
    assert {path: n for path, n in lengths.items() if n > MAX_FILE} == {}


@ROOTS
def test_functions_are_short(root: Path) -> None:
    lengths = function_lengths(hand_written(root))
    assert statistics.median(lengths) <= MAX_MEDIAN_FUNCTION
    assert statistics.quantiles(lengths, n=10)[-1] <= MAX_P90_FUNCTION


def test_the_length_of_a_function_leaves_its_docstring_out(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text('def f(x):\n    """One\n    two.\n    """\n    y = x\n    return y\n\n\ndef g(): ...\n')
    assert function_lengths([file]) == [3, 1]


def test_figures_see_what_they_count(tmp_path: Path) -> None:
    (tmp_path / "codecs").mkdir()
    (tmp_path / "formats").mkdir()
    first, second = tmp_path / "codecs" / "a.py", tmp_path / "formats" / "b.py"
    first.write_text("from narrowcast.formats.b import B\n# ---- a line ----\nclass A: ...\n")
    second.write_text("def f():\n    from narrowcast.codecs import a\nclass A: ...\n")
    found = imports(tmp_path)
    assert [one.imported for one in past_a_front(found)] == ["narrowcast.formats.b"]
    assert in_cycles(found) == {("codecs", "formats"), ("formats", "codecs")}
    assert repeated_classes([first, second]) == {"A": 2}
    assert separators([first, second]) == ["a.py:2"]
