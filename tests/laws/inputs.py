"""Inputs on which kernels and codecs go wrong, and wires taken apart without the code under test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs.planned import PlanCodec
from narrowcast.codecs.transformed import Transformed
from narrowcast.kernels.plan import Method, Plan, Store

SIZES = (0, 1, 2, 15, 16, 17, 31, 127, 128, 129, 255, 256, 257, 1000, 4099)
FLOAT32_MAX = torch.finfo(torch.float32).max
HUGE = 3.4e38


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def log_uniform(n: int, low: float, high: float, seed: int = 0) -> Tensor:
    """2**u, u uniform: every mantissa, many magnitudes."""
    return torch.exp2(
        low + (high - low) * torch.rand(n, generator=torch.Generator().manual_seed(seed)).double()
    ).float()


def hard_blocks(block: int, random: int = 64) -> Tensor:
    """One block each: zeros, negative zeros, ties, subnormals, the edge of TINY, huge numbers; then many magnitudes."""
    ramp = torch.arange(block).float()
    sign = 1.0 - 2.0 * (ramp % 2)
    special = [
        torch.zeros(block),
        torch.full((block,), -0.0),
        ramp / 2,
        -ramp / 4 + 3,
        sign * 127 / 254,
        torch.full((block,), 1e-39),
        sign * 2.0**-149,
        sign * 2.0**-100,
        torch.where(ramp == 3, torch.tensor(2.0**-100), sign * 2.0**-126),
        torch.full((block,), torch.nextafter(torch.tensor(2.0**-100), torch.tensor(0.0)).item()),
        sign * FLOAT32_MAX,
        torch.where(ramp == 1, torch.tensor(-HUGE), ramp),
        torch.where(ramp == 0, torch.tensor(FLOAT32_MAX), sign * 1e-38),
        torch.where(ramp == 2, torch.tensor(1e30), sign * 1e-30),
        normal(block, 1) * torch.exp(4 * normal(block, 2)),
        normal(block, 3) * (normal(block, 4) > 1),
    ]
    scale = log_uniform(random, -98, 120, seed=5).repeat_interleave(block)
    return torch.cat([*special, normal(random * block, seed=6) * scale])


def hard_values(block: int, n: int) -> Tensor:
    """n values: `hard_blocks`, repeated with other random parts or cut."""
    size = block or 256
    x = hard_blocks(size, random=max(4, -(-n // size)))
    return x[:n].clone()


def near_ties(n: int) -> Tensor:
    """Runs of 640 values whose magnitudes differ in the last bits alone, or hardly at all; some are zero or plain."""
    g = torch.Generator().manual_seed(11)
    last = torch.randint(0, 300, (n,), generator=g, dtype=torch.int32)
    ones, plain = (0x3F800000 + last).view(torch.float32), torch.randn(n, generator=g)
    kinds = (ones, last.view(torch.float32), plain, (3 * plain).round() / 8, torch.where(last < 9, plain, 0.0), plain)
    run = torch.arange(n) // 640 % len(kinds)
    return torch.stack(kinds).gather(0, run[None])[0] * torch.where(last % 2 == 0, 1.0, -1.0)


def with_specials(x: Tensor, every: int) -> Tensor:
    """NaN, Inf and -Inf scattered over some blocks."""
    x = x.clone()
    for place, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[every * (place + 1) :: every * 7] = value
    return x


def unaligned(x: Tensor) -> Tensor:
    """The same values at an address that is a multiple of the element's size and of nothing more."""
    room = torch.zeros(x.numel() + 1, dtype=x.dtype)
    room[1:] = x
    return room[1:]


@dataclass(frozen=True)
class Planes:
    """A wire taken apart."""

    codes: Tensor
    """Bytes."""
    scales: Tensor
    """Bytes."""
    tail: Tensor
    """Bytes of the tensor's own scale (nvfp4), or of a transform's side plane."""


def planes(codec: Codec, wire: Tensor, n: int) -> Planes:
    """By the words of docs: codes, padding to 4 bytes, scales; of a transform padding again, and its side plane."""
    nothing = wire[:0]
    if isinstance(codec, Transformed):
        count, side_bytes = codec.transform.count(n), codec.transform.side_bytes(n)
        inner = planes(codec.inner, wire[: codec.inner.nbytes(count)], count)
        return Planes(inner.codes, inner.scales, wire[len(wire) - side_bytes :])
    if not isinstance(codec, PlanCodec):
        return Planes(wire, nothing, nothing)
    plan = codec.plan
    code_bytes = (n * plan.bits + 7) // 8
    scale_bytes = plan.n_scales(n) * plan.store.value
    start = (code_bytes + 3) // 4 * 4 if scale_bytes else code_bytes
    return Planes(wire[:code_bytes], wire[start : start + scale_bytes], wire[start + scale_bytes :])


def unpacked(codes: Tensor, bits: int, n: int) -> Tensor:
    """The integers in a string of bits, by numpy."""
    string = np.unpackbits(codes.numpy(), bitorder="little")[: n * bits].reshape(n, bits).astype(np.int64)
    return torch.from_numpy(string @ (1 << np.arange(bits)))


def scales_of(plan: Plan, plane: Tensor) -> Tensor:
    """Scales as float32, one for each block (two for affine and means)."""
    assert plan.method is not Method.NVFP4
    data = plane.clone()
    if plan.store is Store.E8M0:
        exponent = data.int()
        return torch.where(exponent == 255, torch.nan, torch.exp2(exponent.double() - 127)).float()
    return data.view(torch.float32) if plan.store is Store.FP32 else data.view(torch.bfloat16).float()


def spread(scales: Tensor, block: int, n: int) -> Tensor:
    """The scale of each value."""
    return scales.repeat_interleave(block)[:n] if block else scales.expand(n)
