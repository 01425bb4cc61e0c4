"""The cast of CPD (Han et al.), corner cases included, for whoever compares with published numbers.

Differs from ours: overflow is tested before rounding (so a carry may leave the format), sticky bits of subnormals are
lost, float32 subnormals become zero, and with no mantissa bit ties go up.
"""

from __future__ import annotations

import torch
from torch import Tensor

FRACTION = 23
HIDDEN = 1 << FRACTION


def _round_even(significand: Tensor, drop: int) -> Tensor:
    """Round away `drop` low bits, ties to even of what is kept (the hidden bit counts, hence ties up for m = 0)."""
    half, kept = 1 << (drop - 1), significand >> drop
    rest = significand & ((1 << drop) - 1)
    return kept + ((rest > half) | ((rest == half) & (kept % 2 == 1)))


def round_cpd(x: Tensor, exp_bits: int, man_bits: int) -> Tensor:
    """`cast_precision` of CPD on float32."""
    bits = x.contiguous().view(torch.int32).long() & 0x7FFFFFFF
    exponent = (bits >> FRACTION) - 127
    bias = (1 << (exp_bits - 1)) - 1
    field = exponent + bias
    significand = (bits & (HIDDEN - 1)) | HIDDEN
    shift = torch.where(field <= 0, 1 - field, 0).clamp(max=31)
    kept = _round_even(significand >> shift, FRACTION - man_bits)
    power = torch.where(field <= 0, 1 - bias, exponent) - man_bits
    value = torch.ldexp(kept.double(), power)
    value = torch.where(field >= 2**exp_bits - 1, torch.inf, value)
    value = torch.where(bits >> FRACTION == 0, 0.0, value)
    value = torch.copysign(value, x.double()).float()
    unchanged = (x == 0) | ~torch.isfinite(x)
    return torch.where(unchanged, x, value)
