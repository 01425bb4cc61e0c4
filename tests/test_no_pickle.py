"""Nothing that comes from another process is unpickled: a pickle runs whatever code its writer wished."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "narrowcast"
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing"}
"""multiprocessing's pipes and queues carry pickles; our own processes exchange lines of JSON."""
OBJECTS = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "_tensor_to_object", "_object_to_tensor"),
}
ALLOWED = {"data/readers.py"}
"""CIFAR's own files are pickles, which a reader takes apart that knows arrays and nothing else."""


def unpickles(tree: ast.AST) -> Iterator[str]:
    """What in a module could read a pickle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            yield from sorted(names & OBJECTS)
            yield from [str(node.module)] * ((node.module or "").split(".")[0] in MODULES)
        elif isinstance(node, ast.Attribute) and node.attr in OBJECTS:
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = [k for k in node.keywords if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
            yield from [] if safe else ["torch.load without weights_only=True"]


def test_no_module_reads_a_pickle() -> None:
    found = {str(path.relative_to(SRC)): list(unpickles(ast.parse(path.read_text()))) for path in SRC.rglob("*.py")}
    assert {name: what for name, what in found.items() if what and name not in ALLOWED} == {}
    assert all(found[name] for name in ALLOWED)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "dist.broadcast_object_list(x, 0)",
        "from torch.distributed import all_gather_object",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "from multiprocessing import Pipe",
    ],
)
def test_each_way_is_seen(text: str) -> None:
    assert list(unpickles(ast.parse(text)))
