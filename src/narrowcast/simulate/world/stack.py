"""The tensors of all workers in the ways in which people have them, as one W x n tensor and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import Codec, largest_finite
from narrowcast.collectives import Coder, Scales, segment_ranges
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

    def coder(self, codec: Codec) -> Coder:
        return Coder(codec, self.lengths, self.x_Wn.dtype)

    def for_all(self, row: Tensor) -> Any:
        """The same row for every worker: views of one memory, since all hold the same bits."""
        if self.is_one_tensor:
            one = self.shaped(row)
            return one.expand(len(self.x_Wn), *one.shape)
        return [self.shaped(row) for _ in range(len(self.x_Wn))]


def stacked(what: str, tensors: Tensors, world: int, segments: Sequence[int] | None = None) -> Stack:
    """Check and stack. `segments` cuts the rows of a single tensor."""
    is_one = isinstance(tensors, Tensor)
    stack = _one_tensor(what, tensors, world, segments) if is_one else _listed(what, tensors, world)
    dtype, numel = stack.x_Wn.dtype, stack.x_Wn.shape[1]
    if dtype not in FLOATS:
        raise TypeError(f"{what}: got {dtype}; codecs take float32, float16 and bfloat16")
    if segments is not None and sum(stack.lengths) != numel:
        raise ValueError(f"{what}: segments={list(segments)} add up to {sum(segments)}, a worker has {numel} values")
    return stack


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
    for worker, own in enumerate(shapes):
        if own != shapes[0]:
            raise ValueError(f"{what}: worker {worker} has shapes {own}, worker 0 {shapes[0]}; make them equal")
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


def largest_WS(x_Wn: Tensor, segments: Sequence[int]) -> Tensor:
    """The largest finite magnitude of each segment of each worker's values, as float32."""
    parts = [x_Wn[:, low:high] for low, high in segment_ranges(segments)]
    if x_Wn.is_cpu:
        return torch.stack([torch.stack([largest_finite(row) for row in part]) for part in parts], dim=1)
    # without a look at the result: that would make the host wait for the device
    return torch.stack([_largest_W(part) for part in parts], dim=1)


def _largest_W(x_Wn: Tensor) -> Tensor:
    if not x_Wn.shape[1]:
        return x_Wn.new_zeros(len(x_Wn), dtype=torch.float32)
    return torch.where(x_Wn.isfinite(), x_Wn, 0.0).abs().amax(dim=1).float()


def own_scales(codec: Codec, top_WS: Tensor) -> list[Scales]:
    """By worker: the scales of its own segments, for codecs with one scale for a tensor."""
    # on the CPU, whose division is the one that counts
    scale_WS = codec.scale_of(top_WS.cpu().view(-1)).view(top_WS.shape).to(top_WS.device)
    return [list(scale_S.view(-1, 1).unbind()) for scale_S in scale_WS]
