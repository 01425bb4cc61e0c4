"""Calls in two shots: everybody encodes for everybody, sums what came, and everybody gets the sums; in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.runtime.shots import Gather, Scatter, gather_together, scatter_together


class Shots(Protocol):
    """What one call does in a round."""

    first: list[int]
    """Bytes to each rank in the first shot; empty: there is none."""
    second: list[int]
    """Bytes of each rank in the second."""

    def encode(self, wires: Scatter) -> None:
        """Write and send the wire to each rank, where there is a first shot."""

    def reduce(self, arrived: Tensor | None, wires: Gather) -> None:
        """Make one wire of what came, one a row, and send it."""

    def collect(self, wires: Gather) -> None:
        """Read everybody's."""


def run(exchange: Exchange, rounds: Sequence[Sequence[Shots]]) -> None:
    """While round r is on the wire, r-1 is summed and r+1 encoded; what one round has travels together."""
    first = [_scatter(exchange, each, 2 * r) for r, each in enumerate(rounds)]
    # numbers grow in the order of sending: 0, 1, sums of 0, 2, sums of 1, ...
    second = [gather_together(exchange, [one.second for one in each], 2 * r + 3) for r, each in enumerate(rounds)]
    for step in range(len(rounds) + 2):
        if step < len(rounds):
            for one, leaving in zip(rounds[step], first[step], strict=True):
                if leaving is not None:
                    one.encode(leaving)
        if 0 <= step - 1 < len(rounds):
            for one, arriving, own in zip(rounds[step - 1], first[step - 1], second[step - 1], strict=True):
                one.reduce(None if arriving is None else arriving.arrived(), own)
        if step == len(rounds):
            exchange.all_sent()
        if step >= 2:
            for one, gathered in zip(rounds[step - 2], second[step - 2], strict=True):
                one.collect(gathered)
    exchange.finish()


def _scatter(exchange: Exchange, each: Sequence[Shots], index: int) -> list[Scatter | None]:
    sizes = [one.first for one in each if one.first]
    wires = iter(scatter_together(exchange, sizes, index) if sizes else ())
    return [next(wires) if one.first else None for one in each]
