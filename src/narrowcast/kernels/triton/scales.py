"""The scale of a block: from a tile that holds it, or from what a first pass left where a block is larger than a tile.

The first pass writes, for each part of a block, the pattern of its largest magnitude and, for affine codecs, its
smallest and largest value; sums over large blocks come from `sums_kernel`, see encode.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowcast.kernels.triton.bits import (
    INFINITE,
    INTERPRETED,
    LARGEST,
    MAGNITUDE,
    TINY_BITS,
    bf16_pattern,
    bits_of,
    ceil_exponent_of,
    exponent_of,
    float_of,
    inverse,
    power_of_two,
    tree_sum,
)
from narrowcast.kernels.triton.codes import float_code, float_level
from narrowcast.kernels.triton.packing import count_negative, sign_words, sums_by_sign
from narrowcast.kernels.triton.planes import AFFINE, MEANS, NVFP4, SIGN, STORE_BF16, by_rows

DIVIDE = tl.constexpr(0)
FLOOR = tl.constexpr(1)
RCEIL = tl.constexpr(2)
APS = tl.constexpr(3)

AFFINE_LIMIT = tl.constexpr(2.0**126)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(v, J: tl.constexpr):
    """The pattern of the largest magnitude of each row; that of a NaN or an Inf is larger than any other."""
    if INTERPRETED or J.cols < 4:
        return tl.max(by_rows(bits_of(v) & MAGNITUDE, J), axis=1)
    else:
        # four that a thread has as floats: the sign is taken away in the same instruction
        four = tl.reshape(by_rows(tl.abs(v), J), (J.rows, J.cols // 4, 4))
        return tl.max(bits_of(tl.reduce(four, 2, larger)), axis=1)


@triton.jit
def safe_top(top):
    """The largest magnitude, and 1 where it is too small or not finite."""
    return float_of(tl.where((top >= TINY_BITS) & (top < INFINITE), top, 0x3F800000))


@triton.jit
def norm_exponent(top):
    return tl.minimum(tl.maximum(exponent_of(safe_top(top)), -126), 126)


@triton.jit
def norm_quotient(squares, top, P: tl.constexpr):
    """L2 norm / target, from the sum of squares of what was scaled down."""
    return tl.div_rn(tl.sqrt_rn(squares), P.target) * power_of_two(norm_exponent(top))


@triton.jit
def scaled_scale(top, quotient, P: tl.constexpr):
    """As it will be stored; 0 for a block of zeros, NaN for a non-finite one."""
    live = top >= TINY_BITS
    safe = safe_top(top)
    if P.rule == DIVIDE:
        scale = quotient
        if P.store == STORE_BF16:
            scale = float_of(bf16_pattern(scale, False) << 16)
            live = live & (bits_of(scale * P.target) >= TINY_BITS)
        scale = tl.minimum(scale, P.max_scale)
    elif (P.rule == FLOOR) and (P.low_exponent <= -100 - P.top_exponent) and (P.high_exponent >= 127 - P.top_exponent):
        # no scale that is used below leaves the range: the power of two in the largest magnitude, moved
        scale = float_of((top & INFINITE) - (P.top_exponent << 23))
    else:
        if P.rule == APS:
            exponent = ceil_exponent_of(safe) - P.top_exponent
        elif P.rule == RCEIL:
            exponent = ceil_exponent_of(tl.div_rn(safe, P.target))
        else:
            exponent = exponent_of(safe) - P.top_exponent
        scale = power_of_two(tl.minimum(tl.maximum(exponent, P.low_exponent), P.high_exponent))
    return tl.where(top < INFINITE, tl.where(live, scale, 0.0), float("nan"))


@triton.jit
def affine_scales(low, high, top, P: tl.constexpr):
    """Minimum and step."""
    low = tl.minimum(tl.maximum(low, -AFFINE_LIMIT), AFFINE_LIMIT) + 0.0
    high = tl.minimum(tl.maximum(high, -AFFINE_LIMIT), AFFINE_LIMIT)
    span = high - low
    step = tl.where(bits_of(span) >= TINY_BITS, tl.div_rn(span, P.target), 0.0)
    finite = top < INFINITE
    return tl.where(finite, low, float("nan")), tl.where(finite, step, float("nan"))


@triton.jit
def mean(total, count, top, P: tl.constexpr):
    """Of `count` values that were scaled down by the width of the tree."""
    value = tl.div_rn(total, tl.maximum(count, 1).to(tl.float32)) * P.tree_width
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    value = tl.where(top >= TINY_BITS, value, 0.0)
    return tl.where(top < INFINITE, value, float("nan"))


@triton.jit
def block_scales(top, tensor, P: tl.constexpr):
    """nvfp4: the step of each block, and the code of its scale."""
    finite = top < INFINITE
    size = float_of(tl.where(finite, top, 0))
    SMALLEST: tl.constexpr = 2.0 ** (1 - P.block_codes.bias - P.block_codes.man)
    ideal = tl.maximum(tl.div_rn(size, P.target) * inverse(tensor), SMALLEST)
    code = float_code(ideal, 0, P.block_codes, False)
    code = tl.where(finite, code, P.block_codes.nan_code)
    return float_level(code, P.block_codes) * tensor, code


@triton.jit
def tile_scales(v, top, rem, mask, tensor, P: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr):
    """Both scales of each row of a tile whose rows are blocks, and whose largest magnitudes have the patterns `top`."""
    if P.method == NVFP4:
        return block_scales(top, tensor, P)
    elif P.method == AFFINE:
        low = v
        high = v
        if MASKED:
            low = tl.where(mask, v, float("inf"))
            high = tl.where(mask, v, float("-inf"))
        return affine_scales(tl.min(by_rows(low, J), axis=1), tl.max(by_rows(high, J), axis=1), top, P)
    elif (P.method == MEANS) | (P.method == SIGN):
        count = tl.minimum(tl.maximum(rem - tl.arange(0, J.rows) * J.step, 0), J.step)
        small = by_rows(v, J) * (1.0 / P.tree_width)
        if P.method == SIGN:
            level = mean(tree_sum(tl.abs(small), J.rows, J.cols, J.levels), count, top, P)
            return level, level
        else:
            negatives = count_negative(v, J, MASKED)
            # the largest magnitude shows a NaN
            if (J.each == 32) and (J.cols == 64) and not MASKED:
                low, high = sums_by_sign(small, sign_words(v, J), J)
                return mean(low, negatives, top, P), mean(high, count - negatives, top, P)
            low = tree_sum(tl.minimum(small, 0.0), J.rows, J.cols, J.levels)
            high = tree_sum(tl.maximum(small, 0.0), J.rows, J.cols, J.levels)
            return mean(low, negatives, top, P), mean(high, count - negatives, top, P)
    else:
        if P.l2:
            small = by_rows(v, J) * power_of_two(0 - norm_exponent(top))[:, None]
            quotient = norm_quotient(tree_sum(small * small, J.rows, J.cols, J.levels), top, P)
        else:
            quotient = tl.div_rn(safe_top(top), P.target)
        scale = scaled_scale(top, quotient, P)
        return scale, scale


@triton.jit
def parts_top(parts, block, count, J: tl.constexpr):
    """The pattern of a block's largest magnitude, shape (1,)."""
    number = tl.arange(0, J.parts)
    tops = tl.load(parts + block * count + number, mask=number < count, other=0)
    return tl.max(tops, axis=0, keep_dims=True)


@triton.jit
def parts_ends(parts, block, blocks, count, J: tl.constexpr):
    """Its smallest and largest value, shape (1,) each."""
    number = tl.arange(0, J.parts)
    here = parts + blocks * count + block * count + number
    low = tl.load(here, mask=number < count, other=0x7F800000)
    high = tl.load(here + blocks * count, mask=number < count, other=-8388608)  # -Inf
    return tl.min(float_of(low), axis=0, keep_dims=True), tl.max(float_of(high), axis=0, keep_dims=True)


@triton.jit
def tensor_scale(top, P: tl.constexpr):
    """nvfp4: that of the whole tensor, from its finite blocks."""
    LARGEST_BLOCK: tl.constexpr = P.block_codes.high
    scale = tl.minimum(tl.div_rn(float_of(top), P.target * LARGEST_BLOCK), P.max_scale)
    return tl.where(top >= TINY_BITS, scale, 0.0)


@triton.jit
def column_tree(sums, which, block, blocks, J: tl.constexpr):
    """The rest of a halving tree: J.columns sums of a block, shape (1,)."""
    number = tl.arange(0, J.columns)
    columns = float_of(tl.load(sums + (which * blocks + block) * J.columns + number))
    return tree_sum(tl.reshape(columns, (1, J.columns)), 1, J.columns, J.column_levels)


@triton.jit
def wide_scales(parts, sums, given_scale, block, blocks, count, members, P: tl.constexpr, J: tl.constexpr):
    """Both scales of a block that is larger than a tile, shape (1,) each."""
    top = parts_top(parts, block, count, J)
    if P.method == AFFINE:
        low, high = parts_ends(parts, block, blocks, count, J)
        return affine_scales(low, high, top, P)
    elif P.method == SIGN:
        level = mean(column_tree(sums, 0, block, blocks, J), members, top, P)
        return level, level
    elif P.method == MEANS:
        number = tl.arange(0, J.columns)
        negatives = tl.sum(tl.load(sums + (2 * blocks + block) * J.columns + number), axis=0, keep_dims=True)
        low = mean(column_tree(sums, 0, block, blocks, J), negatives, top, P)
        return low, mean(column_tree(sums, 1, block, blocks, J), members - negatives, top, P)
    else:
        if P.l2:
            quotient = norm_quotient(column_tree(sums, 0, block, blocks, J), top, P)
        else:
            quotient = tl.div_rn(safe_top(top), P.target)
        scale = scaled_scale(top, quotient, P)
        if J.given_scale:
            scale = tl.where(top < INFINITE, tl.load(given_scale), scale)
        return scale, scale
