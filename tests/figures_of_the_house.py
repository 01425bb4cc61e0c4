"""How the code is laid out, in figures: `python tests/figures_of_the_house.py`. test_layers.py has limits for some."""

from __future__ import annotations

import ast
import importlib.util
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEEL = ROOT / "src" / "narrowcast"
RESEARCH = ROOT / "research" / "narrowcast_research"
KERNELS = "kernels.triton"
"""Written in Triton's own language: as long as a kernel is."""
SHORT = 60
"""Lines under which a file is counted as short: each costs a reader."""


@dataclass(frozen=True)
class Import:
    """One import of one name: where it stands, and what is imported."""

    path: Path
    line: int
    importer: str
    """A module of narrowcast, as `kernels.native`; the empty name is its front. Of research with its package."""
    imported: str
    """The absolute name."""
    lazy: bool
    """Inside of a function."""

    @property
    def edge(self) -> tuple[str, str]:
        """The top-level parts of the package that it joins; a module beside the folders is its own part."""
        return top(self.importer), top(self.imported.partition(".")[2])

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}: {self.importer} imports {self.imported}"


def top(module: str) -> str:
    return module.partition(".")[0]


def module_name(path: Path, root: Path) -> str:
    """`kernels.native` for root/kernels/native.py, `kernels` for its `__init__`, the empty name for the root's."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix("__init__").rstrip(".")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """Absolute name and line of all that a file of `package` imports: relative, lazy and by-name imports included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            # `from narrowcast import codecs` names the layer in its alias
            found = [f"{base}.{alias.name}" for alias in node.names] if "." not in base else [base]
            yield from ((name, node.lineno) for name in found)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield importlib.util.resolve_name(name.value, package), node.lineno


def in_functions(tree: ast.AST) -> set[int]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {line for f in functions for line in range(f.lineno, (f.end_lineno or 0) + 1)}


@cache
def imports(root: Path = WHEEL, name: str = "narrowcast") -> tuple[Import, ...]:
    """Every import in every file of a package."""
    found = []
    for path in files(root):
        tree, importer = tree_of(path), module_name(path, root)
        package = ".".join([name, *path.relative_to(root).parent.parts])
        module = importer if name == "narrowcast" else f"{name}.{importer}"
        lazy = in_functions(tree)
        found += [Import(path, line, module, imported, line in lazy) for imported, line in names(tree, package)]
    return tuple(found)


def inner(found: Iterable[Import]) -> list[Import]:
    """Those of narrowcast's own parts from one of them to another."""
    ours = [one for one in found if top(one.imported) == "narrowcast"]
    return [one for one in ours if one.edge[0] != one.edge[1]]


def past_a_front(found: Iterable[Import]) -> list[Import]:
    """Imports of another part's inner module: `narrowcast.codecs.spec` where `narrowcast.codecs` would do."""
    return [one for one in inner(found) if one.imported.count(".") >= 2]


def in_cycles(found: Iterable[Import]) -> set[tuple[str, str]]:
    """Edges between parts that lead back to where they came from, lazy imports included."""
    edges = {one.edge for one in inner(found) if all(one.edge)}
    while alone := {edge for edge in edges if edge[1] not in {here for here, _ in edges}}:
        edges -= alone
    while alone := {edge for edge in edges if edge[0] not in {there for _, there in edges}}:
        edges -= alone
    return edges


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def hand_written(root: Path) -> list[Path]:
    """All but GPU kernels."""
    return [path for path in files(root) if not f"{module_name(path, root)}.".startswith(f"{KERNELS}.")]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def function_lengths(paths: Iterable[Path]) -> list[int]:
    """Lines of every function from `def` to its end, its docstring apart: nobody shall save on those."""
    lengths = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                doc = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0
                lengths.append((node.end_lineno or 0) - node.lineno + 1 - doc)
    return lengths


def repeated_classes(paths: Iterable[Path]) -> dict[str, int]:
    """Names of classes that several files define."""
    defined = Counter(node.name for path in paths for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef))
    return {name: count for name, count in sorted(defined.items()) if count > 1}


def separators(paths: Iterable[Path]) -> list[str]:
    """Comments that only draw a line: `# ---- x ----`."""
    return [
        f"{path.name}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.lstrip().startswith(("# --", "# ==", "# **", "####"))
    ]


def main() -> None:
    for root in (WHEEL, RESEARCH):
        paths, found = files(root), imports(root, root.name)
        lengths = function_lengths(hand_written(root))
        deep, joints = past_a_front(found), inner(found)
        repeated = repeated_classes(paths)
        print(f"{root.name}: {sum(map(lines, paths)):,} lines in {len(paths)} files")
        print(f"  longest file {max(map(lines, hand_written(root)))}, files under {SHORT} lines", end=" ")
        print(sum(lines(path) < SHORT for path in paths))
        print(
            f"  functions: median {statistics.median(lengths):g}, p90 {statistics.quantiles(lengths, n=10)[-1]:g} lines"
        )
        print(f"  imports past a front: {len(deep)} of {len(joints)}; separators: {len(separators(paths))}")
        print(f"  class names defined more than once: {len(repeated)} ({', '.join(repeated)})")
        print(f"  edges in cycles: {sorted(in_cycles(found)) if root == WHEEL else ''}")


if __name__ == "__main__":
    main()
