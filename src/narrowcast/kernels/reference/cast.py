"""Plain casts in torch: one plane, the values in another type. A finite value that is too large becomes the largest."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels.noise import NO_NOISE, Noise
from narrowcast.kernels.plan import CastPlan


def saturating(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` with finite values cut to what `dtype` holds; Inf and NaN stay."""
    limit = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= limit:
        return x
    # in float32: bfloat16 has no 65504, and the number next to it is Inf as float16
    cut = x.float().clamp(-limit, limit)
    return torch.where(x.isinf(), x.float(), cut)


def encode(plan: CastPlan, x: Tensor, wire: Tensor, noise: Noise = NO_NOISE, scale: Tensor | None = None) -> None:
    """See `kernels.ops.encode`."""
    dtype = plan.dtype
    aligned = wire if wire.data_ptr() % dtype.itemsize == 0 else torch.empty_like(wire)
    stored = aligned.view(dtype).copy_(x)
    # one cheap pass tells whether anything overflowed, or was not finite to begin with
    if dtype != x.dtype and not bool(stored.sum(dtype=torch.float32).isfinite()):
        stored.copy_(saturating(x, dtype))
    if aligned is not wire:
        wire.copy_(aligned)


def decode(plan: CastPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """See `kernels.ops.decode`."""
    aligned = wire if wire.data_ptr() % plan.dtype.itemsize == 0 else wire.clone()
    value = aligned.view(plan.dtype)
    if accumulate and out.dtype == torch.float32:
        out.add_(value)
        return
    if accumulate:
        value = out.float() + value.float()
    out.copy_(value if value.dtype == out.dtype else saturating(value, out.dtype))
