"""value = level * scale: integers, floats and tables, one scale for each block, for the tensor, or a constant."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.formats import FloatFormat
from narrowcast.kernels.plan import TINY, Plan, Rule
from narrowcast.kernels.reference import blocks
from narrowcast.kernels.reference.rounding import codes_of, round_cpd, special_codes


def _divided(plan: Plan, top_N: Tensor, x_NB: Tensor) -> Tensor:
    if not plan.l2:
        return top_N / plan.target
    # scaled by a power of two first, so that squares neither overflow nor vanish
    exponent_N = blocks.exponent_of(top_N).clamp(-126, 126)
    small_NB = x_NB * blocks.power_of_two(-exponent_N)[:, None]
    # through double: torch's float32 square root is not always the nearest one
    norm_N = blocks.tree_sum(small_NB * small_NB).double().sqrt().float()
    return (norm_N / plan.target) * blocks.power_of_two(exponent_N)


def _power(plan: Plan, top_N: Tensor) -> Tensor:
    if plan.rule is Rule.APS:
        return (blocks.ceil_exponent_of(top_N) - plan.top_exponent).clamp(*plan.exponents)
    if plan.rule is Rule.RCEIL:
        return blocks.ceil_exponent_of(top_N / plan.target).clamp(*plan.exponents)
    return (blocks.exponent_of(top_N) - plan.top_exponent).clamp(*plan.exponents)


def find_scales(plan: Plan, x_NB: Tensor) -> Tensor:
    """The scale of each block, rounded as it will be stored; 0 for a block of zeros, NaN for a non-finite one."""
    top_N, finite_N = blocks.largest_magnitude(x_NB)
    live_N = top_N >= TINY
    safe_N = torch.where(live_N, top_N, 1.0)
    if plan.rule is Rule.DIVIDE:
        scale_N = _divided(plan, safe_N, torch.where(finite_N[:, None], x_NB, 0.0))
        if plan.rounds_scale:
            scale_N = scale_N.to(torch.bfloat16).float()
            # rounded down, the largest value may come back as less than what counts as zero
            live_N = live_N & (scale_N * plan.target >= TINY)
        scale_N = scale_N.clamp(max=plan.max_scale)
    else:
        scale_N = blocks.power_of_two(_power(plan, safe_N))
    return torch.where(finite_N, torch.where(live_N, scale_N, 0.0), math.nan)


def _codes(plan: Plan, x: Tensor, t: Tensor, random: Tensor | None) -> Tensor:
    if plan.cpd:
        assert isinstance(plan.format, FloatFormat)
        t = round_cpd(t, plan.format.exp_bits, plan.format.man_bits)
        # a carry out of the format lands on the code after the largest: Inf
        t = torch.where(t.abs() > plan.format.max, torch.copysign(torch.tensor(math.inf), t), t)
        return special_codes(plan.format, t, codes_of(plan.format, torch.where(t.isfinite(), t, 0.0), None))
    code = codes_of(plan.format, torch.where(x.isfinite(), t, 0.0), random)
    return special_codes(plan.format, x, code)


def encode(plan: Plan, x: Tensor, random: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes (int64, n) and scales (float32, one a block)."""
    if plan.constant is not None:
        return _codes(plan, x, x * (1.0 / torch.tensor(plan.unit_scale)), random), torch.empty(0)
    x_NB = blocks.as_blocks(x, plan.block)
    scale_N = find_scales(plan, x_NB)
    if scale is not None:
        scale_N = torch.where(scale_N.isnan(), scale_N, scale.float())
    t_NB = x_NB * blocks.inverse(scale_N)[:, None]
    # the codes of a non-finite block are zero: its scale says so
    lost_NB = scale_N.isnan()[:, None].expand_as(x_NB)
    t = torch.where(lost_NB, 0.0, t_NB).flatten()[: len(x)]
    plain = torch.where(lost_NB, 0.0, x_NB).flatten()[: len(x)]
    return _codes(plan, plain, t, random), scale_N


def decode(plan: Plan, codes: Tensor, scale_N: Tensor) -> Tensor:
    levels = plan.format.levels.float()[codes]
    if plan.constant is not None:
        return levels * torch.tensor(plan.unit_scale)
    level_NB = blocks.as_blocks(levels, plan.block)
    return (level_NB * scale_N[:, None]).flatten()[: len(levels)]
