"""Auto Precision Scaling (Han, Demmel, You): one power-of-two scale for each tensor, agreed by all ranks.

The factor is as large as it can be while the sum over all ranks cannot overflow: with U = floor(log2(largest value of
the format)) and M = max over ranks of ceil(log2(W * largest gradient)), the scale on the wire is 2 ** (M - U).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.codecs.scaled import Scaled, largest_finite
from narrowcast.collectives.call import Call
from narrowcast.collectives.coder import segment_ranges
from narrowcast.kernels.plan import TINY, Plan

NOTHING = -(1 << 20)
"""The exponent of a tensor without a finite value other than zero: below any real one, so that MAX ignores it."""


def exponent(x: Tensor, world: int) -> int:
    """ceil(log2(world * largest finite magnitude)); the product is exact in double."""
    top = float(largest_finite(x))
    if top < TINY:
        return NOTHING
    mantissa, power = math.frexp(world * top)
    return power - 1 if mantissa == 0.5 else power


def agreed_scales(call: Call, x: Tensor) -> list[Tensor | None]:
    """The scale of each segment; a zero tensor gets scale 0.

    One small MAX for all segments together. Bytes sent a rank: 4 (W-1) a segment.
    """
    assert isinstance(call.codec, Scaled)
    ranges = segment_ranges(call.segments)
    exponents = torch.tensor([exponent(x[low:high], call.exchange.world) for low, high in ranges], dtype=torch.int32)
    call.exchange.max_(exponents)
    return [scale_of(call.codec.plan, value) for value in exponents.tolist()]


def scale_of(plan: Plan, largest: int) -> Tensor:
    """The scale for the largest exponent of all ranks; 0 where all have zeros."""
    low, high = plan.exponents
    return torch.tensor([0.0 if largest == NOTHING else 2.0 ** min(max(largest - plan.top_exponent, low), high)])
