"""Where roundings go wrong: every value of a format, every midpoint, both float32 neighbours, and what lies beyond."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from narrowcast.formats import Format

FLOAT32_MAX = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149


def with_neighbours(x: Tensor) -> Tensor:
    """x as float32, and the float32 on either side of each."""
    x = x.clamp(-FLOAT32_MAX, FLOAT32_MAX).float()
    ends = torch.tensor([math.inf, -math.inf])
    return torch.cat([x, torch.nextafter(x, ends[0]), torch.nextafter(x, ends[1])])


def beyond(fmt: Format) -> Tensor:
    """Through the first two binades above the largest value, in quarters of the last step, and far outside."""
    step = float(fmt.grid[-1] - fmt.grid[-2])
    near = fmt.max + step * torch.arange(0, 13, dtype=torch.float64) / 4
    far = fmt.max * torch.linspace(1, 4, 49, dtype=torch.float64)
    above = torch.cat([near, far, torch.tensor([FLOAT32_MAX], dtype=torch.float64)])
    return torch.cat([above, -above])


def hard_points(fmt: Format) -> Tensor:
    """Finite float32 points on which an implementation that is right is right everywhere else."""
    small = torch.tensor([0.0, -0.0, SMALLEST, -SMALLEST, 3 * SMALLEST, 1e-39, -1e-39, 2.0**-126], dtype=torch.float64)
    points = with_neighbours(torch.cat([fmt.grid, fmt.boundaries(), beyond(fmt), small]))
    return torch.cat([points[points.isfinite()], torch.tensor([-0.0])])


def sampled_points(fmt: Format, most: int = 2000) -> Tensor:
    """`hard_points`, thinned out evenly, and as many random ones of every magnitude that the format knows."""
    points = hard_points(fmt)
    generator = torch.Generator().manual_seed(fmt.bits)
    low, high = math.log2(fmt.smallest) - 2, math.log2(fmt.max) + 2
    power = low + (high - low) * torch.rand(most // 4, generator=generator)
    spread = torch.exp2(power) * torch.randn(most // 4, generator=generator).sign()
    chosen = points[torch.linspace(0, len(points) - 1, min(len(points), most)).long()]
    everything = torch.cat([chosen, spread, with_neighbours(beyond(fmt))])
    return everything[everything.isfinite()]


def same(a: Tensor | np.ndarray, b: Tensor | np.ndarray) -> bool:
    """Equal bit for bit, signs of zero included; any NaN equals any NaN."""
    return first_difference(a, b) is None


def first_difference(a: Tensor | np.ndarray, b: Tensor | np.ndarray) -> int | None:
    left, right = np.asarray(a), np.asarray(b)
    assert left.shape == right.shape
    nan = np.isnan(left) & np.isnan(right)
    unequal = ~nan & ((left != right) | (np.signbit(left) != np.signbit(right)))
    return int(np.flatnonzero(unequal)[0]) if unequal.any() else None


def assert_same(x: Tensor, got: Tensor | np.ndarray, wanted: Tensor | np.ndarray, what: object) -> None:
    """`same`, with the first point at which the two differ."""
    where = first_difference(got, wanted)
    if where is not None:
        raise AssertionError(
            f"{what}: {float(x[where])!r} -> {float(got[where])!r}, the oracle {float(wanted[where])!r}"
        )
