"""value = minimum + code * step, both float32, one pair for each block."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.kernels.plan import TINY, Plan
from narrowcast.kernels.reference import blocks
from narrowcast.kernels.reference.rounding import codes_of

LIMIT = 2.0**126
"""The range is cut here, so that maximum - minimum and code * step stay finite."""


def encode(plan: Plan, x: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes, and (minimum, step) of each block, interleaved."""
    block = plan.block or max(len(x), 1)
    x_NB = blocks.as_blocks(x, block)
    real_NB = torch.arange(block) < blocks.counts(len(x), block)[:, None]
    finite_N = torch.isfinite(x_NB).all(dim=1)
    # adding zero turns a minimum of -0 into +0
    low_N = torch.where(real_NB, x_NB, math.inf).amin(dim=1).clamp(min=-LIMIT, max=LIMIT) + 0.0
    high_N = torch.where(real_NB, x_NB, -math.inf).amax(dim=1).clamp(min=-LIMIT, max=LIMIT)
    span_N = high_N - low_N
    step_N = torch.where(span_N >= TINY, span_N / plan.target, 0.0)
    t_NB = (x_NB - low_N[:, None]) * blocks.inverse(step_N)[:, None]
    t_NB = torch.where(finite_N[:, None], t_NB, 0.0)
    codes = codes_of(plan.format, t_NB.flatten()[: len(x)], random)
    pair_N2 = torch.stack([low_N, step_N], dim=1)
    return codes, torch.where(finite_N[:, None], pair_N2, math.nan).flatten()


def decode(plan: Plan, codes: Tensor, scales: Tensor) -> Tensor:
    low_N, step_N = scales.view(-1, 2).unbind(dim=1)
    code_NB = blocks.as_blocks(codes.float(), plan.block)
    return (low_N[:, None] + code_NB * step_N[:, None]).flatten()[: len(codes)]
