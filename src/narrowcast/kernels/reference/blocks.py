"""Blocks: padding to whole ones, sums by a halving tree, planes of codes and of scales.

Codes of any width are one little-endian string of bits: code i takes bits i*b to i*b + b - 1, lowest bit first.

Shapes: N blocks, B values in each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.kernels.plan import Plan, Store

BF16_NAN = 0x7FC0


def as_blocks(x: Tensor, block: int) -> Tensor:
    """x_NB, the last block filled up with zeros. With block = 0 there is one."""
    block = block or max(len(x), 1)
    return torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block)


def counts(n: int, block: int) -> Tensor:
    """How many real values each block has."""
    full = torch.arange(0, n, block)
    return (n - full).clamp(max=block)


def power_of_two_above(block: int) -> int:
    return 1 << max(block - 1, 0).bit_length()


def tree_sum(x_NB: Tensor) -> Tensor:
    """Sum each row in the order that all implementations share: pad to a power of two, add the halves, repeat."""
    width = power_of_two_above(x_NB.shape[1])
    x_NB = torch.nn.functional.pad(x_NB, (0, width - x_NB.shape[1]))
    while width > 1:
        width //= 2
        x_NB = x_NB[:, :width] + x_NB[:, width:]
    return x_NB[:, 0]


def largest_magnitude(x_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitude of each block, and whether the block is finite (0 is returned where it is not)."""
    finite_N = torch.isfinite(x_NB).all(dim=1)
    top_N = x_NB.abs().amax(dim=1)
    return torch.where(finite_N, top_N, 0.0), finite_N


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for the scale of a block of zeros or of non-finite values."""
    return torch.where((scale == 0) | scale.isnan(), 0.0, 1.0 / scale)


def exponent_of(x: Tensor) -> Tensor:
    """floor(log2 x) of positive normal float32 numbers, from the exponent field."""
    return (x.view(torch.int32) >> 23) - 127


def ceil_exponent_of(x: Tensor) -> Tensor:
    return exponent_of(x) + (x.view(torch.int32) & 0x7FFFFF != 0).int()


def power_of_two(exponent: Tensor) -> Tensor:
    """2.0 ** exponent as float32, exact from -149 to 127."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).float()


def write_scales(plan: Plan, scale: Tensor, plane: Tensor) -> None:
    """Store scales, already rounded to what the plane holds, into bytes. NaN marks a non-finite block."""
    if plan.store is Store.E8M0:
        plane.copy_(
            torch.where(scale.isnan(), 255, torch.where(scale == 0, 0, exponent_of(scale) + 127)).to(torch.uint8)
        )
        return
    if plan.store is Store.BF16:
        # by the bits: torch's own cast writes other NaNs on other machines
        bits = torch.where(scale.isnan(), BF16_NAN, scale.view(torch.int32) >> 16)
        plane.copy_(bits.to(torch.int16).view(torch.uint8))
        return
    plane.copy_(torch.where(scale.isnan(), torch.full_like(scale, math.nan), scale).view(torch.uint8))


def read_scales(plan: Plan, plane: Tensor) -> Tensor:
    """The scales of a plane, as float32."""
    if plan.store is Store.E8M0:
        code = plane.int()
        return torch.where(code == 255, math.nan, power_of_two(code - 127))
    dtype = torch.bfloat16 if plan.store is Store.BF16 else torch.float32
    return plane.clone().view(dtype).float()


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 bytes of int64 codes; the last byte is filled with zero bits."""
    if bits == 8:
        return codes.to(torch.uint8)
    string = ((codes[:, None] >> torch.arange(bits)) & 1).flatten()
    string = torch.nn.functional.pad(string, (0, -len(string) % 8)).view(-1, 8)
    return (string << torch.arange(8)).sum(dim=1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The first n codes, as int64."""
    if bits == 8:
        return packed[:n].long()
    string = ((packed.long()[:, None] >> torch.arange(8)) & 1).flatten()[: n * bits].view(n, bits)
    return (string << torch.arange(bits)).sum(dim=1)
