"""Simulated exchanges: a ring beside the same arithmetic in eager torch, and many workers by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import codec
from narrowcast.collectives import agreed_scale_S, split
from narrowcast.measure import Timing, interleaved
from narrowcast.simulate import World, largest_WS

SPEC = "e5m2+aps"
RESNET18 = 11_173_962
"""Parameters of a ResNet-18 for CIFAR-10."""
WORKERS, ROUNDS = 8, 5
TARGET = 5.0
"""How many times faster than eager torch a ring of 8 workers has to be."""
MANY, MANY_VALUES = 256, 1_000_000
MANY_CASES = (
    *(("two_shot", "int8/256"), ("two_shot", "e5m2+aps"), ("ring", "e5m2+aps"), ("ring", "int4/128+sr")),
    *(("tree", "mxfp4"), ("one_shot", "dtree8"), ("hierarchical", "e5m2+aps"), ("two_shot", "int4/128+sr+ef")),
)

Cast = Callable[[Tensor, Tensor], Tensor]
"""Of values and the power of two that they are in units of."""


@dataclass(frozen=True)
class Row:
    """One exchange; `times` is how many times faster than the peer."""

    what: str
    workers: int
    values: int
    seconds: float
    peer: str = ""
    peer_seconds: float | None = None
    target: float | None = None

    @property
    def times(self) -> float | None:
        return None if self.peer_seconds is None else self.peer_seconds / self.seconds

    @property
    def met(self) -> bool | None:
        return None if self.target is None or self.times is None else self.times >= self.target

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"times": self.times, "met": self.met}


def eager_cast(x: Tensor, unit: Tensor) -> Tensor:
    """e5m2 in torch's own operations, as one would write any small float."""
    t = x / unit
    step = torch.ldexp(torch.ones_like(t), torch.frexp(t).exponent.clamp(min=-13) - 3)
    return ((t / step).round() * step).clamp(-57344.0, 57344.0) * unit


def float8_cast(x: Tensor, unit: Tensor) -> Tensor:
    """The one such format that torch has a type for."""
    return (x / unit).to(torch.float8_e5m2).float() * unit


def eager_sum(x_Wn: Tensor, cast: Cast) -> Tensor:
    """Worker after worker: add, then cast."""
    unit = agreed_scale_S(codec(SPEC), largest_WS(x_Wn, [x_Wn.shape[1]]))
    total = cast(x_Wn[0], unit)
    for row in x_Wn[1:]:
        total = cast(total + row, unit)
    return total


def eager_ring(x_Wn: Tensor, cast: Cast) -> Tensor:
    """The same, with each shard in the order of the ring: slower, and what the ring is checked against."""
    world, n = x_Wn.shape
    unit, parts = agreed_scale_S(codec(SPEC), largest_WS(x_Wn, [n])), []
    for shard, (low, high) in enumerate(split((0, n), world, 16)):
        order = [(shard + 1 + hop) % world for hop in range(world)]
        total = cast(x_Wn[order[0], low:high], unit)
        for worker in order[1:]:
            total = cast(x_Wn[worker, low:high] + total, unit)
        parts.append(total)
    return torch.cat(parts)


PEERS: dict[str, Cast] = {"eager torch": eager_cast, "torch.float8_e5m2": float8_cast}


def failure() -> str | None:
    """What differs between the ring and eager torch, or None: no speed without equal bits."""
    x_Wn = torch.randn(WORKERS, 100_003, generator=torch.Generator().manual_seed(0)) * 1e-3
    ours = World(WORKERS, "ring", SPEC).all_reduce(x_Wn)[0]
    for name, cast in PEERS.items():
        if not torch.equal(ours, eager_ring(x_Wn, cast)):
            return f"the ring differs from {name}"
    return None


def run(values: int = RESNET18, rounds: int = ROUNDS, many: bool = True) -> Iterator[Row]:
    """The ring beside its peers, then `MANY` workers with each algorithm."""
    if why := failure():
        raise RuntimeError(f"bench simulate: {why}; nothing was timed")
    found = _timed(values, rounds)
    for name in PEERS:
        target = TARGET if name == "eager torch" else None
        yield Row(f"ring {SPEC}", WORKERS, values, found["ours"].median, name, found[name].median, target)
    yield from _many() if many else ()


def _timed(values: int, rounds: int) -> dict[str, Timing]:
    x_Wn, ring = torch.randn(WORKERS, values, generator=torch.Generator().manual_seed(0)), World(WORKERS, "ring", SPEC)
    candidates: dict[str, Callable[[], object]] = {name: partial(eager_sum, x_Wn, cast) for name, cast in PEERS.items()}
    return interleaved({"ours": partial(ring.all_reduce, x_Wn), **candidates}, rounds)


def _many() -> Iterator[Row]:
    x_Wn = torch.randn(MANY, MANY_VALUES, generator=torch.Generator().manual_seed(0)) * 1e-3
    for algorithm, spec in MANY_CASES:
        world = World(MANY, algorithm, spec, groups=16 if algorithm == "hierarchical" else None)
        start = time.perf_counter()
        world.all_reduce(x_Wn, "avg", step=0)
        yield Row(f"{algorithm} {spec}", MANY, MANY_VALUES, time.perf_counter() - start)
