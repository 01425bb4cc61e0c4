"""CUDA tensors without CUDA kernels: over the host and back. Slow, and `explain` says so."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from narrowcast.formats import Format
from narrowcast.kernels import unfused
from narrowcast.kernels.noise import Noise
from narrowcast.kernels.plan import AnyPlan


def _here(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def _back(to: Tensor | None, what: Tensor | None) -> None:
    if to is not None and what is not None:
        to.copy_(what)


def encode(kernels: ModuleType) -> Callable[..., None]:
    """`encode` of `kernels` on copies."""

    def run(
        plan: AnyPlan, x: Tensor, wire: Tensor, noise: Noise, scale: Tensor | None,
        residual: Tensor | None, unit: float,
    ) -> None:  # fmt: skip
        bytes_, owed = torch.empty(wire.shape, dtype=torch.uint8), _here(residual)
        unfused.encode(kernels, plan, x.cpu(), bytes_, noise, _here(scale), owed, unit)
        _back(wire, bytes_)
        _back(residual, owed)

    return run


def decode(kernels: ModuleType) -> Callable[..., None]:
    def run(plan: AnyPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool) -> None:
        values = out.cpu()
        kernels.decode(plan, wire.cpu(), n, values, accumulate)
        out.copy_(values)

    return run


def reduce(kernels: ModuleType) -> Callable[..., None]:
    def run(
        plan: AnyPlan, wires: Tensor, n: int, wire: Tensor, noise: Noise,
        scale: Tensor | None, residual: Tensor | None, unit: float, divide: float, multiply: float, out: Tensor | None,
    ) -> None:  # fmt: skip
        bytes_, owed, values = torch.empty(wire.shape, dtype=torch.uint8), _here(residual), _here(out)
        unfused.reduce(
            kernels, plan, wires.cpu().unbind(), n, bytes_, noise, _here(scale), owed, unit, divide, multiply, values
        )
        for to, what in ((wire, bytes_), (residual, owed), (out, values)):
            _back(to, what)

    return run


def round_to(kernels: ModuleType) -> Callable[..., Tensor]:
    def run(x: Tensor, fmt: Format, rounding: str, overflow: str, rules: str, seed: int, out: Tensor) -> Tensor:
        values = torch.empty(x.shape, dtype=x.dtype)
        return out.copy_(kernels.round_to(x.cpu(), fmt, rounding, overflow, rules, seed, values))

    return run
