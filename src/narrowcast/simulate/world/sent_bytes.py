"""How many bytes each worker would send: from sizes alone, nothing is encoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from narrowcast.collectives.algorithms.two_shot import chunks_of
from narrowcast.collectives.segments import Coder, Range, split

if TYPE_CHECKING:
    from narrowcast.simulate.world.world import World


def sent_bytes(algorithm: str, world: World, segments: Sequence[int], dtype: torch.dtype) -> list[int]:
    """By worker, for an all_reduce of these segments."""
    n, numel = world.n, sum(segments)
    if n == 1 or numel == 0:
        return [0] * n
    coder = Coder(world.codec, segments, dtype)
    if algorithm == "hierarchical":
        sent = _hierarchical(world, coder, dtype)
    elif algorithm == "shared_scale":
        blocks = -(-numel // coder.codec.block)
        sent = [2 * (n - 1) * (blocks * coder.codec.block + 4 * blocks) // n + n - 1] * n
    else:
        sent = {"one_shot": _one_shot, "two_shot": _two_shot, "ring": _ring, "tree": _tree}[algorithm](coder, n)
    exponents = 4 * (n - 1) * len(segments) if world.codec.agrees_on_scales else 0
    return [count + exponents for count in sent]


def _one_shot(coder: Coder, n: int) -> list[int]:
    return [(n - 1) * coder.nbytes((0, coder.numel))] * n


def _two_shot(coder: Coder, n: int) -> list[int]:
    """A worker sends every shard but its own once, and its own finished one to everybody."""
    chunks = chunks_of(split((0, coder.numel), n, coder.align), coder)
    sizes = [sum(coder.nbytes(chunk) for chunk in shard) for shard in chunks]
    return [sum(sizes) + (n - 2) * own for own in sizes]


def _ring(coder: Coder, n: int) -> list[int]:
    """A worker passes every shard on twice, but for the one that it finishes and the one that ends with it."""
    sizes = [coder.nbytes(shard) for shard in split((0, coder.numel), n, coder.align)]
    return [2 * sum(sizes) - sizes[rank] - sizes[(rank + 1) % n] for rank in range(n)]


def _tree(coder: Coder, n: int) -> list[int]:
    shards = split((0, coder.numel), n, coder.align)
    distances = [n >> level for level in range(1, n.bit_length())]
    halves = [sum(_span_bytes(coder, shards, rank ^ d, d) for d in distances) for rank in range(n)]
    doubled = [sum(sum(coder.nbytes(shards[k]) for k in _block(rank, d)) for d in distances) for rank in range(n)]
    return [a + b for a, b in zip(halves, doubled, strict=True)]


def _block(rank: int, size: int) -> range:
    return range(rank // size * size, rank // size * size + size)


def _span_bytes(coder: Coder, shards: list[Range], rank: int, size: int) -> int:
    block = _block(rank, size)
    return coder.nbytes((shards[block[0]][0], shards[block[-1]][1]))


def _hierarchical(world: World, outer: Coder, dtype: torch.dtype) -> list[int]:
    assert world.nodes is not None
    inner = Coder(world.inner, [high - low for low, high in outer.segments], dtype)
    parts = split((0, outer.numel), len(world.nodes[0]), math.lcm(inner.align, outer.align))
    sent = [0] * world.n
    sizes = [inner.nbytes(part) for part in parts]
    for place, part in enumerate(parts):
        lengths = [min(b, part[1]) - max(a, part[0]) for a, b in outer.segments if max(a, part[0]) < min(b, part[1])]
        between = _two_shot(Coder(outer.codec, lengths, torch.float32), len(world.nodes)) if lengths else None
        for number, node in enumerate(world.nodes):
            inside = sum(sizes) + (len(node) - 2) * sizes[place]
            sent[node[place]] = inside + (between[number] if between else 0)
    return sent
