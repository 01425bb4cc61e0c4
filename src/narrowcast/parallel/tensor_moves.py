"""A tensor from one layout over the ranks to another, through codecs; no autograd here.

A layout says what each rank holds: "whole" (the same tensor everywhere), "partial" (terms of a sum), or the number of
the dimension along which the tensor is cut into shards, one a rank, as `torch.chunk` cuts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.collectives import api
from narrowcast.collectives.work import Work
from narrowcast.kernels import FLOATS
from narrowcast.parallel.wires import Direction, Turn, Wires

Layout = int | str
WHOLE, PARTIAL = "whole", "partial"


def shard_sizes(length: int, world: int) -> list[int]:
    """How long each rank's shard is; late ones may be shorter, or empty."""
    full = -(-length // world)
    return [max(0, min(full, length - rank * full)) for rank in range(world)]


def check(x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"activations: got {x.dtype}; codecs take float32, float16 and bfloat16")


def all_reduce(x: Tensor, wires: Wires, direction: Direction) -> Tensor:
    """The sum over all ranks, in rank order, the same bits everywhere."""
    total = x.detach().clone(memory_format=torch.contiguous_format)

    def call(turn: Turn) -> Work | None:
        return api.all_reduce(total, turn.codec, group=wires.group, async_op=True, step=turn.step, seed=turn.seed)

    plain = 2 * (wires.world - 1) * x.numel() * x.element_size() // wires.world
    wires.run(direction, call, x.numel(), plain)
    return total


def all_gather(x: Tensor, dim: int, wires: Wires, direction: Direction, length: int | None = None) -> Tensor:
    """All shards in rank order along `dim`. length: that of the whole, where shards differ in size."""
    own = x.detach().contiguous()
    sizes = shard_sizes(x.shape[dim] * wires.world if length is None else length, wires.world)
    _expect("all_gather", own, dim, sizes[wires.rank])
    parts = [own.new_empty(*own.shape[:dim], size, *own.shape[dim + 1 :]) for size in sizes]

    def call(turn: Turn) -> Work | None:
        return api.all_gather(parts, own, turn.codec, wires.group, async_op=True, step=turn.step, seed=turn.seed)

    wires.run(direction, call, own.numel(), (wires.world - 1) * own.numel() * own.element_size())
    return torch.cat(parts, dim)


def reduce_scatter(x: Tensor, dim: int, wires: Wires, direction: Direction) -> Tensor:
    """This rank's shard along `dim` of the sum over all ranks, in rank order."""
    parts = [part.contiguous() for part in x.detach().split(shard_sizes(x.shape[dim], wires.world), dim)]
    own = torch.empty_like(parts[wires.rank])

    def call(turn: Turn) -> Work | None:
        group, op = wires.group, dist.ReduceOp.SUM
        return api.reduce_scatter(own, parts, turn.codec, op, group, async_op=True, step=turn.step, seed=turn.seed)

    wires.run(direction, call, x.numel(), (x.numel() - own.numel()) * x.element_size())
    return own


def all_to_all(x: Tensor, source: int, target: int, wires: Wires, direction: Direction, length: int) -> Tensor:
    """From shards along `source`, of a whole that is `length` long there, to shards along `target`."""
    rows = shard_sizes(length, wires.world)
    _expect("all_to_all", x, source, rows[wires.rank])
    parts = [part.contiguous() for part in x.detach().split(shard_sizes(x.shape[target], wires.world), target)]
    mine = parts[wires.rank]
    found = [mine.new_empty(*mine.shape[:source], size, *mine.shape[source + 1 :]) for size in rows]

    def call(turn: Turn) -> Work | None:
        return api.all_to_all(found, parts, turn.codec, wires.group, async_op=True, step=turn.step, seed=turn.seed)

    wires.run(direction, call, x.numel(), (x.numel() - mine.numel()) * x.element_size())
    return torch.cat(found, source)


def own_shard(x: Tensor, dim: int, wires: Wires) -> Tensor:
    """This rank's shard of a tensor that every rank has: nothing travels."""
    sizes = shard_sizes(x.shape[dim], wires.world)
    return x.detach().narrow(dim, sum(sizes[: wires.rank]), sizes[wires.rank]).contiguous()


def move(
    x: Tensor, source: Layout, target: Layout, wires: Wires, direction: Direction, length: int | None = None
) -> Tensor:
    """From one layout to another. length: of the whole along the dimension of `source`, where that is one."""
    if source == target or wires.world == 1:
        # one rank: nothing travels, so nothing is rounded
        return x
    check(x)
    if isinstance(source, int):
        length = x.shape[source] * wires.world if length is None else length
        if isinstance(target, int):
            return all_to_all(x, source, target, wires, direction, length)
        if target == WHOLE:
            return all_gather(x, source, wires, direction, length)
    elif isinstance(target, int):
        return reduce_scatter(x, target, wires, direction) if source == PARTIAL else own_shard(x, target, wires)
    elif source == PARTIAL:
        return all_reduce(x, wires, direction)
    raise ValueError(f"activations: there is no way from layout {source!r} to {target!r}; reduce or gather first")


def _expect(what: str, x: Tensor, dim: int, size: int) -> None:
    if x.shape[dim] != size:
        raise ValueError(
            f"{what}: this rank's shard has {x.shape[dim]} values along dimension {dim}, but {size} are its share; "
            "cut as torch.chunk does, or give the length of the whole"
        )
