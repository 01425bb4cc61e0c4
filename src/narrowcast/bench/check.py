"""No speed without green bits: a codec is compared with the reference before it is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.kernels import CastPlan, CustomPlan, Noise, Plan, TransformPlan, reference


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
    if isinstance(plan, CastPlan | CustomPlan):
        return None
    x, plain = hard_values(), reference.kernels(plan)
    n = x.numel()
    wire, expected = codec.encode(x.to(device), seed=3, stream=5), torch.empty(codec.nbytes(n), dtype=torch.uint8)
    plain.encode(plan, x, expected, Noise(3, 5))
    if not torch.equal(wire.cpu(), expected):
        return f"{int((wire.cpu() != expected).sum())} of {n} bytes differ from the reference"
    out, exact = codec.decode(wire, n).cpu(), torch.empty(n)
    plain.decode(plan, expected, n, exact)
    if not torch.equal(out.view(torch.int32)[~out.isnan()], exact.view(torch.int32)[~exact.isnan()]):
        return "decoded values differ from the reference"
    return _failure_of_sums(codec, plan, x, device)


def _failure_of_sums(codec: Codec, plan: Plan | TransformPlan, x: Tensor, device: torch.device | None) -> str | None:
    """Three ranks' wires, added in order and encoded again: against the same by the reference, step by step."""
    n, plain = x.numel(), reference.kernels(plan)
    ranks = [x, x.flip(0), -x.roll(777)]
    wires = [torch.empty(codec.nbytes(n), dtype=torch.uint8) for _ in ranks]
    total, expected = torch.zeros(n), torch.empty(codec.nbytes(n), dtype=torch.uint8)
    for rank, (values, wire) in enumerate(zip(ranks, wires, strict=True)):
        plain.encode(plan, values, wire, Noise(3, rank))
        exact = torch.empty(n)
        plain.decode(plan, wire, n, exact)
        total = exact if rank == 0 else total + exact
    plain.encode(plan, total / 3, expected, Noise(3, 9))
    total_wire = codec.reduce([wire.to(device) for wire in wires], n, seed=3, stream=9, divide=3.0).cpu()
    differing = int((total_wire != expected).sum())
    return f"{differing} of {n} bytes of a sum differ" if differing else None
