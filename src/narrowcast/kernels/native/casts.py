"""Plain casts by the C++ kernels, in the shape of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels import native
from narrowcast.kernels.noise import NO_NOISE, Noise
from narrowcast.kernels.plan import CastPlan


def encode(plan: CastPlan, x: Tensor, wire: Tensor, noise: Noise = NO_NOISE, scale: Tensor | None = None) -> None:
    """See `kernels.ops.encode`."""
    aligned = wire if wire.data_ptr() % plan.dtype.itemsize == 0 else torch.empty_like(wire)
    native.cast(x, aligned.view(plan.dtype))
    if aligned is not wire:
        wire.copy_(aligned)


def decode(plan: CastPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """See `kernels.ops.decode`."""
    aligned = wire if wire.data_ptr() % plan.dtype.itemsize == 0 else wire.clone()
    native.cast(aligned.view(plan.dtype), out, accumulate)
