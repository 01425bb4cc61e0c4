"""Auto Precision Scaling (Han, Demmel, You): one power-of-two scale for each tensor, agreed by all ranks.

The factor is as large as it can be while the sum over all ranks cannot overflow: with U = floor(log2(largest value of
the format)) and M = max over ranks of ceil(log2(W * largest gradient)), the scale on the wire is 2 ** (M - U).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.codecs import Codec, largest_finite
from narrowcast.collectives.algorithms.context import Call
from narrowcast.collectives.segments import segment_ranges
from narrowcast.kernels import TINY

NOTHING = -(1 << 20)
"""The exponent of a tensor without a finite value other than zero: below any real one, so that MAX ignores it."""


def exponents(tops: Sequence[Tensor], world: int) -> Tensor:
    """ceil(log2(world * top)) of each largest finite magnitude, as int32 where these are; exact in double."""
    top_S = torch.stack(list(tops))
    mantissa, power = torch.frexp(top_S.double() * world)
    return torch.where(top_S < TINY, NOTHING, torch.where(mantissa == 0.5, power - 1, power)).int()


def agreed_scales(call: Call, x: Tensor) -> list[Tensor | None]:
    """The scale of each segment; a zero tensor gets scale 0.

    One small MAX for all segments together. Bytes sent a rank: 4 (W-1) a segment. Nothing is read by the host.
    """
    found = exponents([largest_finite(x[low:high]) for low, high in segment_ranges(call.segments)], call.exchange.world)
    call.exchange.max_(found)
    return list(scales_of(call.codec, found).view(-1, 1).unbind())


def scales_of(codec: Codec, largest_S: Tensor) -> Tensor:
    """The scale of each segment for the largest exponent of all ranks; 0 where all have zeros."""
    return torch.where(largest_S == NOTHING, 0.0, codec.scale_of_exponent(largest_S))
