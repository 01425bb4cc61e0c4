"""One bit a value: 1-bit SGD of CNTK (means of the negatives and of the rest) and sign with the mean magnitude."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.kernels.plan import TINY, Method, Plan
from narrowcast.kernels.reference import blocks


def _mean(part_NB: Tensor, count_N: Tensor, live_N: Tensor) -> Tensor:
    """Mean of each row's part; an empty one counts as one value. Scaled down before summing: no sum overflows."""
    width = float(blocks.power_of_two_above(part_NB.shape[1]))
    mean_N = (blocks.tree_sum(part_NB * (1.0 / width)) / count_N.clamp(min=1)) * width
    limit = torch.finfo(torch.float32).max
    return torch.where(live_N, mean_N.clamp(-limit, limit), 0.0)


def encode(plan: Plan, x: Tensor) -> tuple[Tensor, Tensor]:
    """Bits (1 where x >= 0), and for each block its two means (MEANS) or its mean magnitude (SIGN)."""
    x_NB = blocks.as_blocks(x, plan.block)
    count_N = blocks.counts(len(x), plan.block)
    top_N, finite_N = blocks.largest_magnitude(x_NB)
    live_N = top_N >= TINY
    safe_NB = torch.where(finite_N[:, None], x_NB, 0.0)
    bits = torch.where(finite_N[:, None], x_NB >= 0, False).flatten()[: len(x)].long()
    if plan.method is Method.SIGN:
        scales = _mean(safe_NB.abs(), count_N, live_N)
        return bits, torch.where(finite_N, scales, math.nan)
    negative_NB = safe_NB < 0
    negatives_N = negative_NB.sum(dim=1)
    low_N = _mean(torch.where(negative_NB, safe_NB, 0.0), negatives_N, live_N)
    high_N = _mean(torch.where(negative_NB, 0.0, safe_NB), count_N - negatives_N, live_N)
    pair_N2 = torch.stack([low_N, high_N], dim=1)
    return bits, torch.where(finite_N[:, None], pair_N2, math.nan).flatten()


def decode(plan: Plan, codes: Tensor, scales: Tensor) -> Tensor:
    bit_NB = blocks.as_blocks(codes, plan.block)
    if plan.method is Method.SIGN:
        value_NB = torch.where(bit_NB == 1, scales[:, None], -scales[:, None])
    else:
        low_N, high_N = scales.view(-1, 2).unbind(dim=1)
        value_NB = torch.where(bit_NB == 1, high_N[:, None], low_N[:, None])
    return value_NB.flatten()[: len(codes)]
