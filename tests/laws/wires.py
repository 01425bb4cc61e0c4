"""Wires that no encoder makes: products that leave float32, scales below zero, sums of -0."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from narrowcast.kernels import ops
from narrowcast.kernels.plan import Method, Plan, Store

EXPONENTS = ((0, 1, 100, 127, 239, 240), (0, 240, 241), (253, 254), (127, 255))
"""Bytes of scales that are powers of two: 2**14 times those from 241 on leave float32, 6 times those from 253 on."""
TENSOR_SCALES = (1.0, -0.0, 1e-42, 2.0**103, 2.0**104, -(2.0**119), float("inf"), float("nan"))
MEANS = (-0.0, -0.0, -0.0, 0.0, 1.0, -1.0)


def any_bytes(plan: Plan, n: int, world: int) -> Tensor:
    rows = ops.aligned_rows(world, plan.layout(n).nbytes)
    return rows.copy_(torch.randint(0, 256, rows.shape, generator=torch.Generator().manual_seed(5)))


def hard_wires(plan: Plan, n: int, world: int) -> Iterator[tuple[str, Tensor]]:
    """Any codes, under scales that are hard for a plan. n is a multiple of its block."""
    yield "any bytes", any_bytes(plan, n, world)
    begin = plan.layout(n).scales
    if plan.method is Method.NVFP4:
        for scale in TENSOR_SCALES:
            rows, at = any_bytes(plan, n, world), plan.layout(n).tensor_scale
            rows[:, at : at + 4] = torch.tensor([scale]).view(torch.uint8)
            yield f"tensor scale {scale}", rows
    elif plan.method is Method.MEANS:
        rows, size = any_bytes(plan, n, world), 8 * n // plan.block
        rows[:, begin : begin + size] = _some(MEANS, (world, size // 4), torch.float32).view(torch.uint8)
        yield "means of -0", rows
    elif plan.constant is None and plan.store is Store.E8M0:
        for bytes_ in EXPONENTS:
            rows, size = any_bytes(plan, n, world), plan.n_scales(n)
            rows[:, begin : begin + size] = _some(bytes_, (world, size), torch.uint8)
            yield f"scales {bytes_}", rows


def _some(choices: tuple[float, ...], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    which = torch.randint(0, len(choices), shape, generator=torch.Generator().manual_seed(6))
    return torch.tensor(choices, dtype=dtype)[which]
