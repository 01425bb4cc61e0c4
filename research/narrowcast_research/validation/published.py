"""The tables that ship with the package."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

DATA = Path(__file__).with_name("data")

Row = dict[str, str]


@cache
def rows(name: str) -> tuple[Row, ...]:
    with (DATA / name).open(newline="") as file:
        return tuple(csv.DictReader(file))
