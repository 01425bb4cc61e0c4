"""Auto Precision Scaling (Han, Demmel, You): one power-of-two scale for each tensor, agreed by all ranks.

The factor is as large as it can be while the sum over all ranks cannot overflow: with U = floor(log2(largest value of
the format)) and M = max over ranks of ceil(log2(W * largest gradient)), the scale on the wire is 2 ** (M - U).
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.codecs import Codec, largest_finite
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.segments import Coder
from narrowcast.kernels import TINY

NOTHING = -(1 << 20)
"""The exponent of a tensor without a finite value other than zero: below any real one, so that MAX ignores it."""


def exponents(top: Tensor, world: int) -> Tensor:
    """ceil(log2(world * top)) of each largest finite magnitude, as int32 where these are; exact in double."""
    mantissa, power = torch.frexp(top.double() * world)
    return torch.where(top < TINY, NOTHING, torch.where(mantissa == 0.5, power - 1, power)).int()


def scales_of(codec: Codec, largest_S: Tensor) -> Tensor:
    """The scale of each segment for the largest exponent of all ranks; 0 where all have zeros."""
    return torch.where(largest_S == NOTHING, 0.0, codec.scale_of_exponent(largest_S))


def agreed_scales(coder: Coder, exchange: Exchange, x: Tensor) -> list[Tensor | None]:
    """On a rank: the scale of each segment; a zero tensor gets scale 0.

    One small MAX for all segments together. Bytes sent a rank: 4 (W-1) a segment. Nothing is read by the host.
    """
    top_S = torch.stack([largest_finite(x[low:high]) for low, high in coder.segments])
    largest_S = exponents(top_S, exchange.world)
    exchange.max_(largest_S)
    return list(scales_of(coder.codec, largest_S).view(-1, 1).unbind())


def agreed_scale_S(codec: Codec, top_WS: Tensor) -> Tensor:
    """In one process: the same, from the largest finite magnitude of each worker's segments."""
    return scales_of(codec, exponents(top_WS, len(top_WS)).amax(dim=0))
