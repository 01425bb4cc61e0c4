"""Tensor parallelism by hand: collectives that autograd can go through, each direction with its own spec.

| function | forward | backward |
|---|---|---|
| `copy` (Megatron's f) | nothing | all-reduce |
| `reduce` (Megatron's g) | all-reduce | nothing |
| `all_gather` | all-gather | reduce-scatter |
| `reduce_scatter` | reduce-scatter | all-gather |
| `split` | keep the own shard | all-gather |
| `gather` | all-gather | keep the own shard |

`all_gather` is for what each rank goes on to use in its own way (a column-parallel layer), `gather` for what all ranks
go on to use alike (the loss).

A layout says what each rank holds: "whole" (the same tensor everywhere), "partial" (terms of a sum), or the number of
the dimension along which the tensor is cut into shards, one a rank, as `torch.chunk` cuts. `move` goes from one layout
to another, without autograd.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.collectives import Work, api
from narrowcast.kernels import FLOATS
from narrowcast.parallel.wires import Direction, Turn, Wires

Layout = int | str
WHOLE, PARTIAL = "whole", "partial"


def shard_sizes(length: int, world: int) -> list[int]:
    """How long each rank's shard is; late ones may be shorter, or empty."""
    full = -(-length // world)
    return [max(0, min(full, length - rank * full)) for rank in range(world)]


def check_activation(x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"activations: got {x.dtype}; codecs take float32, float16 and bfloat16")


def _sum_everywhere(x: Tensor, wires: Wires, direction: Direction) -> Tensor:
    """The sum over all ranks, in rank order, the same bits everywhere."""
    total = x.detach().clone(memory_format=torch.contiguous_format)

    def call(turn: Turn) -> Work | None:
        return api.all_reduce(total, turn.codec, group=wires.group, async_op=True, step=turn.step, seed=turn.seed)

    plain = 2 * (wires.world - 1) * x.numel() * x.element_size() // wires.world
    wires.run(direction, call, x.numel(), plain)
    return total


def _gather_shards(x: Tensor, dim: int, wires: Wires, direction: Direction, length: int | None = None) -> Tensor:
    """All shards in rank order along `dim`. length: that of the whole, where shards differ in size."""
    own = x.detach().contiguous()
    sizes = shard_sizes(x.shape[dim] * wires.world if length is None else length, wires.world)
    _check_size("all_gather", own, dim, sizes[wires.rank])
    parts = [own.new_empty(*own.shape[:dim], size, *own.shape[dim + 1 :]) for size in sizes]

    def call(turn: Turn) -> Work | None:
        return api.all_gather(parts, own, turn.codec, wires.group, async_op=True, step=turn.step, seed=turn.seed)

    wires.run(direction, call, own.numel(), (wires.world - 1) * own.numel() * own.element_size())
    return torch.cat(parts, dim)


def _sum_to_shards(x: Tensor, dim: int, wires: Wires, direction: Direction) -> Tensor:
    """This rank's shard along `dim` of the sum over all ranks, in rank order."""
    parts = [part.contiguous() for part in x.detach().split(shard_sizes(x.shape[dim], wires.world), dim)]
    own = torch.empty_like(parts[wires.rank])

    def call(turn: Turn) -> Work | None:
        group, op = wires.group, dist.ReduceOp.SUM
        return api.reduce_scatter(own, parts, turn.codec, op, group, async_op=True, step=turn.step, seed=turn.seed)

    wires.run(direction, call, x.numel(), (x.numel() - own.numel()) * x.element_size())
    return own


def _cut_elsewhere(x: Tensor, source: int, target: int, wires: Wires, direction: Direction, length: int) -> Tensor:
    """From shards along `source`, of a whole that is `length` long there, to shards along `target`."""
    rows = shard_sizes(length, wires.world)
    _check_size("all_to_all", x, source, rows[wires.rank])
    parts = [part.contiguous() for part in x.detach().split(shard_sizes(x.shape[target], wires.world), target)]
    mine = parts[wires.rank]
    received = [mine.new_empty(*mine.shape[:source], size, *mine.shape[source + 1 :]) for size in rows]

    def call(turn: Turn) -> Work | None:
        return api.all_to_all(received, parts, turn.codec, wires.group, async_op=True, step=turn.step, seed=turn.seed)

    wires.run(direction, call, x.numel(), (x.numel() - mine.numel()) * x.element_size())
    return torch.cat(received, source)


def _own_shard(x: Tensor, dim: int, wires: Wires) -> Tensor:
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
    check_activation(x)
    if isinstance(source, int):
        length = x.shape[source] * wires.world if length is None else length
        if isinstance(target, int):
            return _cut_elsewhere(x, source, target, wires, direction, length)
        if target == WHOLE:
            return _gather_shards(x, source, wires, direction, length)
    elif isinstance(target, int):
        return _sum_to_shards(x, target, wires, direction) if source == PARTIAL else _own_shard(x, target, wires)
    elif source == PARTIAL:
        return _sum_everywhere(x, wires, direction)
    raise ValueError(f"activations: there is no way from layout {source!r} to {target!r}; reduce or gather first")


def _check_size(what: str, x: Tensor, dim: int, size: int) -> None:
    if x.shape[dim] != size:
        raise ValueError(
            f"{what}: this rank's shard has {x.shape[dim]} values along dimension {dim}, but {size} are its share; "
            "cut as torch.chunk does, or give the length of the whole"
        )


class _Move(torch.autograd.Function):
    """A tensor from layout `there[0]` to `there[1]`; its gradient from `back[0]` to `back[1]`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        wires: Wires,
        there: tuple[Layout, Layout],
        back: tuple[Layout, Layout],
        length: int | None,
    ) -> Tensor:
        ctx.wires, ctx.back = wires, back
        # the gradient begins with the layout of the result, whose whole is as long as the input's
        ctx.length = x.shape[back[0]] if isinstance(back[0], int) else None
        moved = move(x, *there, wires, Direction.FORWARD, length)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return (
            move(gradient, ctx.back[0], ctx.back[1], ctx.wires, Direction.BACKWARD, ctx.length),
            None,
            None,
            None,
            None,
        )


def _apply(
    x: Tensor, wires: Wires, there: tuple[Layout, Layout], back: tuple[Layout, Layout], length: int | None = None
) -> Tensor:
    check_activation(x)
    return _Move.apply(x, wires, there, back, length)


def _dimension(what: str, x: Tensor, dim: int) -> int:
    """As torch counts them, from either end."""
    if not -x.dim() <= dim < x.dim():
        raise IndexError(
            f"{what}: dim={dim} of a tensor of shape {tuple(x.shape)}; give one of its {x.dim()} dimensions"
        )
    return dim % x.dim()


def copy(x: Tensor, wires: Wires) -> Tensor:
    """Into a part of the model that each rank computes a share of: the gradients of the shares are added."""
    return _apply(x, wires, (WHOLE, WHOLE), (PARTIAL, WHOLE))


def reduce(x: Tensor, wires: Wires) -> Tensor:
    """Out of such a part: the shares are added, the gradient goes to each as it is."""
    return _apply(x, wires, (PARTIAL, WHOLE), (WHOLE, WHOLE))


def all_gather(x: Tensor, wires: Wires, dim: int = 0, length: int | None = None) -> Tensor:
    """Shards along `dim` become the whole on every rank; the ranks' gradients are added, each keeps its shard's.

    length: of the whole along `dim`, where it does not divide by the number of ranks.
    """
    cut = _dimension("all_gather", x, dim)
    return _apply(x, wires, (cut, WHOLE), (PARTIAL, cut), length)


def reduce_scatter(x: Tensor, wires: Wires, dim: int = 0) -> Tensor:
    """The ranks' tensors are added, and each keeps its shard along `dim`; the shards' gradients are gathered."""
    cut = _dimension("reduce_scatter", x, dim)
    return _apply(x, wires, (PARTIAL, cut), (cut, WHOLE))


def split(x: Tensor, wires: Wires, dim: int = 0) -> Tensor:
    """Each rank keeps its shard of what all have; the shards' gradients are gathered."""
    cut = _dimension("split", x, dim)
    return _apply(x, wires, (WHOLE, cut), (cut, WHOLE))


def gather(x: Tensor, wires: Wires, dim: int = 0, length: int | None = None) -> Tensor:
    """Shards along `dim` become the whole, which all ranks use alike: each keeps its shard of the one gradient."""
    cut = _dimension("gather", x, dim)
    return _apply(x, wires, (cut, WHOLE), (WHOLE, cut), length)
