"""Error feedback and reduction out of encode and decode: what a fused kernel must equal, and what the CPU runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from narrowcast.kernels import native
from narrowcast.kernels.noise import Noise
from narrowcast.kernels.plan import AnyPlan, Plan
from narrowcast.kernels.reference.arithmetic import finished, still_owed, with_owed


def encode(
    kernels: ModuleType,
    plan: AnyPlan,
    x: Tensor,
    wire: Tensor,
    noise: Noise,
    scale: Tensor | None,
    residual: Tensor | None,
    unit: float,
) -> None:
    """Encode x, or x + residual * unit; then the residual is what was wanted and not sent, in units."""
    if residual is None:
        kernels.encode(plan, x, wire, noise, scale)
        return
    # the native library does this in one pass over memory, where no scale of the whole tensor is needed
    if (
        kernels is native
        and isinstance(plan, Plan)
        and scale is None
        and native.encode_owed(plan, x, wire, residual, unit, noise)
    ):
        return
    wanted = with_owed(x, residual, unit)
    kernels.encode(plan, wanted, wire, noise, scale)
    sent = torch.empty_like(wanted)
    kernels.decode(plan, wire, wanted.numel(), sent)
    residual.copy_(still_owed(wanted, sent, unit, residual))


def reduce(
    kernels: ModuleType,
    plan: AnyPlan,
    wires: Tensor | Sequence[Tensor],
    n: int,
    wire: Tensor,
    noise: Noise,
    scale: Tensor | None,
    residual: Tensor | None,
    unit: float,
    divide: float,
    multiply: float,
    out: Tensor | None,
) -> None:
    """Decode all wires into one float32 sum, in order; encode that."""
    if kernels is native and isinstance(plan, Plan) and scale is None:
        listed = list(wires)
        if native.reduce(plan, listed, n, wire, residual, unit, divide, multiply, out, noise):
            return
    total = torch.empty(n)
    for number, one in enumerate(wires):
        kernels.decode(plan, one, n, total, number > 0)
    encode(kernels, plan, finished(total, divide, multiply), wire, noise, scale, residual, unit)
    if out is not None:
        kernels.decode(plan, wire, n, out)
