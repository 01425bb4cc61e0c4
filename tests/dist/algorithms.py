"""What the registry says about the algorithms, for tests that go over all of them."""

from __future__ import annotations

from narrowcast.collectives import ALGORITHMS
from narrowcast.selftest import options, specs_for, takes

__all__ = ["flat_names", "nodes_of", "options", "simulated_names", "specs_for", "takes", "with_feedback"]

Nodes = tuple[tuple[int, ...], ...]


def nodes_of(world: int, size: int) -> Nodes:
    return tuple(tuple(range(first, first + size)) for first in range(0, world, size))


def flat_names(world: int) -> list[str]:
    """Those that take any codec on a world of that size and know no nodes."""
    return [name for name, one in ALGORITHMS.items() if not one.takes_nodes and takes(name, "mxfp4", world)]


def simulated_names(world: int) -> list[str]:
    """Those that can be simulated on a world of that size, with at least some codecs."""
    return [name for name, one in ALGORITHMS.items() if one.simulate and specs_for(name, ("mxfp4", "int8/64"), world)]


def with_feedback() -> list[str]:
    return [name for name, one in ALGORITHMS.items() if one.residual_shots]
