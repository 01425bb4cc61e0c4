"""How blocks become codes and scales, and back: a pair of functions for each `Method`.

| method | a value is |
|---|---|
| scaled | level * scale: integers, floats and tables; one scale for each block, for the tensor, or a constant |
| affine | minimum + code * step, both float32, one pair for each block |
| signs | one bit: the mean of the negatives or of the rest (1-bit SGD of CNTK), or plus or minus the mean magnitude |
| nvfp4 | e2m1fn level * e4m3fn scale of 16 values * float32 scale of the tensor |
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.formats import FloatFormat
from narrowcast.kernels.plan import NVFP4_BLOCK_SCALE as BLOCK_SCALE
from narrowcast.kernels.plan import TINY, Method, Plan, Rule
from narrowcast.kernels.reference import blocks
from narrowcast.kernels.reference.rounding import codes_of, round_cpd, special_codes

AFFINE_LIMIT = 2.0**126
"""The range is cut here, so that maximum - minimum and code * step stay finite."""


def _scale_by_division(plan: Plan, top_N: Tensor, x_NB: Tensor) -> Tensor:
    if not plan.l2:
        return top_N / plan.target
    # scaled by a power of two first, so that squares neither overflow nor vanish
    exponent_N = blocks.exponent_of(top_N).clamp(-126, 126)
    small_NB = x_NB * blocks.power_of_two(-exponent_N)[:, None]
    # through double: torch's float32 square root is not always the nearest one
    norm_N = blocks.tree_sum(small_NB * small_NB).double().sqrt().float()
    return (norm_N / plan.target) * blocks.power_of_two(exponent_N)


def _scale_exponent(plan: Plan, top_N: Tensor) -> Tensor:
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
        scale_N = _scale_by_division(plan, safe_N, torch.where(finite_N[:, None], x_NB, 0.0))
        if plan.rounds_scale:
            scale_N = scale_N.to(torch.bfloat16).float()
            # rounded down, the largest value may come back as less than what counts as zero
            live_N = live_N & (scale_N * plan.target >= TINY)
        scale_N = scale_N.clamp(max=plan.max_scale)
    else:
        scale_N = blocks.power_of_two(_scale_exponent(plan, safe_N))
    return torch.where(finite_N, torch.where(live_N, scale_N, 0.0), math.nan)


def _scaled_codes(plan: Plan, x: Tensor, t: Tensor, random: Tensor | None) -> Tensor:
    if plan.cpd:
        assert isinstance(plan.format, FloatFormat)
        t = round_cpd(t, plan.format.exp_bits, plan.format.man_bits)
        # a carry out of the format lands on the code after the largest: Inf
        t = torch.where(t.abs() > plan.format.max, torch.copysign(torch.tensor(math.inf, dtype=torch.float32), t), t)
        return special_codes(plan.format, t, codes_of(plan.format, torch.where(t.isfinite(), t, 0.0), None))
    code = codes_of(plan.format, torch.where(x.isfinite(), t, 0.0), random)
    return special_codes(plan.format, x, code)


def encode_scaled(plan: Plan, x: Tensor, random: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes (int64, n) and scales (float32, one a block)."""
    if plan.constant is not None:
        return _scaled_codes(
            plan, x, x * (1.0 / torch.tensor(plan.unit_scale, dtype=torch.float32)), random
        ), torch.empty(0, dtype=torch.float32)
    x_NB = blocks.as_blocks(x, plan.block)
    scale_N = find_scales(plan, x_NB)
    if scale is not None:
        scale_N = torch.where(scale_N.isnan(), scale_N, scale.float())
    t_NB = x_NB * blocks.inverse(scale_N)[:, None]
    # the codes of a non-finite block are zero: its scale says so
    lost_NB = scale_N.isnan()[:, None].expand_as(x_NB)
    t = torch.where(lost_NB, 0.0, t_NB).flatten()[: len(x)]
    plain = torch.where(lost_NB, 0.0, x_NB).flatten()[: len(x)]
    return _scaled_codes(plan, plain, t, random), scale_N


def decode_scaled(plan: Plan, codes: Tensor, scale_N: Tensor) -> Tensor:
    levels = plan.format.levels.float()[codes]
    if plan.constant is not None:
        return levels * torch.tensor(plan.unit_scale, dtype=torch.float32)
    level_NB = blocks.as_blocks(levels, plan.block)
    return (level_NB * scale_N[:, None]).flatten()[: len(levels)]


def encode_affine(plan: Plan, x: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes, and (minimum, step) of each block, interleaved."""
    block = plan.block or max(len(x), 1)
    x_NB = blocks.as_blocks(x, block)
    real_NB = torch.arange(block) < blocks.counts(len(x), block)[:, None]
    finite_N = torch.isfinite(x_NB).all(dim=1)
    # adding zero turns a minimum of -0 into +0
    low_N = torch.where(real_NB, x_NB, math.inf).amin(dim=1).clamp(min=-AFFINE_LIMIT, max=AFFINE_LIMIT) + 0.0
    high_N = torch.where(real_NB, x_NB, -math.inf).amax(dim=1).clamp(min=-AFFINE_LIMIT, max=AFFINE_LIMIT)
    span_N = high_N - low_N
    step_N = torch.where(span_N >= TINY, span_N / plan.target, 0.0)
    t_NB = (x_NB - low_N[:, None]) * blocks.inverse(step_N)[:, None]
    t_NB = torch.where(finite_N[:, None], t_NB, 0.0)
    codes = codes_of(plan.format, t_NB.flatten()[: len(x)], random)
    pair_N2 = torch.stack([low_N, step_N], dim=1)
    return codes, torch.where(finite_N[:, None], pair_N2, math.nan).flatten()


def decode_affine(plan: Plan, codes: Tensor, scales: Tensor) -> Tensor:
    low_N, step_N = scales.view(-1, 2).unbind(dim=1)
    code_NB = blocks.as_blocks(codes.float(), plan.block)
    return (low_N[:, None] + code_NB * step_N[:, None]).flatten()[: len(codes)]


def _mean(part_NB: Tensor, count_N: Tensor, live_N: Tensor) -> Tensor:
    """Mean of each row's part; an empty one counts as one value. Scaled down before summing: no sum overflows."""
    width = float(blocks.power_of_two_above(part_NB.shape[1]))
    mean_N = (blocks.tree_sum(part_NB * (1.0 / width)) / count_N.clamp(min=1)) * width
    limit = torch.finfo(torch.float32).max
    return torch.where(live_N, mean_N.clamp(-limit, limit), 0.0)


def encode_signs(plan: Plan, x: Tensor) -> tuple[Tensor, Tensor]:
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


def decode_signs(plan: Plan, codes: Tensor, scales: Tensor) -> Tensor:
    bit_NB = blocks.as_blocks(codes, plan.block)
    if plan.method is Method.SIGN:
        value_NB = torch.where(bit_NB == 1, scales[:, None], -scales[:, None])
    else:
        low_N, high_N = scales.view(-1, 2).unbind(dim=1)
        value_NB = torch.where(bit_NB == 1, high_N[:, None], low_N[:, None])
    return value_NB.flatten()[: len(codes)]


def _nvfp4_scale(plan: Plan, top_N: Tensor) -> Tensor:
    """So that the largest block scale is the largest e4m3fn number; capped so that nothing decodes to Inf."""
    top = top_N.max()
    scale = (top / (plan.target * BLOCK_SCALE.max)).clamp(max=plan.max_scale)
    return torch.where(top >= TINY, scale, 0.0)


def encode_nvfp4(plan: Plan, x: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, e4m3fn codes of the block scales, and the tensor scale."""
    x_NB = blocks.as_blocks(x, plan.block)
    top_N, finite_N = blocks.largest_magnitude(x_NB)
    scale = _nvfp4_scale(plan, top_N)
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


def decode_nvfp4(plan: Plan, codes: Tensor, block_codes: Tensor, scale: Tensor) -> Tensor:
    step_N = BLOCK_SCALE.values.float()[block_codes] * scale
    level_NB = blocks.as_blocks(plan.format.values.float()[codes], plan.block)
    return (level_NB * step_N[:, None]).flatten()[: len(codes)]
