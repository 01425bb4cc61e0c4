"""Write the tables of formats, codecs, algorithms and results, and the Python reference; `--check` says whether docs/
has them.

A page holds `<!-- generated: NAME -->` and `<!-- end -->`; what stands between the two is replaced.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from narrowcast_research.results import VERDICTS, PaperItem, items

import narrowcast
from narrowcast.codecs import all_specs, codec, low_rank_specs
from narrowcast.collectives.algorithms.record import ALGORITHMS, Algorithm
from narrowcast.formats import Format, all_formats, families

DOCS = Path(__file__).parent


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _format_row(fmt: Format) -> list[str]:
    limits = fmt.max, fmt.min, fmt.smallest, fmt.smallest_normal
    overflow = ", ".join(f"**{rule}**" if rule == fmt.default_overflow else rule for rule in fmt.overflows)
    specials = (fmt.rules[key] for key in ("nan", "inf", "-0"))
    return [f"`{fmt}`", str(fmt.bits), str(len(fmt.grid)), *map(_number, limits), overflow, *specials]


def format_table() -> str:
    """Every registered format and the examples of every family."""
    columns = "format", "bits", "values", "largest", "lowest", "smallest > 0", "smallest normal", "overflow"
    return _table([*columns, "NaN becomes", "Inf becomes", "-0 becomes"], map(_format_row, all_formats()))


def family_table() -> str:
    return _table(["pattern", "meaning"], ([f"`{family.pattern}`", family.meaning] for family in families()))


def _codec_row(spec: str) -> list[str]:
    made = codec(spec)
    block = "no wire of its own" if made.rank else {0: "whole tensor", 1: "any"}.get(made.block, str(made.block))
    exempt = "<br>".join(f"{law}: {why}" for law, why in made.exemptions.items())
    return [f"`{spec}`", f"{made.bits_per_value:.6g}", block, "yes" if made.stochastic else "", exempt]


def codec_table() -> str:
    """Every listed codec, with the laws that it is exempt from."""
    columns = "spec", "bits per value", "can be cut every", "random bits", "exempt from law, and why"
    return _table(columns, map(_codec_row, [*all_specs(), *low_rank_specs()]))


def _algorithm_row(one: Algorithm) -> list[str]:
    feedback = "yes" if one.residual_shots else ""
    return [f"`{one.name}`", one.summary, one.bytes_sent, one.roundings, one.order.value, one.phases, feedback]


def algorithm_table() -> str:
    """Every all-reduce algorithm."""
    columns = "name", "how", "bytes sent by each rank", "roundings", "order of the sum", "noise phases", "`+ef`"
    return _table(columns, map(_algorithm_row, ALGORITHMS.values()))


def _result_row(item: PaperItem) -> list[str]:
    sources = [f"`{command}`" for command in item.commands] + [_link(file) for file in item.files]
    return [str(item.number), item.paper, item.says, f"**{item.verdict}**", item.found, "<br>".join(sources)]


def _link(file: str) -> str:
    """A page as a link, whatever else by its path."""
    page = file.removeprefix("docs/")
    return f"[{page}]({page})" if file.startswith("docs/") and page.endswith(".md") else f"`{file}`"


def result_table() -> str:
    """Every item of the papers."""
    return _table(["", "paper", "says", "", "what we found", "command, file"], map(_result_row, items()))


def verdict_table() -> str:
    """How many items have which verdict, by paper."""
    papers = list(dict.fromkeys(item.group for item in items()))
    counts = [
        [sum(item.verdict == one and item.group == paper for item in items()) for one in VERDICTS] for paper in papers
    ]
    rows = [[paper, *map(str, row)] for paper, row in zip(papers, counts, strict=True)]
    totals = [str(sum(column)) for column in zip(*counts, strict=True)]
    return _table(["", *VERDICTS], [*rows, ["all", *totals]])


RETURNED = ("narrowcast.parallel.Handle", "narrowcast.codecs.ErrorReport", "narrowcast.formats.Format")
"""Classes that users meet as what a public function gives."""


def _arguments(function: Any) -> str:
    """The arguments and the result as the source has them: a signature's repr has addresses and expanded aliases."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{function} is no function with a source")
    arguments = tree.args.posonlyargs or tree.args.args
    if arguments and arguments[0].arg in ("self", "cls"):
        arguments.pop(0)
    result = f" -> {ast.unparse(tree.returns)}" if tree.returns and tree.name != "__init__" else ""
    return f"({ast.unparse(tree.args)}){result}"


def _signature(name: str, thing: Any) -> str:
    """As it is called, broken into lines where it is long."""
    if dataclasses.is_dataclass(thing):
        shown = [f"{field.name}: {field.type}" for field in dataclasses.fields(thing) if field.init]
        call = f"{name}({', '.join(shown)})"
    elif isinstance(thing, type):
        call = name + (_arguments(vars(thing)["__init__"]) if "__init__" in vars(thing) else "")
    else:
        call = name + _arguments(thing)
    # lines end after a comma only
    whole = re.sub("(?<!,) ", "\0", call)
    lines = textwrap.wrap(whole, 84, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def _doc(thing: Any) -> str:
    text = inspect.getdoc(thing)
    if not text or text == inspect.getdoc(type(thing)):
        raise ValueError(f"{thing} is public and has no docstring")
    return text


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods, properties and class methods, with those of its bases in narrowcast."""
    for name, thing in inspect.getmembers_static(kind):
        owner = next((base for base in kind.__mro__ if name in vars(base)), object)
        method = isinstance(thing, (property, classmethod, staticmethod)) or inspect.isfunction(thing)
        if method and not name.startswith("_") and owner.__module__.startswith("narrowcast"):
            yield name, getattr(thing, "__func__", thing)


def _member(name: str, thing: Any) -> str:
    function = thing.fget if isinstance(thing, property) else thing
    call = _arguments(function)
    shown = call.partition(" -> ")[2] if isinstance(thing, property) else call
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return f"- `{name}{': ' if isinstance(thing, property) else ''}{shown}`{': ' * bool(text)}{text}"


def _entry(path: str) -> str:
    """A section of the Python reference: how it is called, what it says of itself, what is in it."""
    parent, _, name = path.rpartition(".")
    thing = getattr(importlib.import_module(parent), name)
    parts = [f"## {path.removeprefix('narrowcast.')}"]
    if isinstance(thing, ModuleType):
        names = [[f"`{one}`", _summary(getattr(thing, one))] for one in thing.__all__]
        return "\n\n".join([*parts, _doc(thing), _table([f"`narrowcast.{name}`", ""], names)])
    parts += [f"```text\n{_signature(path, thing)}\n```", _doc(thing)]
    if isinstance(thing, type) and (members := [_member(*one) for one in _members(thing)]):
        parts.append("\n".join(members))
    return "\n\n".join(parts)


def _summary(thing: Any) -> str:
    """The first sentence of a docstring; of data, its type."""
    documented = isinstance(thing, ModuleType | type) or inspect.isroutine(thing)
    text = inspect.getdoc(thing) if documented else f"a {type(thing).__name__}"
    return " ".join((text or "").split("\n\n")[0].split()).replace("|", "\\|")


def python_reference() -> str:
    """Every public name with its arguments and its docstring."""
    return "\n\n".join(map(_entry, [*(f"narrowcast.{name}" for name in narrowcast.__all__), *RETURNED]))


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "families": ("formats.md", family_table),
    "formats": ("formats.md", format_table),
    "codecs": ("codecs.md", codec_table),
    "algorithms": ("collectives.md", algorithm_table),
    "python": ("api.md", python_reference),
    "verdicts": ("results.md", verdict_table),
    "results": ("results.md", result_table),
}


def filled(page: str, name: str, table: str) -> str:
    """The page with the table called `name` in its place."""
    place = re.compile(f"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if len(place.findall(page)) != 1:
        raise ValueError(f"the page needs the marker <!-- generated: {name} --> once, and <!-- end --> after it")
    return place.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page)


def main() -> None:
    """Write the tables, or with `--check` end with 1 where a page is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, (file, make) in TABLES.items():
        page = (DOCS / file).read_text()
        wanted = filled(page, name, make())
        if wanted != page and check:
            stale.append(f"docs/{file}: the table of {name} is out of date; run `python docs/generate.py`")
        elif wanted != page:
            (DOCS / file).write_text(wanted)
    sys.exit("\n".join(stale) or 0)


if __name__ == "__main__":
    main()
