"""What both ends of a link know: the values that the messages on it have built up so far.

A message is the difference between where its sender is and what its targets know of that (CHOCO-SGD, Koloskova et al.
2019). So few bits do, and what rounding left out is in the next difference: nothing is lost, with no residual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.parallel.local_sgd.graph import Link, Neighbourhood

PROBED, ENOUGH, LEAST = 1 << 14, 0.9, 0.01
"""Values by which a wire is judged, and between which bounds."""
Known = tuple[Link, int]
"""A link and the sender on it: both ends keep what the sender's messages have built up."""


class Copies:
    """By link, sender and parameter. All begin with what all workers had in common.

    A worker needs those of its own messages and those of what it hears; a simulation one for both ends.
    """

    def __init__(self) -> None:
        self._common: dict[str, Tensor] = {}
        self._kept: dict[tuple[Known, str], Tensor] = {}

    def meet(self, values: Mapping[str, Tensor]) -> None:
        """All workers have these values now."""
        self._common |= {name: value.clone().reshape(-1) for name, value in values.items()}
        self._kept = {key: value for key, value in self._kept.items() if key[1] not in values}

    def keep_to(self, kind: str, names: Sequence[str]) -> None:
        """These parameters travel on another graph from now on: what the old one's links knew is of no use."""
        for known, name in [*self._kept]:
            if name in names and known[0][0] != kind:
                del self._kept[known, name]

    def flat(self, known: Known, names: Sequence[str]) -> Tensor:
        """What is known of these parameters, one after another."""
        return torch.cat([self._of(known, name) for name in names])

    def add(self, known: Known, names: Sequence[str], seen: Tensor) -> Tensor:
        """What a message brought; returns what is known then. What is not finite is shown, and not kept."""
        parts = [self._of(known, name) for name in names]
        finite = seen.isfinite()
        for part, more in zip(parts, torch.where(finite, seen, 0.0).split([p.numel() for p in parts]), strict=True):
            part.add_(more)
        return torch.where(finite, torch.cat(parts), seen)

    def state(self) -> list[Any]:
        """In plain values, for a checkpoint of all of them."""
        kept = [[*known[0], known[1], name, value] for (known, name), value in self._kept.items()]
        return [dict(self._common), kept]

    def load(self, state: list[Any]) -> None:
        """Go on from there."""
        self._common = dict(state[0])
        self._kept = {(((kind, number), who), name): value for kind, number, who, name, value in state[1]}

    def _of(self, known: Known, name: str) -> Tensor:
        key = known, name
        if key not in self._kept:
            self._kept[key] = self._common[name].clone()
        return self._kept[key]


def to_send(x: Tensor, codec: Codec, copies: Copies, known: Known, names: Sequence[str]) -> Tensor:
    """The values themselves where the wire brings all of them, else the difference to what is known."""
    return x if codec.lossless else x - copies.flat(known, names)


def seen(message: Tensor, codec: Codec, copies: Copies, known: Known, names: Sequence[str]) -> Tensor:
    """What is known of the sender when a message has come."""
    return message if codec.lossless else copies.add(known, names, message)


@lru_cache(maxsize=256)
def consensus_of(asked: float | None, codec: Codec) -> float:
    """The part of the way that workers go. Unless somebody said it: what a message brings of the energy of normal
    values, in hundredths, and all of the way from nine tenths on. Whoever followed a copy that lags all the way would
    go past it, further each time.
    """
    if asked is not None:
        return asked
    if codec.lossless:
        return 1.0
    x = torch.randn(PROBED, generator=torch.Generator().manual_seed(0))
    lost = codec.decode(codec.encode(x), PROBED) - x
    brought = round(1.0 - float(lost.double().square().sum() / x.double().square().sum()), 2)
    return 1.0 if brought >= ENOUGH else max(brought, LEAST)


def pull(own: Tensor, theirs: Sequence[Tensor], seat: Neighbourhood, consensus: float) -> Tensor:
    """How far a worker goes towards its neighbours: by what both ends know, so that the mean over all stays."""
    total = torch.zeros_like(own)
    for other in theirs:
        total = total + seat.weight * (other - own)
    return consensus * total
