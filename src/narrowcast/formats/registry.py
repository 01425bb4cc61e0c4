"""The list of formats: single ones by name, families by pattern."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from narrowcast.formats.base import MAX_BITS, Format

F = TypeVar("F", bound=Format)

NUMBER = r"(0|[1-9][0-9]*)"
"""A number in a name, as a group of a pattern: without leading zeros, so that each format has one spelling."""


@dataclass(frozen=True)
class Family:
    """Formats that one pattern names, like eXmY."""

    pattern: str
    parse: Callable[[str], Format | None]
    """None where the name is not of this family; ValueError where it is, but out of range."""
    examples: tuple[str, ...]
    """Members that the listing shows and that every test over the registry runs on."""
    meaning: str


def parser(pattern: str, make: Callable[..., Format]) -> Callable[[str], Format | None]:
    """The `parse` of a family whose names match `pattern`: `make` of the name and the pattern's groups."""
    compiled = re.compile(pattern)

    def parse(name: str) -> Format | None:
        match = compiled.fullmatch(name)
        return None if match is None else make(name, *match.groups())

    return parse


_FORMATS: dict[str, Format] = {}
_FAMILIES: list[Family] = []
_ON_UNREGISTER: list[Callable[[], None]] = []
_IN_USE: list[Callable[[str], bool]] = []


def register(fmt: F) -> F:
    """Make `fmt` known by its name, everywhere: specs, listing, docs table, tests."""
    if not re.fullmatch(r"[a-z][a-z0-9.]*", fmt.name):
        raise ValueError(f"format name {fmt.name!r}: use small letters, digits and '.', so that it can stand in a spec")
    if _FORMATS.get(fmt.name) == fmt:
        return fmt
    taken = fmt.name in _FORMATS or any(in_use(fmt.name) for in_use in _IN_USE)
    if taken or any(family.parse(fmt.name) for family in _FAMILIES):
        raise ValueError(f"format name {fmt.name!r} is taken; choose another")
    if not 1 <= fmt.bits <= MAX_BITS:
        raise ValueError(f"format {fmt.name!r} has {fmt.bits} bits; formats have 1 to {MAX_BITS}")
    _FORMATS[fmt.name] = fmt
    return fmt


def unregister(name: str) -> None:
    """Forget a format that a test or a notebook registered."""
    del _FORMATS[name]
    for forget in _ON_UNREGISTER:
        forget()


def on_unregister(forget: Callable[[], None]) -> None:
    """For whoever caches by name: call `forget` when a name ceases to mean what it did."""
    _ON_UNREGISTER.append(forget)


def names_in_use(in_use: Callable[[str], bool]) -> None:
    """For whoever gives meanings to names that are no formats: where `in_use(name)`, no format may take it."""
    _IN_USE.append(in_use)


def register_family(family: Family) -> None:
    """Make all names of a pattern known; names that were unknown before may be its members."""
    _FAMILIES.append(family)
    _in_families.cache_clear()


@cache
def _in_families(name: str) -> Format | None:
    members = (family.parse(name) for family in _FAMILIES)
    return next((fmt for fmt in members if fmt is not None), None)


def find(name: str) -> Format | None:
    """The format called `name`, or None; ValueError where a family knows the name but not these numbers."""
    return _FORMATS.get(name) or _in_families(name)


def format(name: str) -> Format:
    """The format called `name`, such as "e4m3fn", "int4", "posit8.1" or "dtree8"."""
    fmt = find(name)
    if fmt is None:
        near = difflib.get_close_matches(name, [other.name for other in all_formats()], n=3)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise ValueError(f"unknown format {name!r}; {hint}`narrowcast formats` lists them all")
    return fmt


def all_formats() -> Iterator[Format]:
    """Every registered format and the examples of every family."""
    for family in _FAMILIES:
        for name in family.examples:
            fmt = find(name)  # not `format`, whose error lists all formats
            if fmt is None:
                problem = f"its example {name!r} is none of its members"
                raise ValueError(f"family {family.pattern!r}: {problem}; name one that is")
            yield fmt
    yield from _FORMATS.values()


def families() -> tuple[Family, ...]:
    return tuple(_FAMILIES)
