"""Families that are registered late: names that were unknown before, and what an error does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import narrowcast as nc
from narrowcast.formats import all_formats, registry
from narrowcast.formats.codebooks import TableFormat
from narrowcast.formats.registry import Family, register_family


def parse(name: str) -> nc.Format | None:
    return TableFormat(name, (-1.0, 0.0, 1.0)) if name.startswith("late") else None


@pytest.fixture(autouse=True)
def forget_new_families() -> Iterator[None]:
    before = len(registry._FAMILIES)
    yield
    del registry._FAMILIES[before:]
    registry._in_families.cache_clear()


def test_a_name_that_was_unknown_is_found_once_its_family_is_there() -> None:
    with pytest.raises(ValueError, match="unknown format 'late1'"):
        nc.format("late1")
    register_family(Family("lateN", parse, ("late1",), "for tests"))
    assert nc.format("late1").values.tolist()[:3] == [-1.0, 0.0, 1.0]
    assert nc.format("late1") in list(all_formats())
    with pytest.raises(ValueError, match="unknown format 'nosuch'"):
        nc.format("nosuch")


def test_an_example_that_its_family_does_not_know_is_named() -> None:
    register_family(Family("lateN", parse, ("early1",), "for tests"))
    for listing in (lambda: list(all_formats()), lambda: nc.format("nosuch")):
        with pytest.raises(ValueError, match="family 'lateN': its example 'early1' is none of its members"):
            listing()
