"""Plain casts in torch: one plane, the values in another type. A finite value that is too large becomes the largest."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels.arithmetic import keeps_subnormals, plus
from narrowcast.kernels.noise import NO_NOISE, Noise
from narrowcast.kernels.plan import CastPlan

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` with finite values cut to what `dtype` holds; Inf and NaN stay."""
    limit = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= limit:
        return x
    # in float32: bfloat16 has no 65504, and the number next to it is Inf as float16
    cut = x.float().clamp(-limit, limit)
    return torch.where(x.isinf(), x.float(), cut)


def with_one_nan_(x: Tensor) -> Tensor:
    """Every NaN of x as the quiet one without sign and payload: casts of torch leave others on other machines."""
    lost = x.isnan()
    if bool(lost.any()):
        x.view(_BITS[x.dtype]).masked_fill_(lost, _NAN[x.dtype])
    return x


def put(out: Tensor, value: Tensor) -> Tensor:
    """Write float32 values; NaN has one pattern in 16 bits."""
    out.copy_(value)
    return out if out.dtype == torch.float32 else with_one_nan_(out)


@keeps_subnormals
def encode(plan: CastPlan, x: Tensor, wire: Tensor, noise: Noise = NO_NOISE, scale: Tensor | None = None) -> None:
    """See `kernels.ops.encode`."""
    dtype = plan.dtype
    aligned = wire if wire.data_ptr() % dtype.itemsize == 0 else torch.empty_like(wire)
    stored = aligned.view(dtype).copy_(x)
    # one cheap pass shows whether anything overflowed, or was not finite to begin with
    if not bool(stored.sum(dtype=torch.float32).isfinite()):
        with_one_nan_(stored.copy_(saturate(x, dtype)))
    if aligned is not wire:
        wire.copy_(aligned)


@keeps_subnormals
def decode(plan: CastPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """See `kernels.ops.decode`."""
    aligned = wire if wire.data_ptr() % plan.dtype.itemsize == 0 else wire.clone()
    value = with_one_nan_(aligned.view(plan.dtype).clone())
    if accumulate:
        value = plus(out.float(), value.float())
    put(out, saturate(value, out.dtype))
