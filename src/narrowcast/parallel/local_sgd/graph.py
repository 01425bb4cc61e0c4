"""With whom a worker averages: the graphs of neighbour averaging.

In every round the weights are doubly stochastic (what a worker gives and what it gets both add up to 1), so that the
mean over all workers stays what it was.

- "ring": the worker before and the one after, a third each.
- "exponential": half of the worker 2^k before, k = round mod ceil(log2 W): after so many rounds everybody has heard of
  everybody. It is the one-peer exponential graph (Ying et al. 2021): one message a round, however many workers.
- "pairs": half of a partner. ceil(log2 W) sets of disjoint pairs are drawn with the seed, and take turns; where W is
  odd one worker of each set is alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from narrowcast.kernels import derive

ALL = "all"
KINDS = (ALL, "ring", "exponential", "pairs")
ATTEMPTS = 1000
Link = tuple[str, int]
"""A kind, and which of its sets of edges: what travels on one is known to its two ends alone."""


@dataclass(frozen=True)
class Neighbourhood:
    """A worker's place in a round: whom it sends to, whom it hears, and what each of them weighs."""

    link: Link
    targets: tuple[int, ...]
    sources: tuple[int, ...]

    @property
    def weight(self) -> float:
        """Of each source; what is left is the worker's own."""
        return 1.0 / (1 + len(self.sources))


def seat(kind: str, round_: int, rank: int, world: int, seed: int) -> Neighbourhood:
    """Of one worker in one round. seed: the same on all workers."""
    link = kind, round_ % sets(kind, world)
    if kind == "ring":
        both = tuple(dict.fromkeys(((rank - 1) % world, (rank + 1) % world)))
        peers = tuple(peer for peer in both if peer != rank)
        return Neighbourhood(link, peers, peers)
    if kind == "exponential":
        hop = 1 << link[1]
        return (
            Neighbourhood(link, (), ())
            if world == 1
            else Neighbourhood(link, ((rank + hop) % world,), ((rank - hop) % world,))
        )
    partner = pairings(world, seed)[link[1]][rank]
    peers = () if partner == rank else (partner,)
    return Neighbourhood(link, peers, peers)


def sets(kind: str, world: int) -> int:
    """How many sets of edges take turns."""
    return 1 if kind == "ring" else max(1, (world - 1).bit_length())


@lru_cache(maxsize=16)
def pairings(world: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """The partner of each worker in each set of pairs; drawn again until the sets together join all workers."""
    for attempt in range(ATTEMPTS):
        drawn = tuple(_pairing(world, derive(seed, attempt, number)) for number in range(sets("pairs", world)))
        if _joins_all(drawn, world):
            return drawn
    raise RuntimeError(f"internal: no pairs of {world} workers with seed {seed} join them all")


def _pairing(world: int, seed: int) -> tuple[int, ...]:
    order = torch.randperm(world, generator=torch.Generator().manual_seed(seed)).tolist()
    partner = list(range(world))
    for one, other in zip(order[0 : world - 1 : 2], order[1::2], strict=True):
        partner[one], partner[other] = other, one
    return tuple(partner)


def _joins_all(pairings_: tuple[tuple[int, ...], ...], world: int) -> bool:
    reached, new = {0}, [0]
    while new:
        rank = new.pop()
        found = {partner[rank] for partner in pairings_} - reached
        reached |= found
        new += found
    return len(reached) == world
