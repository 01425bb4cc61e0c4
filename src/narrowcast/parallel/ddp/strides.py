"""The order of values in a flat gradient: that of the parameter's memory, as DDP lays out its buckets."""

from __future__ import annotations

import torch
from torch import Tensor


def like(part: Tensor, parameter: Tensor) -> Tensor:
    """A view of a flat part of a bucket that has the parameter's shape, each value in its own place."""
    if is_dense(parameter):
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)


def flat(values: Tensor, parameter: Tensor) -> Tensor:
    """The way back: a copy of values of the parameter's shape, in the order of its memory."""
    part = torch.empty(values.numel(), dtype=values.dtype, device=values.device)
    like(part, parameter).copy_(values)
    return part


def is_dense(x: Tensor) -> bool:
    """Whether the memory holds the values of x and nothing else, in whatever order."""
    used = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in used:
        if stride != expected:
            return False
        expected *= size
    return True
