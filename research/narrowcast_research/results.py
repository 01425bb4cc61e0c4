"""What the papers say and what we found: the items of results.toml, with verdicts, commands and files."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("results.toml")
VERDICTS = ("reproduced", "partly", "refuted", "not run")
GROUPS = ("Dettmers", "Han et al.", "Grubic")
"""Papers with more than one item; the others are counted together."""


@dataclass(frozen=True)
class PaperItem:
    """One thing that a paper states."""

    number: int
    paper: str
    says: str
    verdict: str
    found: str
    """What came out, or why nothing did."""
    commands: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """In the repository: results, or where it is described."""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(
                f"results: item {self.number} has verdict {self.verdict!r}; take one of {', '.join(VERDICTS)}"
            )

    @property
    def group(self) -> str:
        return next((name for name in GROUPS if self.paper.startswith(name)), "others")


@cache
def items(file: Path = FILE) -> tuple[PaperItem, ...]:
    """All of them, in order."""
    found = tomllib.loads(file.read_text())["item"]
    return tuple(_item(one) for one in found)


def _item(given: dict[str, Any]) -> PaperItem:
    lists = {key: tuple(given.get(key, ())) for key in ("commands", "files")}
    return PaperItem(**(given | lists))
