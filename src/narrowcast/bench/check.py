"""No speed without green bits: a codec is compared with the reference before it is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.kernels import Noise, Plan, TransformPlan, reference


def hard_values(n: int = 20_011) -> Tensor:
    """Zeros, ties, subnormals, many decades, huge values, and a few NaN and Inf, in stretches of an odd length."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(n, generator=generator)
    decades = torch.randint(-30, 30, (n,), generator=generator)
    x = torch.where(torch.arange(n) % 3 == 0, normal * 10.0**decades, normal)
    x[1000:2000] = 0.0
    x[2000:2100] = -0.0
    x[2100:3000] = 1e-39
    x[3000:4000] = torch.arange(1000) / 2 - 250
    x[4000] = torch.finfo(torch.float32).max
    x[9001], x[12_345], x[15_000] = torch.nan, torch.inf, -torch.inf
    return x


def failure(codec: Codec, device: torch.device | None = None) -> str | None:
    """What differs from the reference on hard values, or None. Casts are torch's own on a CPU and need no check."""
    plan = codec.plan_for(torch.float32)
    if not isinstance(plan, Plan | TransformPlan):
        return None
    x, kernels = hard_values(), reference.kernels(plan)
    n = x.numel()
    wire, expected = codec.encode(x.to(device), seed=3, stream=5), torch.empty(codec.nbytes(n), dtype=torch.uint8)
    kernels.encode(plan, x, expected, Noise(3, 5))
    if not torch.equal(wire.cpu(), expected):
        return f"{int((wire.cpu() != expected).sum())} of {n} bytes differ from the reference"
    out, plain = codec.decode(wire, n).cpu(), torch.empty(n)
    kernels.decode(plan, expected, n, plain)
    if not torch.equal(out.view(torch.int32)[~out.isnan()], plain.view(torch.int32)[~plain.isnan()]):
        return "decoded values differ from the reference"
    return _failure_of_sums(codec, plan, x, device)


def _failure_of_sums(codec: Codec, plan: Plan | TransformPlan, x: Tensor, device: torch.device | None) -> str | None:
    """Three ranks' wires, added in order and encoded again: against the same by the reference, step by step."""
    n, kernels = x.numel(), reference.kernels(plan)
    ranks = [x, x.flip(0), -x.roll(777)]
    wires = [torch.empty(codec.nbytes(n), dtype=torch.uint8) for _ in ranks]
    total, expected = torch.zeros(n), torch.empty(codec.nbytes(n), dtype=torch.uint8)
    for rank, (values, wire) in enumerate(zip(ranks, wires, strict=True)):
        kernels.encode(plan, values, wire, Noise(3, rank))
        plain = torch.empty(n)
        kernels.decode(plan, wire, n, plain)
        total = plain if rank == 0 else total + plain
    kernels.encode(plan, total / 3, expected, Noise(3, 9))
    total_wire = codec.reduce([wire.to(device) for wire in wires], n, seed=3, stream=9, divide=3.0).cpu()
    differing = int((total_wire != expected).sum())
    return f"{differing} of {n} bytes of a sum differ" if differing else None
