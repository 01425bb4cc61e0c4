"""The tensors of all workers in the ways in which people have them, as one W x n tensor and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.collectives.segments import segment_ranges
from narrowcast.kernels import FLOATS

Tensors = Any
"""A tensor W x ..., or a list with one entry for each worker: a tensor, or a list of tensors (segments)."""


@dataclass(frozen=True)
class Stack:
    """Rows of one flat tensor each, and the way back from one flat row to what a worker would hold."""

    x_Wn: Tensor
    lengths: list[int]
    shaped: Callable[[Tensor], Any]
    """From a flat row of n values to one worker's tensor or list of tensors."""
    is_one_tensor: bool

    def for_all(self, row: Tensor) -> Any:
        """The same row for every worker: views of one memory, since all hold the same bits."""
        if self.is_one_tensor:
            one = self.shaped(row)
            return one.expand(len(self.x_Wn), *one.shape)
        return [self.shaped(row) for _ in range(len(self.x_Wn))]


def stacked(what: str, tensors: Tensors, world: int, segments: Sequence[int] | None = None) -> Stack:
    """Check and stack. `segments` cuts the rows of a single tensor."""
    found = (
        _one_tensor(what, tensors, world, segments) if isinstance(tensors, Tensor) else _listed(what, tensors, world)
    )
    if found.x_Wn.dtype not in FLOATS:
        raise TypeError(f"{what}: got {found.x_Wn.dtype}; codecs take float32, float16 and bfloat16")
    if segments is not None and sum(found.lengths) != found.x_Wn.shape[1]:
        raise ValueError(
            f"{what}: segments={list(segments)} add up to {sum(segments)}, a worker has {found.x_Wn.shape[1]} values"
        )
    return found


def _one_tensor(what: str, x: Tensor, world: int, segments: Sequence[int] | None) -> Stack:
    if x.dim() == 0 or x.shape[0] != world:
        raise ValueError(f"{what}: the first dimension counts workers: it must be {world}, got shape {tuple(x.shape)}")
    x, shape = x.detach(), x.shape[1:]
    flat = x.reshape(world, shape.numel())
    return Stack(flat, list(segments or [flat.shape[1]]), lambda row: row.view(shape), is_one_tensor=True)


def _listed(what: str, workers: Sequence[Any], world: int) -> Stack:
    if len(workers) != world:
        raise ValueError(f"{what}: got a list of {len(workers)} for {world} workers; give one entry for each worker")
    rows = [[worker] if isinstance(worker, Tensor) else list(worker) for worker in workers]
    shapes = [[tuple(t.shape) for t in row] for row in rows]
    for worker, found in enumerate(shapes):
        if found != shapes[0]:
            raise ValueError(f"{what}: worker {worker} has shapes {found}, worker 0 {shapes[0]}; make them equal")
    if len({(t.dtype, t.device) for row in rows for t in row}) > 1:
        raise TypeError(f"{what}: all tensors of one call must have one dtype and one device")
    x = torch.stack([flat_row(row) for row in rows])
    return Stack(x, [t.numel() for t in rows[0]], _shaper(workers[0], rows[0]), is_one_tensor=False)


def flat_row(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors]) if tensors else torch.empty(0)


def _shaper(worker: Any, row: Sequence[Tensor]) -> Callable[[Tensor], Any]:
    shapes, ranges = [t.shape for t in row], segment_ranges([t.numel() for t in row])
    if isinstance(worker, Tensor):
        return lambda flat: flat.view(shapes[0])
    return lambda flat: [flat[low:high].view(shape) for shape, (low, high) in zip(shapes, ranges, strict=True)]
