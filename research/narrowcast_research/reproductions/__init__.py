"""Tables and effects of papers, made again: each a command, `narrowcast simulate NAME`, and a list of cells."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowcast_research.reproductions.base import Reproduction

HOMES = {
    "aps-cifar10": ("aps_cifar10", "ApsCifar10"),
    "aps-roundoff": ("aps_roundoff", "ApsRoundoff"),
    "aps-rivals": ("aps_rivals", "ApsRivals"),
    "aps-speed": ("aps_speed", "ApsSpeed"),
    "aps-e3m0": ("aps_e3m0", "ApsE3m0"),
    "dettmers-mnist": ("dettmers_mnist", "DettmersMnist"),
    "dettmers-errors": ("dettmers_errors", "DettmersErrors"),
    "gupta-fixed": ("gupta", "GuptaFixed"),
    "zamirai-bf16": ("zamirai", "ZamiraiBf16"),
    "pure16": ("pure16", "Pure16"),
    "muppet": ("muppet", "Muppet"),
    "fp8-lm": ("fp8lm", "Fp8Lm"),
    "lee-assignment": ("lee", "LeeAssignment"),
    "mellempudi-loss-scale": ("mellempudi", "Mellempudi"),
    "lu-posit": ("lu", "LuPosit"),
    "mogami": ("mogami", "Mogami"),
    "noune-logmax": ("noune", "NouneLogMax"),
    "positnn-quire": ("positnn", "PositNN"),
    "svyatkovskiy-rnn": ("svyatkovskiy", "SvyatkovskiyRnn"),
}
"""Every reproduction: its file and its class."""


def named(name: str) -> Reproduction:
    """A reproduction by its name."""
    if name not in HOMES:
        raise ValueError(f"simulate: there is no reproduction {name!r}; there are {', '.join(HOMES)}")
    file, kind = HOMES[name]
    return getattr(import_module(f"{__name__}.{file}"), kind)()
