"""NVFP4: e2m1fn levels, an e4m3fn scale for each 16 values, one float32 scale for the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels.plan import NVFP4_BLOCK_SCALE as BLOCK_SCALE
from narrowcast.kernels.plan import TINY, Plan
from narrowcast.kernels.reference import blocks
from narrowcast.kernels.reference.rounding import codes_of


def tensor_scale(plan: Plan, top_N: Tensor) -> Tensor:
    """So that the largest block scale is the largest e4m3fn number; capped so that nothing decodes to Inf."""
    top = top_N.max()
    scale = (top / (plan.target * BLOCK_SCALE.max)).clamp(max=plan.max_scale)
    return torch.where(top >= TINY, scale, 0.0)


def encode(plan: Plan, x: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, e4m3fn codes of the block scales, and the tensor scale."""
    x_NB = blocks.as_blocks(x, plan.block)
    top_N, finite_N = blocks.largest_magnitude(x_NB)
    scale = tensor_scale(plan, top_N)
    ideal_N = (top_N / plan.target) * blocks.inverse(scale)
    # never below the smallest: a block much weaker than the rest keeps something
    ideal_N = ideal_N.clamp(min=BLOCK_SCALE.smallest)
    code_N = codes_of(BLOCK_SCALE, ideal_N, None)
    step_N = BLOCK_SCALE.values.float()[code_N] * scale
    t_NB = x_NB * blocks.inverse(step_N)[:, None]
    t_NB = torch.where(finite_N[:, None], t_NB, 0.0)
    codes = codes_of(plan.format, t_NB.flatten()[: len(x)], random)
    assert BLOCK_SCALE.nan_code is not None
    return codes, torch.where(finite_N, code_N, BLOCK_SCALE.nan_code), scale


def decode(plan: Plan, codes: Tensor, block_codes: Tensor, scale: Tensor) -> Tensor:
    step_N = BLOCK_SCALE.values.float()[block_codes] * scale
    level_NB = blocks.as_blocks(plan.format.values.float()[codes], plan.block)
    return (level_NB * step_N[:, None]).flatten()[: len(codes)]
