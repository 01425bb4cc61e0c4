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
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowcast.parallel.tensor_moves import PARTIAL, WHOLE, Layout, check, move
from narrowcast.parallel.wires import Direction, Wires


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


def _moved(
    x: Tensor, wires: Wires, there: tuple[Layout, Layout], back: tuple[Layout, Layout], length: int | None = None
) -> Tensor:
    check(x)
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
    return _moved(x, wires, (WHOLE, WHOLE), (PARTIAL, WHOLE))


def reduce(x: Tensor, wires: Wires) -> Tensor:
    """Out of such a part: the shares are added, the gradient goes to each as it is."""
    return _moved(x, wires, (PARTIAL, WHOLE), (WHOLE, WHOLE))


def all_gather(x: Tensor, wires: Wires, dim: int = 0, length: int | None = None) -> Tensor:
    """Shards along `dim` become the whole on every rank; the ranks' gradients are added, each keeps its shard's.

    length: of the whole along `dim`, where it does not divide by the number of ranks.
    """
    cut = _dimension("all_gather", x, dim)
    return _moved(x, wires, (cut, WHOLE), (PARTIAL, cut), length)


def reduce_scatter(x: Tensor, wires: Wires, dim: int = 0) -> Tensor:
    """The ranks' tensors are added, and each keeps its shard along `dim`; the shards' gradients are gathered."""
    cut = _dimension("reduce_scatter", x, dim)
    return _moved(x, wires, (PARTIAL, cut), (cut, WHOLE))


def split(x: Tensor, wires: Wires, dim: int = 0) -> Tensor:
    """Each rank keeps its shard of what all have; the shards' gradients are gathered."""
    cut = _dimension("split", x, dim)
    return _moved(x, wires, (WHOLE, cut), (cut, WHOLE))


def gather(x: Tensor, wires: Wires, dim: int = 0, length: int | None = None) -> Tensor:
    """Shards along `dim` become the whole, which all ranks use alike: each keeps its shard of the one gradient."""
    cut = _dimension("gather", x, dim)
    return _moved(x, wires, (cut, WHOLE), (WHOLE, cut), length)
