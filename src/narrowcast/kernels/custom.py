"""Codecs with code of their own, in the shape of the other implementations."""

from __future__ import annotations

from torch import Tensor

from narrowcast.kernels.noise import NO_NOISE, Noise
from narrowcast.kernels.plan import OwnPlan


def encode(plan: OwnPlan, x: Tensor, wire: Tensor, noise: Noise = NO_NOISE, scale: Tensor | None = None) -> None:
    """See `kernels.ops.encode`."""
    plan.encode(x, wire, noise, scale)


def decode(plan: OwnPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """See `kernels.ops.decode`."""
    plan.decode(wire, n, out, accumulate)
