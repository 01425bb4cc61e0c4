"""What the registry says about the algorithms, for tests that go over all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

import narrowcast as nc
from narrowcast.collectives.algorithms import record
from narrowcast.collectives.algorithms.record import ALGORITHMS

Nodes = tuple[tuple[int, ...], ...]


def nodes_of(world: int, size: int) -> Nodes:
    return tuple(tuple(range(first, first + size)) for first in range(0, world, size))


def options(name: str, world: int) -> dict[str, Nodes]:
    """What a call needs beside its name."""
    size = 2 if world % 2 == 0 else 1
    return {"nodes": nodes_of(world, size)} if ALGORITHMS[name].takes_nodes else {}


def takes(name: str, spec: str, world: int) -> bool:
    try:
        record.check(name, nc.codec(spec), world, options(name, world).get("nodes"))
    except ValueError:
        return False
    return True


def specs_for(name: str, specs: Iterable[str], world: int) -> list[str]:
    """Those that it takes; without +ef where it keeps no residuals."""
    plain = [spec if ALGORITHMS[name].residual_shots else re.sub(r"\+ef[0-9]*$", "", spec) for spec in specs]
    return [spec for spec in dict.fromkeys(plain) if takes(name, spec, world)]


def flat_names(world: int) -> list[str]:
    """Those that take any codec on a world of that size and know no nodes."""
    return [name for name, one in ALGORITHMS.items() if not one.takes_nodes and takes(name, "mxfp4", world)]


def simulated_names(world: int) -> list[str]:
    """Those that can be simulated on a world of that size, with at least some codecs."""
    return [name for name, one in ALGORITHMS.items() if one.simulate and specs_for(name, ("mxfp4", "int8/64"), world)]


def with_feedback() -> list[str]:
    return [name for name, one in ALGORITHMS.items() if one.residual_shots]
